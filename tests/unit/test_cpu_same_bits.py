"""Packed weights on the CPU: a row's logits are a function of its tokens alone, to the last bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import engine.cpu.model
import engine.cpu.runner
from broker.ring.records import Sampling
from engine.build import build_runner
from engine.config import EngineConfig
from engine.cpu.int8 import DynamicInt8Linear, has_int8_products
from engine.cpu.linear import Int4Linear, Int8Linear, LinearFactory, Scheme
from engine.cpu.runner import CpuRunner
from engine.cpu.sampler import sample
from engine.cpu.step_inputs import TILE_TOKENS
from engine.cpu.tables import RowTables
from engine.loader import load_model
from engine.plan import BoolArray, IntArray
from engine.scheduler import Scheduler
from tests.cpu_kit import generate, with_limits

# Three query heads on each kv head, as in SmolLM2: such products take more than one path.
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 320, 384, 320, 6, 2, 64, 2
NEW_TOKENS = 20
# Prompts and their continuations meet the ends of tiles and of padded contexts from both sides.
PROMPTS = [
    np.random.default_rng(length).integers(3, VOCAB, length).tolist()
    for length in (1, 40, 50, 63, 64, 65, 120, 150)
]
SAMPLING = [
    Sampling(
        seed=i,
        temperature=0.8 * (i % 2),
        repetition_penalty=1.3 if i % 4 > 1 else 1.0,
        presence_penalty=0.2 if i % 4 > 1 else 0.0,
        frequency_penalty=0.4 if i > 4 else 0.0,
    )
    for i in range(len(PROMPTS))
]


def write_packed_gguf(path: Path) -> None:
    """A llama model with Q4_1 layers and a Q8_0 embedding that is the head too."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        shapes[f"blk.{i}.attn_q"] = (HIDDEN, HIDDEN)
        shapes[f"blk.{i}.attn_k"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[f"blk.{i}.attn_v"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[f"blk.{i}.attn_output"] = (HIDDEN, HIDDEN)
        shapes[f"blk.{i}.ffn_gate"] = (INNER, HIDDEN)
        shapes[f"blk.{i}.ffn_up"] = (INNER, HIDDEN)
        shapes[f"blk.{i}.ffn_down"] = (HIDDEN, INNER)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    generator = np.random.default_rng(5)
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType["Q8_0" if name == "token_embd" else "Q4_1"]
        dense = generator.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(dense, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "m.gguf"
    write_packed_gguf(path)
    return path


def make_runner(model_path: Path, scheme: str, num_threads: int = 1) -> CpuRunner:
    if scheme == "int8" and not has_int8_products():
        pytest.skip("this CPU has no fast 8-bit products")
    config = EngineConfig(
        model_path=str(model_path),
        device="cpu",
        kv_cache_bytes=4 << 20,
        num_threads=num_threads,
        quantization="auto" if scheme == "int8" else "packed",
    )
    runner = build_runner(config)
    assert isinstance(runner, CpuRunner)
    assert runner.info.quantization == scheme
    return runner


@pytest.fixture(scope="module", params=["int8", "packed"])
def runner(model_path: Path, request: pytest.FixtureRequest) -> CpuRunner:
    return make_runner(model_path, request.param)


class LogitsBook:
    """The bits of the logits behind every sequence of tokens, as first seen."""

    def __init__(self) -> None:
        self.bits: dict[bytes, bytes] = {}
        self.compared = 0
        self.different: list[int] = []  # positions

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray, tables: RowTables
    ) -> tuple[IntArray, BoolArray]:
        """In place of the runner's `sample`."""
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            tokens = tables.tokens[row, :position].tobytes()
            bits = logits[i].numpy().tobytes()
            self.compared += tokens in self.bits
            if self.bits.setdefault(tokens, bits) != bits:
                self.different.append(int(position))
        return sample(logits, rows, positions, tables)


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> LogitsBook:
    book = LogitsBook()
    monkeypatch.setattr(engine.cpu.runner, "sample", book.sample)
    return book


@pytest.fixture
def together(runner: CpuRunner, book: LogitsBook) -> list[list[int]]:
    """Tokens of all prompts in one batch, their logits in the book."""
    outputs = generate(runner, PROMPTS, NEW_TOKENS, SAMPLING)
    assert len(book.bits) == len(PROMPTS) * NEW_TOKENS
    return outputs


def test_each_scheme_has_its_layers(model_path: Path) -> None:
    weights = load_model(model_path, torch.float32, keep_quantized=True).weights
    packed = LinearFactory(Scheme.PACKED)
    assert isinstance(packed(weights.layers[0].gate_up), Int4Linear)
    assert isinstance(packed(weights.lm_head), Int8Linear)
    if has_int8_products():
        assert isinstance(LinearFactory(Scheme.INT8)(weights.layers[0].o), DynamicInt8Linear)


def test_the_number_of_threads_changes_no_bits(
    model_path: Path, runner: CpuRunner, book: LogitsBook, together: list[list[int]]
) -> None:
    two = make_runner(model_path, runner.info.quantization, num_threads=2)
    try:
        assert generate(two, PROMPTS, NEW_TOKENS, SAMPLING) == together
    finally:
        torch.set_num_threads(1)
    assert book.compared == len(PROMPTS) * NEW_TOKENS
    assert book.different == []


def test_alone_and_in_a_batch_the_logits_have_the_same_bits(
    runner: CpuRunner, book: LogitsBook, together: list[list[int]]
) -> None:
    for i, prompt in enumerate(PROMPTS):
        assert generate(runner, [prompt], NEW_TOKENS, [SAMPLING[i]]) == [together[i]]
    assert book.compared == len(PROMPTS) * NEW_TOKENS
    assert book.different == []


def test_prompts_in_pieces_give_logits_of_the_same_bits(
    runner: CpuRunner, book: LogitsBook, together: list[list[int]]
) -> None:
    narrow = with_limits(runner, max_num_batched_tokens=TILE_TOKENS + len(PROMPTS))
    assert generate(narrow, PROMPTS, NEW_TOKENS, SAMPLING) == together
    assert book.compared == len(PROMPTS) * NEW_TOKENS
    assert book.different == []


@pytest.mark.parametrize("num_known", [1, 7, NEW_TOKENS - 1])
def test_a_replay_by_decode_rows_gives_logits_of_the_same_bits(
    runner: CpuRunner, book: LogitsBook, together: list[list[int]], num_known: int
) -> None:
    prefixes = [tokens[:num_known] for tokens in together]
    again = generate(runner, PROMPTS, NEW_TOKENS, SAMPLING, prefixes=prefixes)
    assert again == together
    assert book.compared == len(PROMPTS) * (NEW_TOKENS - num_known)
    assert book.different == []


def test_preempted_rows_give_logits_of_the_same_bits(
    runner: CpuRunner, book: LogitsBook, together: list[list[int]]
) -> None:
    tight = with_limits(runner, num_blocks=24)
    scheduler = Scheduler(tight.info)
    assert generate(tight, PROMPTS, NEW_TOKENS, SAMPLING, scheduler) == together
    assert scheduler.preemptions > 0
    assert book.different == []


def test_cached_prompts_give_logits_of_the_same_bits(
    runner: CpuRunner, book: LogitsBook, together: list[list[int]]
) -> None:
    scheduler = Scheduler(runner.info)
    cached: list[int] = []
    for _ in range(2):
        assert generate(runner, PROMPTS, NEW_TOKENS, SAMPLING, scheduler, cached) == together
    assert sum(cached) >= 2 * TILE_TOKENS
    assert book.different == []


def test_contexts_gathered_at_every_step_give_logits_of_the_same_bits(
    model_path: Path,
    runner: CpuRunner,
    book: LogitsBook,
    together: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.cpu.model, "_CONTEXT_SHARE", 1 << 40)  # room for none in one piece
    gathering = make_runner(model_path, runner.info.quantization)
    assert generate(gathering, PROMPTS, NEW_TOKENS, SAMPLING) == together
    assert book.compared == len(PROMPTS) * NEW_TOKENS
    assert book.different == []


def test_a_row_that_changes_hands_where_the_last_run_ended_reads_its_own_context(
    runner: CpuRunner, book: LogitsBook
) -> None:
    before, after = list(range(3, 13)), list(range(50, 64))
    expected = generate(runner, [after], 8)
    # The first run's last decode step is at position 13, the second one's first at 14.
    generate(runner, [before], 5)
    assert generate(runner, [after], 8) == expected
    assert book.compared == 8
    assert book.different == []
