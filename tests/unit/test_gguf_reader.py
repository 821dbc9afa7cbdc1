"""A GGUF file's lists are passed over: everything else is read as the gguf package reads it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.loader.gguf_reader import ListSkippingReader, open_gguf
from engine.model.errors import CheckpointError

TOKENS = [f"token {i} ü" for i in range(300)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.5] * len(TOKENS))
    writer.add_token_types([1] * len(TOKENS))
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "said at the end")
    writer.add_tensor("one.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_and_tensors_are_those_that_the_package_reads(path: Path) -> None:
    quick, full = ListSkippingReader(path), gguf.GGUFReader(path)
    assert list(quick.fields) == list(full.fields)
    for name, field in full.fields.items():
        assert quick.fields[name].types == field.types
        if field.types and field.types[0] is gguf.GGUFValueType.ARRAY:
            assert len(quick.fields[name].data) == len(field.data) == len(TOKENS)
        else:
            assert quick.fields[name].contents() == field.contents()
    assert [tensor.name for tensor in quick.tensors] == ["one.weight"]
    assert np.array_equal(quick.tensors[0].data, full.tensors[0].data)


@pytest.mark.parametrize("cut", [200, 1000, 3000])
def test_a_file_cut_within_a_list_is_named(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"m\.gguf is no readable GGUF file"):
        open_gguf(path)
