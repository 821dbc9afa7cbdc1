"""Loaders: exact block formats, row order, and errors that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build_runner
from engine.config import EngineConfig
from engine.cpu.linear import Int4Linear, Int8Linear, LinearFactory, Scheme
from engine.loader import LoadProgress, load_model, read_spec
from engine.model.errors import (
    CheckpointError,
    InvalidConfigError,
    MemoryPlanError,
    TensorMismatchError,
    UnsupportedModelError,
)
from engine.model.hf_config import parse_hf_config
from engine.model.quantized import QuantizedMatrix, QuantKind
from tests.cpu_kit import save_tiny

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def write_gguf(path: Path, qtype: str = "F32", vocab: int = 64) -> dict[str, np.ndarray]:
    """A small llama GGUF; returns its matrices as llama.cpp would dequantize them."""
    hidden, inner, heads, kv_heads = 256, 256, 4, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd.weight": (vocab, hidden),
        "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (kv_heads * 64, hidden),
        "blk.0.attn_v.weight": (kv_heads * 64, hidden),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
    }
    generator = np.random.default_rng(5)
    values = {}
    for name, shape in shapes.items():
        dense = generator.normal(0, 0.5, shape).astype(np.float32)
        if qtype in ("Q4_K", "Q6_K"):  # the package reads these formats but does not write them
            size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]][1]
            packed = generator.integers(0, 60, (shape[0], size), dtype=np.uint8)
        else:
            packed = gguf.quants.quantize(dense, gguf.GGMLQuantizationType[qtype])
        raw_type = gguf.GGMLQuantizationType[qtype]
        writer.add_tensor(name, packed, raw_dtype=raw_type)
        values[name] = gguf.quants.dequantize(packed, raw_type).reshape(shape)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("keep_quantized", [False, True])
def test_every_gguf_format_gives_the_numbers_of_its_definition(
    qtype: str, keep_quantized: bool, tmp_path: Path
) -> None:
    values = write_gguf(tmp_path / "m.gguf", qtype)
    loaded = load_model(tmp_path / "m.gguf", torch.float32, keep_quantized=keep_quantized)
    layer = loaded.weights.layers[0]
    matrix = layer.qkv
    if isinstance(matrix, QuantizedMatrix):
        assert keep_quantized
        matrix = matrix.dequantize()
    q = values["blk.0.attn_q.weight"].reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    k = values["blk.0.attn_k.weight"].reshape(2, 32, 2, 256).swapaxes(1, 2).reshape(128, 256)
    expected = np.concatenate([q, k, values["blk.0.attn_v.weight"]])
    np.testing.assert_array_equal(matrix.numpy(), expected)


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q4_K"])
def test_packed_4bit_products_differ_by_bfloat16_rounding_only(qtype: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", qtype)
    loaded = load_model(tmp_path / "m.gguf", torch.float32, keep_quantized=True)
    matrix = loaded.weights.layers[0].down
    assert isinstance(matrix, QuantizedMatrix)
    packed = LinearFactory(Scheme.PACKED)(matrix)
    assert isinstance(packed, Int4Linear)
    assert_close_product(packed, matrix)


def test_packed_8bit_products_differ_by_rounding_only(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "Q8_0")
    loaded = load_model(tmp_path / "m.gguf", torch.float32, keep_quantized=True)
    matrix = loaded.weights.layers[0].down
    assert isinstance(matrix, QuantizedMatrix)
    packed = LinearFactory(Scheme.PACKED)(matrix)
    assert isinstance(packed, Int8Linear)
    assert_close_product(packed, matrix)


def assert_close_product(packed: Int4Linear | Int8Linear, matrix: QuantizedMatrix) -> None:
    x = torch.randn(3, matrix.shape[1], generator=torch.Generator().manual_seed(7))
    x = x.to(torch.bfloat16)
    dense = matrix.dequantize()
    expected = x.float() @ dense.T
    # Scales and zeros of a group are rounded to bfloat16 (2^-9): errors of a group share a sign,
    # those of the groups of a row add up like a random walk.
    scale = (x.float().abs().square() @ dense.square().T).sqrt()
    error = (packed(x).float() - expected).abs()
    assert float((error / (scale * 0.05 + expected.abs() * 0.005)).max()) <= 1.0


def test_an_unknown_gguf_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "Q5_0")
    with pytest.raises(UnsupportedModelError, match=r"Q5_0 of .*weight.*Q4_1"):
        load_model(path, torch.float32)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model at all" * 10)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        load_model(path, torch.float32)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    save_tiny("llama-multi-head", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.extra"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(TensorMismatchError) as caught:
        load_model(tmp_path, torch.float32)
    assert caught.value.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert caught.value.unexpected == ("model.layers.0.extra",)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    save_tiny("llama-multi-head", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(3,\)"):
        load_model(tmp_path, torch.float32)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    save_tiny("llama-multi-head", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(tmp_path, torch.float32)


def test_progress_rises_to_the_size_of_the_checkpoint(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path)
    seen: list[LoadProgress] = []
    load_model(tmp_path, torch.float32, progress=seen.append)
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture: GPT2LMHeadModel.*Qwen3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling: yarn.*llama3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization: awq"),
        ({"hidden_act": "gelu"}, "activation: gelu.*silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_unsupported_feature_is_named_with_what_works(change: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config({**GOOD, **change})


def test_a_missing_setting_is_named() -> None:
    config = {key: value for key, value in GOOD.items() if key != "hidden_size"}
    with pytest.raises(InvalidConfigError, match="hidden_size"):
        parse_hf_config(config)


def test_end_ids_come_from_the_generation_config_first() -> None:
    assert parse_hf_config(GOOD, {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert parse_hf_config(GOOD, {}).eos_token_ids == (2,)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        load_model(tmp_path, torch.float32)
    assert read_spec(tmp_path).head_dim == 16


def test_a_cache_that_holds_no_full_sequence_is_refused_with_numbers(tmp_path: Path) -> None:
    save_tiny("llama-tied", tmp_path)
    config = EngineConfig(model_path=str(tmp_path), device="cpu", kv_cache_bytes=31_000)
    with pytest.raises(MemoryPlanError, match="max_model_len to at most 80") as caught:
        build_runner(config)
    assert caught.value.needed_bytes > caught.value.available_bytes


def test_dummy_weights_have_the_true_shapes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD), encoding="utf-8")
    config = EngineConfig(
        model_path=str(tmp_path), device="cpu", load_format="dummy", num_threads=1
    )
    runner = build_runner(config)
    assert runner.info.vocab_size == 100
    assert QuantKind("Q4_1").is_4bit_group32
