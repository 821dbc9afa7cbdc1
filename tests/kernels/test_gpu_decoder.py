"""The GPU decoder's packed and decode steps give transformers' logits.

Runs natively on a GPU, in Triton's interpreter elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from broker.ring.records import Sampling
from engine.gpu import activations, linear
from engine.gpu.buffers import SharedBuffers, new_shared_buffers
from engine.gpu.decode_graph import DecodeGraph
from engine.gpu.decoder import GpuDecoder
from engine.gpu.kv_memory import new_kv_memory
from engine.gpu.linear import Linears
from engine.gpu.memory import StepLimits
from engine.gpu.packed_step import PackedSteps
from engine.gpu.prompt_graph import PromptGraph
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.staging import StepSlots
from engine.loader import load_model
from engine.plan import NewRow, StepPlan
from kernels import small_gemm
from kernels.split_k import new_gemm_workspace
from tests.kernels import util

DEVICE = torch.device(util.DEVICE)
SMALL = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, head_dim=16, sliding_window=13),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
}
LIMITS = StepLimits(4, 64, 128, 16)
NONE = np.zeros(0, np.int32)
PLAIN = SampleKind.PLAIN


class Fixture:
    """A tiny model in transformers and in the GPU decoder, over one small cache."""

    def __init__(self, directory, config, deterministic=False, max_fused_rows=64) -> None:
        torch.manual_seed(0)
        self.reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.reference.save_pretrained(directory)
        loaded = load_model(directory, torch.float32, DEVICE)
        self.spec = loaded.spec
        self.tables = RowTables(LIMITS, self.spec.vocab_size, DEVICE)
        cache = self.cache = new_kv_memory(self.spec, 32, LIMITS.block_size, torch.float32, DEVICE)
        cache.k.fill_(float("nan"))
        cache.v.fill_(torch.finfo(cache.v.dtype).max)  # finite, as everything in it
        self.decoder = GpuDecoder(
            self.spec, loaded.weights, cache, self.tables.block_table, self.tables.token_table,
            Linears(deterministic, new_gemm_workspace(DEVICE), max_fused_rows),
        )  # fmt: skip
        self.buffers: SharedBuffers = new_shared_buffers(
            self.spec, LIMITS, torch.float32, DEVICE, same_bits=deterministic
        )
        self.packed = PackedSteps(self.decoder, self.tables, self.buffers, LIMITS)
        self.slots = StepSlots(2048, LIMITS.max_num_seqs, DEVICE)

    def run_captured(self, graph: DecodeGraph | PromptGraph, plan: StepPlan) -> None:
        """What replaying the graph does, launched kernel by kernel."""
        host = self.slots.next_inputs()
        host.fill(-9)
        graph.fill(plan, host)
        graph.run(self.slots)
        self.slots.launched()

    def expected(self, ids: np.ndarray) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor(ids)[None]).logits[0, -1]


def _plan(step_id, blocks, rows, computed, new, *, sample) -> StepPlan:
    block_rows, block_cols, block_ids = (
        np.array(column, np.int32)
        for column in (zip(*blocks, strict=True) if blocks else ([],) * 3)
    )
    return StepPlan(
        step_id, (), block_rows, block_cols, block_ids,
        np.array(rows, np.int32), np.array(computed, np.int32), np.array(new, np.int32),
        np.broadcast_to(np.array(sample, np.bool_), len(rows)), 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "products"),
    [
        *((family, {}) for family in FAMILIES),
        ("qwen2", {"max_fused_rows": 0}),
        ("qwen3", {"deterministic": True}),
    ],
    ids=str,
)
def test_prompt_chunks_then_decode_rows_give_the_reference_logits(
    tmp_path, family: str, products: dict[str, int]
) -> None:
    f = Fixture(tmp_path, FAMILIES[family], **products)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 131, n).astype(np.int32) for n in (37, 18))
    for row, ids in ((2, a), (0, b)):
        f.tables.take_over([NewRow(row, ids, len(ids), Sampling(), NONE, 0)])
    blocks = [(2, c, 5 + c) for c in range(3)] + [(0, c, 20 - c) for c in range(2)]
    # a's first 20 tokens, then the rest of a beside all of b
    f.packed.run(_plan(1, blocks, [2], [0], [20], sample=False), PLAIN)
    f.packed.run(_plan(2, [], [2, 0], [20, 0], [17, 18], sample=True), PLAIN)
    logits = f.buffers.head.logits[:2].cpu()
    torch.testing.assert_close(logits[0], f.expected(a), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[1], f.expected(b), rtol=0, atol=1e-4)
    tokens = f.buffers.out_tokens[:2].cpu().numpy()
    assert tokens.tolist() == [int(logits[0].argmax()), int(logits[1].argmax())]
    # the sampled tokens are in the token table: a step that never saw them goes on
    a, b = np.append(a, tokens[0]), np.append(b, tokens[1])
    graph = DecodeGraph(3, PLAIN, f.decoder, f.tables, f.buffers, LIMITS.block_size, f.slots)
    f.run_captured(graph, _plan(3, [], [0, 2], [18, 37], [1, 1], sample=True))
    logits = f.buffers.head.logits[:2].cpu()
    torch.testing.assert_close(logits[0], f.expected(b), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[1], f.expected(a), rtol=0, atol=1e-4)
    # a row that replays a known token computes its KV and leaves the token table alone
    f.tables.token_table[0, 20] = 77
    f.run_captured(graph, _plan(4, [], [0, 2], [19, 38], [1, 1], sample=[False, True]))
    assert f.tables.token_table[0, 20] == 77
    logits = f.buffers.head.logits[:2].cpu()
    assert f.tables.token_table[2, 39] == int(logits[1].argmax())
    assert f.buffers.out_tokens[1] == int(logits[1].argmax())


def test_products_in_parts_before_each_norm_give_the_reference_logits(
    tmp_path, monkeypatch
) -> None:
    """Of prompts and of decode rows, with poison where the parts stand."""
    counts = []
    plain_parts = Linears.plain_parts

    def noted(self, parts, x, weight):
        counts.append(len(parts))
        plain_parts(self, parts.fill_(float("nan")), x, weight)

    monkeypatch.setattr(Linears, "plain_parts", noted)
    for module in (linear, activations):
        monkeypatch.setattr(module, "norm_parts", lambda num_rows, n, k: 2)
    f = Fixture(tmp_path, FAMILIES["qwen3"], max_fused_rows=0)
    ids = np.random.default_rng(7).integers(0, 131, 21).astype(np.int32)
    f.tables.take_over([NewRow(1, ids, len(ids), Sampling(), NONE, 0)])
    f.packed.run(_plan(1, [(1, 0, 3), (1, 1, 4)], [1], [0], [20], sample=True), PLAIN)
    torch.testing.assert_close(
        f.buffers.head.logits[0].cpu(), f.expected(ids[:20]), rtol=0, atol=1e-4
    )
    graph = DecodeGraph(2, PLAIN, f.decoder, f.tables, f.buffers, LIMITS.block_size, f.slots)
    f.tables.token_table[1, 20] = int(ids[20])
    f.run_captured(graph, _plan(2, [], [1], [20], [1], sample=True))
    torch.testing.assert_close(f.buffers.head.logits[0].cpu(), f.expected(ids), rtol=0, atol=1e-4)
    # Two a layer: the first, the last for its sampled token, both again.
    assert counts == [2] * 2 * (1 + 1 + 2)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_decode_rows_share_norms_between_products_the_same_in_every_run(
    tmp_path, monkeypatch, family: str
) -> None:
    """No launch for a norm: the first one is the embedding's; nothing is read that the step has not
    written."""
    norms = []
    norm = small_gemm.rms_norm
    monkeypatch.setattr(small_gemm, "rms_norm", lambda *a, **k: norms.append(norm(*a, **k)))
    f = Fixture(tmp_path, FAMILIES[family])
    ids = np.random.default_rng(5).integers(0, 131, 21).astype(np.int32)
    f.tables.take_over([NewRow(1, ids, len(ids), Sampling(), NONE, 0)])
    f.packed.run(_plan(1, [(1, 0, 3), (1, 1, 4)], [1], [0], [20], sample=False), PLAIN)
    runs = []
    for size in (2, 2, 1):
        graph = DecodeGraph(size, PLAIN, f.decoder, f.tables, f.buffers, LIMITS.block_size, f.slots)
        for buffer in (f.buffers.activations.normed, f.buffers.activations.squares):
            buffer.fill_(float("nan"))
        norms.clear()
        f.run_captured(graph, _plan(2, [], [1], [20], [1], sample=True))
        assert not norms, "a single row's products begin with the norm"
        runs.append(f.buffers.head.logits[0].clone().cpu())
        torch.testing.assert_close(runs[-1], f.expected(ids), rtol=0, atol=1e-4)
    assert torch.equal(runs[0], runs[1])


def test_norms_are_shared_between_fused_products_of_several_rows_but_in_float16() -> None:
    free = Linears(False, new_gemm_workspace(DEVICE))
    assert free.shares_norms(2, torch.bfloat16)
    assert free.shares_norms(64, torch.float32)
    assert Linears(False, free.workspace, 256).shares_norms(256, torch.bfloat16)
    assert not free.shares_norms(1, torch.bfloat16)
    assert not free.shares_norms(65, torch.bfloat16)
    assert not free.shares_norms(2, torch.float16), "a large output times its weight overflows"
    assert not Linears(True, free.workspace).shares_norms(2, torch.bfloat16)


def test_a_captured_prompt_step_with_padding_gives_the_reference_logits(tmp_path) -> None:
    f = Fixture(tmp_path, FAMILIES["qwen3"])
    rng = np.random.default_rng(2)
    a, b = (rng.integers(0, 131, n).astype(np.int32) for n in (21, 9))
    f.tables.take_over(
        [NewRow(3, a, 21, Sampling(), NONE, 0), NewRow(1, b, 9, Sampling(), NONE, 0)]
    )
    graph = PromptGraph(48, 4, PLAIN, f.decoder, f.tables, f.buffers, LIMITS.block_size, f.slots)
    graph.run(StepSlots(2048, LIMITS.max_num_seqs, DEVICE))  # inputs of -1: touches nothing
    blocks = [(3, 0, 7), (3, 1, 2), (1, 0, 4)]
    f.run_captured(graph, _plan(1, blocks, [3, 1], [0, 0], [21, 9], sample=True))
    logits = f.buffers.head.logits[:2].cpu()
    torch.testing.assert_close(logits[0], f.expected(a), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[1], f.expected(b), rtol=0, atol=1e-4)
    assert f.tables.token_table[3, 21] == int(logits[0].argmax())
    assert f.tables.token_table[1, 9] == int(logits[1].argmax())
    used = torch.zeros(33, dtype=torch.bool)
    used[[7, 2, 4]] = True
    written = f.cache.k.isfinite().any(dim=0).flatten(1).any(dim=1).cpu()
    assert torch.equal(written, used)


@pytest.mark.usefixtures("row_by_row_dots")
def test_fixed_products_give_a_row_the_same_bits_in_every_step(tmp_path) -> None:
    """A prompt alone, packed behind another one, and cut in two: the same logits and tokens."""
    f = Fixture(tmp_path, FAMILIES["qwen3"], deterministic=True)
    ids = np.random.default_rng(3).integers(0, 131, 37).astype(np.int32)
    for row in range(3):
        f.tables.take_over([NewRow(row, ids, len(ids), Sampling(), NONE, 0)])
    blocks = [(row, c, 1 + 3 * row + c) for row in range(3) for c in range(3)]
    f.packed.run(_plan(1, blocks, [0], [0], [37], sample=True), PLAIN)
    alone = f.buffers.head.logits[0].clone()
    f.packed.run(_plan(2, [], [2], [0], [20], sample=False), PLAIN)
    f.packed.run(_plan(3, [], [1, 2], [0, 20], [37, 17], sample=True), PLAIN)
    assert torch.equal(f.buffers.head.logits[0], alone)
    assert torch.equal(f.buffers.head.logits[1], alone)
    torch.testing.assert_close(alone.cpu(), f.expected(ids), rtol=0, atol=1e-4)


def test_the_last_layer_is_computed_for_sampled_tokens_and_keys_and_values_alone(
    tmp_path, monkeypatch
) -> None:
    """Its other products are as large as the number of sampled tokens, of none they are left
    out."""
    products = []
    plain = Linears.plain

    def noted(self, out, x, weight, *args, **options):
        products.append((len(x), len(weight)))
        plain(self, out, x, weight, *args, **options)

    monkeypatch.setattr(Linears, "plain", noted)
    f = Fixture(tmp_path, FAMILIES["qwen2"])
    ids = np.random.default_rng(6).integers(0, 131, 30).astype(np.int32)
    f.tables.take_over([NewRow(0, ids, len(ids), Sampling(), NONE, 0)])
    layer = [128, 64, 192, 64]  # outputs of qkv, o, gate and up, down
    all_of, kv = [(20, n) for n in layer], (20, 64)
    f.packed.run(_plan(1, [(0, 0, 3), (0, 1, 4)], [0], [0], [20], sample=False), PLAIN)
    assert products == [*all_of, kv]
    products.clear()
    f.packed.run(_plan(2, [], [0], [20], [10], sample=True), PLAIN)
    sampled = [(1, n) for n in [*layer, 131]]
    assert products == [*((10, n) for n in layer), (10, 64), *sampled]
    torch.testing.assert_close(f.buffers.head.logits[0].cpu(), f.expected(ids), rtol=0, atol=1e-4)


def test_many_rows_have_the_activation_in_the_product_where_it_is_swept(monkeypatch) -> None:
    """From GLU_FROM_ROWS on, of two-byte weights that have tiles; cuBLAS else."""
    shapes = {(128, 96, 64)}
    monkeypatch.setattr(linear, "has_glu_tile", lambda m, n, k: (m, n, k) in shapes)
    half = torch.empty(192, 64, dtype=torch.float16)
    free = Linears(False, new_gemm_workspace(DEVICE))
    fixed = Linears(True, free.workspace)
    monkeypatch.setattr(linear, "GLU_FROM_ROWS", 129)
    assert not free.glu_is_ours(128, half)
    assert fixed.glu_is_ours(1, half)
    monkeypatch.setattr(linear, "GLU_FROM_ROWS", 100)
    assert free.glu_is_ours(128, half)
    assert not free.glu_is_ours(128, half.float())
    assert not free.glu_is_ours(99, half)
    assert not free.glu_is_ours(512, half)


def test_a_plain_product_adds_one_thing_or_says_so() -> None:
    """cuBLAS takes one; a second would be left out without a word."""
    linears = Linears(False, new_gemm_workspace(DEVICE))
    x, weight = (torch.ones(80, 8, dtype=torch.float16, device=DEVICE) for _ in range(2))
    added = {"bias": weight[:, 0], "residual": torch.ones_like(x @ weight.t())}
    out = torch.empty_like(added["residual"])
    with pytest.raises(ValueError, match="one of bias, residual"):
        linears.plain(out, x, weight, **added)
    for name, tensor in added.items():
        linears.plain(out, x, weight, **{name: tensor})
        assert (out == 9).all()
        with pytest.raises(ValueError, match="another dtype"):
            linears.plain(out.float(), x, weight, **{name: tensor})


def test_steps_with_the_activation_alone_in_the_product_give_the_reference_logits(
    tmp_path, monkeypatch
) -> None:
    f = Fixture(tmp_path, FAMILIES["qwen3"])
    monkeypatch.setattr(Linears, "glu_is_ours", lambda self, num_rows, weight: True)
    f.buffers.activations.gate_up.fill_(float("nan"))
    ids = np.random.default_rng(4).integers(0, 131, 30).astype(np.int32)
    f.tables.take_over([NewRow(0, ids, len(ids), Sampling(), NONE, 0)])
    f.packed.run(_plan(1, [(0, 0, 3), (0, 1, 4)], [0], [0], [30], sample=True), PLAIN)
    assert f.buffers.activations.gate_up.isnan().all()
    torch.testing.assert_close(f.buffers.head.logits[0].cpu(), f.expected(ids), rtol=0, atol=1e-4)


def test_warming_up_the_packed_step_reads_and_writes_no_row(tmp_path) -> None:
    f = Fixture(tmp_path, FAMILIES["qwen3"])
    before = f.tables.token_table.clone()
    f.buffers.out_tokens.fill_(-7)
    assert len(list(f.packed.warm_ups())) > 3
    assert torch.equal(f.tables.token_table, before)
    assert f.cache.k.isnan().all(), "a padding token went into the cache"
    assert (f.buffers.out_tokens == -7).all(), "a padding row was sampled"
