"""A real Prometheus scrapes a real worker: every panel of the dashboard has data, no alert fires.

Needs Debian's package `prometheus`; the image that compose uses is a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import signal
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.docs_tables import ROOT
from ops.worker_process import run_worker
from tests.redis_servers import free_port
from tokenbus import AsyncClient
from tokenbus.errors import TokenbusError

PROMETHEUS = shutil.which("prometheus")
MONITORING = ROOT / "ops" / "monitoring"
LOAD_S = 8.0

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus (Debian: prometheus)")


@asynccontextmanager
async def prometheus(directory: Path, target: str) -> AsyncIterator[str]:
    """Our configuration with this one target in the place of the look-up; its address."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    [scrape] = config["scrape_configs"]
    del scrape["dns_sd_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    shutil.copy(MONITORING / "alerts.yml", directory)
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (directory / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(PROMETHEUS),
            f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address={address}",
            stderr=log,
        )
    try:
        async with asyncio.timeout(30):
            while not await is_up(f"http://{address}"):
                assert process.returncode is None, (directory / "prometheus.log").read_text()
                await asyncio.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def ask(address: str, path: str, **query: str) -> Any:
    url = f"{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"

    def fetch() -> Any:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    return await asyncio.to_thread(fetch)


async def is_up(address: str) -> bool:
    with contextlib.suppress(OSError):
        targets = await ask(address, "targets", state="active")
        return [target["health"] for target in targets["activeTargets"]] == ["up"]
    return False


async def keep_busy(client: AsyncClient) -> None:
    while True:
        async for _ in client.generate("ab", max_tokens=20, ignore_eos=True):
            pass


async def test_every_panel_has_data_and_no_alert_fires(tmp_path: Path) -> None:
    dashboard = json.loads((MONITORING / "grafana/dashboards/tokenbus.json").read_text())
    arguments = ("--model", "fake", "--set", "fake.step_ms=5")
    async with (
        run_worker(tmp_path / "data", arguments) as worker,
        prometheus(tmp_path, worker.ready["http"].removeprefix("http://")) as address,
        AsyncClient(zmq=worker.ready["zmq"]) as over_zmq,
        AsyncClient(redis=worker.ready["redis"]) as over_redis,
    ):
        load = [asyncio.create_task(keep_busy(client)) for client in (over_zmq, over_redis)]
        with pytest.raises(TokenbusError):
            async for _ in over_zmq.generate("a" * 5_000):
                pass
        await asyncio.sleep(LOAD_S)
        empty = []
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"].replace("$__rate_interval", "5s")
                found = await ask(address, "query", query=expression.replace("$instance", ".*"))
                values = [float(series["value"][1]) for series in found["result"]]
                if not values or any(map(math.isnan, values)):
                    empty.append((panel["title"], target["expr"]))
        # A series that begins with its first event has no rate before the second scrape.
        assert [title for title, _ in empty if title != "Refused, by code"] == []
        found = await ask(address, "rules", type="alert")
        rules = [rule for group in found["groups"] for rule in group["rules"]]
        [group] = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
        assert [rule["name"] for rule in rules] == [rule["alert"] for rule in group["rules"]]
        assert {(rule["health"], rule["state"]) for rule in rules} == {("ok", "inactive")}
        for task in load:
            task.cancel()
