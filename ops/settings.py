"""The settings of a worker and of the client commands: one typed tree, read once, frozen.

Precedence: flag > environment `TOKENBUS_*` (`TOKENBUS_ENGINE__MAX_NUM_SEQS` for a key in a section)
> `tokenbus.toml` > default. The processes never see this tree; they get frozen configurations.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from broker.config import BrokerConfig, QueueConfig, RedisConfig, ZmqConfig
from broker.http_server import split_address
from engine.config import EngineConfig, FakeModel
from ops.exit_codes import CommandError, ExitCode
from ops.models import DEFAULT_MODEL, ResolvedModel
from ops.settings_sections import (
    EngineSettings,
    FakeSettings,
    GatewaySettings,
    LimitsSettings,
    StreamsSettings,
)
from tokenbus.errors import InvalidField
from tokenbus.keys import Keys

PREFIX = "TOKENBUS_"
# Read elsewhere, so not settings of this tree.
_OTHER_VARIABLES = {"TOKENBUS_CACHE", "TOKENBUS_CONFIG", "TOKENBUS_TORCH_INDEX"}
FAKE_MODEL = "fake"

_REDIS_SCHEMES = (  # broker/streams/address.py
    *("redis", "redis+sentinel", "redis+cluster"),
    *("rediss", "rediss+sentinel", "rediss+cluster"),
    "unix",
)
_ZMQ_SCHEMES = ("tcp", "ipc")


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/tokenbus`, which is usually `~/.local/share/tokenbus`."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "tokenbus"


class Settings(BaseSettings):
    """Everything that can be set. `load` is the way to make one."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    model: str = Field(
        default=DEFAULT_MODEL, min_length=1, description="directory, .gguf, hub id or name"
    )
    queue: str = Field(default="default", description="name of the queue, part of every Redis key")
    redis: SecretStr = Field(default=SecretStr("embedded"), description="URL, `embedded` or `none`")
    zmq: str = Field(default="tcp://127.0.0.1:5555", description="endpoint to bind, or `none`")
    http: str = Field(
        default="127.0.0.1:0", description="probes and metrics; port 0: a free one; or `none`"
    )
    data_dir: Path = Field(default_factory=default_data_dir, description="data and addresses")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where the model runs"
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="time running jobs get on shutdown"
    )
    engine_hang_ms: int = Field(
        default=60_000,
        ge=1_000,
        description="an engine silent this long, and for ten of its longest steps, is killed",
    )
    ring_bytes: int = Field(
        default=16 << 20, ge=1 << 16, description="size of each ring between broker and engine"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="log level"
    )
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: readable on a terminal, JSON lines elsewhere"
    )
    streams: StreamsSettings = StreamsSettings()
    gateway: GatewaySettings = GatewaySettings()
    limits: LimitsSettings = LimitsSettings()
    engine: EngineSettings = EngineSettings()
    fake: FakeSettings = FakeSettings()

    @field_validator("queue")
    @classmethod
    def _check_queue(cls, value: str) -> str:
        try:
            return Keys(value).queue
        except InvalidField:
            raise ValueError("use 1 to 64 letters, digits, '.', '_' or '-'") from None

    @field_validator("redis")
    @classmethod
    def _check_redis(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value()
        if text not in ("embedded", "none") and urlsplit(text).scheme not in _REDIS_SCHEMES:
            raise ValueError(
                "use redis://host:6379/0, rediss://..., unix://..., redis+sentinel://..., "
                "redis+cluster://..., embedded or none"
            )
        return value

    @field_validator("zmq")
    @classmethod
    def _check_zmq(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if value != "none" and not (separator and rest and scheme in _ZMQ_SCHEMES):
            raise ValueError("use tcp://127.0.0.1:5555 (port 0: a free one), ipc://path or none")
        return value

    @field_validator("http")
    @classmethod
    def _check_http(cls, value: str) -> str:
        try:
            if value != "none":
                split_address(value)
        except ValueError:
            raise ValueError("use 127.0.0.1:9464 (port 0: a free one) or none") from None
        return value

    @field_validator("data_dir")
    @classmethod
    def _resolve_data_dir(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @property
    def redis_mode(self) -> Literal["embedded", "none", "url"]:
        """Whether Redis is ours, absent or somebody else's."""
        text = self.redis.get_secret_value()
        if text == "embedded":
            return "embedded"
        return "none" if text == "none" else "url"


def load(flags: Mapping[str, Any] | None = None, config_file: Path | None = None) -> Settings:
    """Read the tree. Raises CommandError (BAD_SETTING) naming key, value, source and the fix.

    flags: by key, nested for sections; None values are left out. config_file: must exist when
    given; otherwise `$TOKENBUS_CONFIG`, then `tokenbus.toml` in the current directory if there.
    """
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    toml = _find_config_file(config_file)

    class Configured(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = TomlConfigSettingsSource(settings_cls, toml_file=toml)
            return init_settings, env_settings, file

    try:
        return Configured(**given)
    except ValidationError as error:
        raise _explain(error, given, toml) from None
    except tomllib.TOMLDecodeError as error:
        raise CommandError(
            ExitCode.BAD_SETTING, f"{toml} is not TOML: {error}", "Mend the line it names."
        ) from None


def _find_config_file(explicit: Path | None) -> Path | None:
    named = explicit or (Path(env) if (env := os.environ.get("TOKENBUS_CONFIG")) else None)
    if named is not None:
        if not named.is_file():
            raise CommandError(
                ExitCode.BAD_SETTING,
                f"there is no settings file {named}",
                "Give the path of an existing tokenbus.toml, or leave --config out.",
            )
        return named
    local = Path("tokenbus.toml")
    return local if local.is_file() else None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """`TOKENBUS_*` variables that set nothing: usually a slip of the pen, worth a warning."""
    return sorted(
        name
        for name in environ
        if name.startswith(PREFIX)
        and name not in _OTHER_VARIABLES
        and name.removeprefix(PREFIX).lower().split("__")[0] not in Settings.model_fields
    )


def _explain(error: ValidationError, flags: Mapping[str, Any], toml: Path | None) -> CommandError:
    """Turn pydantic's report into sentences: key, value (but no secrets), source, what is wrong."""
    lines = []
    for problem in error.errors(include_url=False):
        keys = [str(part) for part in problem["loc"]]
        key = ".".join(keys)
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key} ({_source(keys, flags, toml)}) is not a setting")
            continue
        shown = "" if keys[0] == "redis" else f" = {problem.get('input')!r}"
        lines.append(f"{key}{shown} ({_source(keys, flags, toml)}): {message}")
    return CommandError(
        ExitCode.BAD_SETTING,
        "; ".join(lines),
        "docs/OPERATIONS.md lists every setting with its range; `tokenbus serve --help` the flags.",
    )


def _source(keys: list[str], flags: Mapping[str, Any], toml: Path | None) -> str:
    """Where the value of a key came from, in words."""
    node: Any = flags
    for part in keys:
        if not isinstance(node, Mapping) or part not in node:
            break
        node = node[part]
    else:
        return f"flag --{keys[0].replace('_', '-')}" if len(keys) == 1 else "flag --set"
    variable = PREFIX + "__".join(keys).upper()
    if variable in os.environ:
        return f"environment {variable}"
    return str(toml) if toml else "default"


# ---------------------------------------------------------------- what the processes get


def engine_config(settings: Settings, model: ResolvedModel) -> EngineConfig:
    """The engine's share of the settings."""
    fake = FakeModel(**settings.fake.model_dump()) if settings.model == FAKE_MODEL else None
    return EngineConfig(
        model_path=str(model.path),
        model_name=model.name,
        device=settings.device,
        fake=fake,
        **settings.engine.model_dump(),
    )


def broker_config(
    settings: Settings, model: ResolvedModel, *, worker: str, link_path: Path, redis_url: str
) -> BrokerConfig:
    """The broker's share. redis_url: the address to use, embedded or not; empty for none."""
    redis = RedisConfig(url=redis_url, **settings.streams.model_dump()) if redis_url else None
    zmq = (
        ZmqConfig(endpoint=settings.zmq, **settings.gateway.model_dump())
        if settings.zmq != "none"
        else None
    )
    return BrokerConfig(
        worker=worker,
        queue=settings.queue,
        model_path=str(model.path),
        model_name=model.name,
        link_path=str(link_path),
        ring_bytes=settings.ring_bytes,
        drain_ms=round(settings.drain_s * 1000),
        engine_hang_ms=settings.engine_hang_ms,
        redis=redis,
        zmq=zmq,
        limits=QueueConfig(**settings.limits.model_dump()),
        fake_vocab_size=settings.fake.vocab_size if settings.model == FAKE_MODEL else 0,
        http="" if settings.http == "none" else settings.http,
    )


def public_url(url: str) -> str:
    """The Redis URL without its password, for logs and the ready line."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)
