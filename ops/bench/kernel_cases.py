"""What `bench kernels` measures: the shapes of real models, each kernel beside torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from kernels.tiles import DecodeTile, PrefillTile, decode_tile
from ops.bench.kernel_inputs import (
    DEVICE,
    DTYPE,
    ModelShape,
    decode_plan_for,
    decode_set,
    random,
)
from ops.bench.kernel_timing import Row, make_row, num_sets, time_calls

DECODE_CASES: list[tuple[str, list[int], int, int, int, bool]] = [
    # name, lengths, query heads, kv heads, head size, inputs stay in L2
    ("32x8.b32.kv4096", [4096] * 32, 32, 8, 128, False),
    ("32x4.b1.kv1024.warm", [1024], 32, 4, 128, True),
    ("32x8.b1.kv1152", [1152], 32, 8, 128, False),
    ("32x8.b8.kv1152", [1152] * 8, 32, 8, 128, False),
    ("32x8.b64.kv1152", [1152] * 64, 32, 8, 128, False),
    ("32x8.b256.kv1152", [1152] * 256, 32, 8, 128, False),
    ("32x8.b64.ragged16-4096", [16 + (i * 1543) % 4081 for i in range(64)], 32, 8, 128, False),
    ("16x8.b1.kv1152", [1152], 16, 8, 128, False),
    ("16x8.b4.kv1152", [1152] * 4, 16, 8, 128, False),
    ("16x8.b8.kv1152", [1152] * 8, 16, 8, 128, False),
    ("16x8.b16.kv1152", [1152] * 16, 16, 8, 128, False),
    ("16x8.b256.kv1152", [1152] * 256, 16, 8, 128, False),
    ("9x3.b1.kv1152", [1152], 9, 3, 64, False),
    ("9x3.b8.kv1152", [1152] * 8, 9, 3, 64, False),
    ("9x3.b64.kv1152", [1152] * 64, 9, 3, 64, False),
    ("9x3.b256.kv1152", [1152] * 256, 9, 3, 64, False),
    ("32x8.b1.kv32768", [32768], 32, 8, 128, False),
]


def decode_rows(
    name: str,
    seq_lens: list[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    stays_in_cache: bool,
    tile: DecodeTile | None = None,
    with_baseline: bool = True,
) -> Row:
    """Decode attention beside SDPA over contiguous keys of the same lengths."""
    if tile is None:
        tile = decode_tile(head_dim, DTYPE, len(seq_lens))
    kv_bytes = 4 * sum(seq_lens) * num_kv_heads * head_dim
    count = 1 if stays_in_cache else num_sets(kv_bytes)
    sets = [decode_set(seq_lens, num_q_heads, num_kv_heads, head_dim, 64) for _ in range(count)]
    plan, workspace = decode_plan_for(sets[0], tile)
    timing = time_calls([partial(s.run, plan, workspace) for s in sets])
    baseline_us = math.nan
    if with_baseline and len(set(seq_lens)) == 1:
        shape = (len(seq_lens), num_kv_heads, seq_lens[0], head_dim)
        caches = [(random(*shape), random(*shape)) for _ in range(count)]
        q = sets[0].q.view(len(seq_lens), num_q_heads, 1, head_dim)
        calls = [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in caches]
        baseline_us = time_calls(calls, replays=5).p50_us
    flops = 4.0 * sum(seq_lens) * num_q_heads * head_dim
    label = "sdpa" if baseline_us == baseline_us else ""
    return make_row(f"decode.{name}", timing, kv_bytes, flops, label, baseline_us)


def prefill_row(lengths: list[int], shape: ModelShape, tile: PrefillTile | None = None) -> Row:
    """Prompt attention beside SDPA (causal, contiguous)."""
    heads, kv_heads, d = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    inputs = decode_set(lengths, heads, kv_heads, d, 64)
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
