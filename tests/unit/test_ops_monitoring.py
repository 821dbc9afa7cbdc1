"""Alerts and dashboard agree with the code: they use metrics and labels that exist, and parse."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.metrics_catalogue import BY_NAME, CATALOGUE, Kind
from ops.docs_tables import ROOT

MONITORING = ROOT / "ops" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana/dashboards/tokenbus.json").read_text())
ALERTS = yaml.safe_load((MONITORING / "alerts.yml").read_text())
# From the client library's collector of the process.
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
FROM_PROMETHEUS = {"instance", "job", "le", "alertname"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alert_expressions() -> list[str]:
    return [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def metrics_in(expression: str) -> set[str]:
    """Names of metrics of the catalogue, without prefix and histogram suffix."""
    names = set()
    for name in re.findall(r"\btokenbus_(\w+)", expression):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        is_histogram = base in BY_NAME and BY_NAME[base].kind is Kind.HISTOGRAM
        names.add(base if is_histogram else name)
    return names


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *alert_expressions()])
def test_an_expression_uses_metrics_and_labels_that_exist(expression: str) -> None:
    names = metrics_in(expression)
    assert names - BY_NAME.keys() - PROCESS == set()
    known = FROM_PROMETHEUS | {label for name in names & BY_NAME.keys()
                               for label in BY_NAME[name].labels}  # fmt: skip
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",")}
    assert used - known == set()


def test_the_dashboard_and_the_alerts_leave_out_no_metric() -> None:
    """A metric that nobody looks at is better gone."""
    expressions = " ".join([*dashboard_expressions(), *alert_expressions()])
    assert {metric.name for metric in CATALOGUE} - metrics_in(expressions) == {"engine_up"}


def test_counters_are_named_as_prometheus_wants() -> None:
    for metric in CATALOGUE:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert {"job", "tenant", "client"}.isdisjoint(metric.labels)
    assert len(BY_NAME) == len(CATALOGUE)


def test_panels_fit_their_grid_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert taken.isdisjoint(cells)
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_provisioned_names_are_those_that_the_dashboard_uses() -> None:
    folder = MONITORING / "grafana/provisioning"
    source = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"][0]
    used = {panel["datasource"]["uid"] for panel in panels()}
    used |= {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]}
    used |= {v["datasource"]["uid"] for v in DASHBOARD["templating"]["list"]}
    assert used == {source["uid"]}
    provider = yaml.safe_load((folder / "dashboards/tokenbus.yml").read_text())["providers"][0]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    assert mounts["./ops/monitoring/grafana/dashboards"] == provider["options"]["path"]
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).name in {p.name for p in (MONITORING / "grafana/dashboards").iterdir()}


def test_prometheus_scrapes_the_port_that_compose_gives_the_workers() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    [found] = config["scrape_configs"][0]["dns_sd_configs"]
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    [name] = found["names"]
    assert services[name]["environment"]["TOKENBUS_HTTP"] == f"0.0.0.0:{found['port']}"
    assert f":{found['port']}/ready" in " ".join(services[name]["healthcheck"]["test"])


def test_every_alert_is_in_the_operator_s_table() -> None:
    text = (ROOT / "docs/OPERATIONS.md").read_text()
    alerts = {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]}
    assert set(re.findall(r"^\| `(Tokenbus\w+)`", text, re.MULTILINE)) == alerts


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_configuration_and_alerts() -> None:
    promtool("check", "config", str(MONITORING / "prometheus.yml"))
    promtool("test", "rules", str(MONITORING / "alerts_test.yml"))


@needs_promtool
def test_promtool_parses_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for number, expression in enumerate(dashboard_expressions()):
        plain = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
        rules.append({"record": f"panel:{number}", "expr": plain})
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))
