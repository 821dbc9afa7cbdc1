"""What `bench kernels` measures: the shapes of real models, each kernel beside torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.activation import silu_mul
from kernels.norm import rms_norm
from kernels.penalties import count_sampled, new_penalty_tables, penalise
from kernels.prefill import prefill_attention
from kernels.rope import rope_kv_write, rope_tables
from kernels.sampler import new_sampler_workspace, sample
from kernels.sampling_tables import new_sampling_tables
from kernels.tiles import DecodeTile, PrefillTile
from ops.bench.kernel_inputs import (
    DEVICE,
    DTYPE,
    QWEN3_06B,
    QWEN3_8B,
    SMOLLM2,
    ModelShape,
    decode_plan_for,
    decode_set,
    engine_tile,
    random,
)
from ops.bench.kernel_timing import Row, make_row, num_sets, time_calls

QWEN3_8B_4KV = replace(QWEN3_8B, name="qwen3-8b-4kv", num_kv_heads=4)
"""Groups of eight heads."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One batch of decode attention. stays_in_cache: its inputs stay in L2. turned_before: not as
    the engine launches it, but with queries that are turned and keys and values that are kept
    already; what the others take more is what turning and keeping costs."""

    name: str
    seq_lens: list[int]
    shape: ModelShape
    stays_in_cache: bool = False
    turned_before: bool = False

    @property
    def tile(self) -> DecodeTile:
        """What the engine takes."""
        return engine_tile(self.shape, len(self.seq_lens))

    @property
    def note(self) -> str:
        """For result lines: what is inside."""
        return "queries turned before, no new tokens" if self.turned_before else "new tokens inside"


RAGGED = [16 + (i * 1543) % 4081 for i in range(64)]
DECODE_CASES = [
    DecodeCase("32x8.b32.kv4096", [4096] * 32, QWEN3_8B),
    DecodeCase("32x4.b1.kv1024.warm", [1024], QWEN3_8B_4KV, stays_in_cache=True),
    *(DecodeCase(f"32x8.b{n}.kv1152", [1152] * n, QWEN3_8B) for n in (1, 8, 64, 256)),
    DecodeCase("32x8.b64.ragged16-4096", RAGGED, QWEN3_8B),
    *(DecodeCase(f"16x8.b{n}.kv1152", [1152] * n, QWEN3_06B) for n in (1, 4, 8, 16, 256)),
    *(DecodeCase(f"9x3.b{n}.kv1152", [1152] * n, SMOLLM2) for n in (1, 8, 64, 256)),
    DecodeCase("32x8.b1.kv32768", [32768], QWEN3_8B),
    DecodeCase("32x8.b32.kv4096.turned_before", [4096] * 32, QWEN3_8B, turned_before=True),
    DecodeCase("32x4.b1.kv1024.warm.turned_before", [1024], QWEN3_8B_4KV, True, True),
]


def decode_row(case: DecodeCase, tile: DecodeTile | None = None, with_baseline: bool = True) -> Row:
    """Decode attention as the engine launches it, beside SDPA over contiguous keys of the same
    lengths. tile: None: the engine's. The floor counts each token's keys and values once, and new
    ones once more, which are written."""
    shape, lengths = case.shape, case.seq_lens
    heads, kv_heads, d = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    kv_bytes = 4 * sum(lengths) * kv_heads * d
    new_bytes = 0 if case.turned_before else 4 * len(lengths) * kv_heads * d
    count = 1 if case.stays_in_cache else num_sets(kv_bytes)
    sets = [decode_set(lengths, shape, 64, case.turned_before) for _ in range(count)]
    plan, workspace = decode_plan_for(sets[0], tile or case.tile)
    timing = time_calls([partial(s.run, plan, workspace) for s in sets])
    baseline, baseline_us = "", math.nan
    if with_baseline and len(set(lengths)) == 1:
        kv_shape = (len(lengths), kv_heads, lengths[0], d)
        caches = [(random(*kv_shape), random(*kv_shape)) for _ in range(count)]
        q = random(len(lengths), heads, 1, d)
        calls = [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in caches]
        baseline, baseline_us = "sdpa", time_calls(calls, replays=5).p50_us
    flops = 4.0 * sum(lengths) * heads * d
    name = f"decode.{case.name}"
    return make_row(name, timing, kv_bytes + new_bytes, flops, baseline, baseline_us, case.note)


def prefill_row(lengths: list[int], shape: ModelShape, tile: PrefillTile | None = None) -> Row:
    """Prompt attention beside SDPA (causal, contiguous)."""
    heads, kv_heads, d = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    inputs = decode_set(lengths, shape, 64)
    total = sum(lengths)
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, out = random(total, heads, d), torch.empty(total, heads, d, dtype=DTYPE, device=DEVICE)

    def ours() -> None:
        prefill_attention(
            out,
            q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.tables,
            inputs.rows,
            inputs.seq_lens,
            bounds,
            d**-0.5,
            tile=tile,
        )

    batch, seq_len = len(lengths), lengths[0]
    qs = random(batch, heads, seq_len, d)
    ks, vs = (random(batch, kv_heads, seq_len, d) for _ in range(2))
    base = time_calls(
        [lambda: scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)],
        replays=7,
    )
    flops = sum(2.0 * n * n * heads * d for n in lengths)
    moved = 2.0 * total * d * (2 * heads + 2 * kv_heads)
    name = f"prefill.{shape.name}.{batch}x{seq_len}"
    return make_row(name, time_calls([ours]), moved, flops, "sdpa", base.p50_us)


def small_kernel_rows(shape: ModelShape, m: int) -> Iterator[Row]:
    """Norm, rotary with KV write, activation: launch-bound at small M."""
    hidden, d = shape.hidden, shape.head_dim
    x, weight = random(m, hidden), random(hidden)
    out = torch.empty_like(x)
    yield make_row(
        f"rms_norm.{shape.name}.m{m}",
        time_calls([lambda: rms_norm(out, x, weight, 1e-6, pdl=True)], min_calls=40),
        4.0 * m * hidden,
    )
    qkv = random(m, (shape.num_q_heads + 2 * shape.num_kv_heads) * d)
    k_cache, v_cache = (random(m // 16 + 1, 16, shape.num_kv_heads, d) for _ in range(2))
    cos, sin = (t.to(DEVICE) for t in rope_tables(d, 4096))
    positions = torch.arange(m, dtype=torch.int32, device=DEVICE)
    yield make_row(
        f"rope_kv_write.{shape.name}.m{m}",
        time_calls(
            [
                lambda: rope_kv_write(
                    qkv,
                    k_cache,
                    v_cache,
                    cos,
                    sin,
                    positions,
                    positions,
                    shape.num_q_heads,
                    pdl=True,
                )
            ],
            min_calls=40,
        ),
        4.0 * qkv.numel(),
    )
    gate_up = random(m, 2 * shape.intermediate)
    act = torch.empty(m, shape.intermediate, dtype=DTYPE, device=DEVICE)
    yield make_row(
        f"silu_mul.{shape.name}.m{m}",
        time_calls([lambda: silu_mul(act, gate_up, pdl=True)], min_calls=40),
        6.0 * m * shape.intermediate,
    )


def sampler_row(m: int, vocab_size: int, kind: str) -> Row:
    """The sampler on peaked logits, greedy, random, with top_k 50 and top_p 0.9, or with penalties
    on rows that have 1,000 tokens, beside argmax."""
    logits = torch.randn(m, vocab_size, device=DEVICE).mul(3.0).to(DTYPE)
    params = new_sampling_tables(m, DEVICE)
    if kind != "greedy":
        params.temperature.fill_(0.8)
    if kind == "filters":
        params.top_k.fill_(50)
        params.top_p.fill_(0.9)
    workspace = new_sampler_workspace(m, vocab_size, DEVICE)
    rows = torch.arange(m, dtype=torch.int32, device=DEVICE)
    positions = torch.full((m,), 5, dtype=torch.int32, device=DEVICE)
    tokens, bad = torch.zeros_like(rows), torch.empty(m, dtype=torch.int8, device=DEVICE)
    table = torch.zeros(m, 16, dtype=torch.int32, device=DEVICE)
    has_penalties = kind == "penalties"
    penalties = new_penalty_tables(m if has_penalties else 1, vocab_size, DEVICE)
    penalties.repetition.fill_(1.1)
    penalties.counts[:, :: max(vocab_size // 1_000, 1)] = 3

    def ours() -> None:
        if has_penalties:
            penalise(logits, rows, penalties)
            count_sampled(penalties, tokens, rows)
        sample(
            tokens,
            bad,
            logits,
            rows,
            positions,
            params,
            table,
            workspace,
            kind == "filters",
            pdl=True,
        )

    base = time_calls([lambda: logits.argmax(-1)], replays=7).p50_us
    name = f"sample.{kind}.v{vocab_size}.m{m}"
    num_bytes = (6.0 if has_penalties else 2.0) * m * vocab_size
    return make_row(name, time_calls([ours]), num_bytes, 0.0, "argmax", base)
