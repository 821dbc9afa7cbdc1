"""What `bench kernels` measures: the shapes of real models, each kernel beside torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from kernels.activation import silu_mul
from kernels.fixed_gemm import fixed_linear
from kernels.norm import rms_norm
from kernels.penalties import count_sampled, new_penalty_tables, penalise
from kernels.prefill import prefill_attention
from kernels.rope import rope_kv_write, rope_tables
from kernels.sampler import new_sampler_workspace, sample
from kernels.sampling_tables import new_sampling_tables
from kernels.small_gemm import new_gemm_workspace, small_linear
from kernels.tiles import DecodeTile, PrefillTile, decode_tile
from ops.bench.kernel_inputs import (
    DEVICE,
    DTYPE,
    QWEN3_8B,
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


def linear_rows(shape: ModelShape, m: int) -> Iterator[Row]:
    """small_linear of each layer beside cuBLAS, weights rotated; gate_up with its activation
    fused."""
    workspace = new_gemm_workspace(DEVICE)
    for name, n, k in [*shape.linear_layers, ("head", shape.vocab_size, shape.hidden)]:
        glu = name == "gate_up"
        weights = [random(n, k, scale=k**-0.5) for _ in range(num_sets(2 * n * k))]
        x, out = random(m, k), torch.empty(m, n // (2 if glu else 1), dtype=DTYPE, device=DEVICE)
        calls = [partial(small_linear, out, x, w, workspace, glu=glu) for w in weights]
        base = time_calls([partial(linear, x, w) for w in weights], replays=7)
        moved = 2.0 * (n * k + m * (n + k))
        yield make_row(
            f"linear.{shape.name}.{name}.m{m}",
            time_calls(calls),
            moved,
            2.0 * m * n * k,
            "cublas",
            base.p50_us,
        )


def chain_row(shape: ModelShape, m: int, num_layers: int) -> Row:
    """The linear layers of several blocks in a row, norm, SiLU and residual fused, beside cuBLAS's
    GEMMs alone."""
    workspace = new_gemm_workspace(DEVICE)
    blocks = [
        [random(n, k, scale=k**-0.5) for _, n, k in shape.linear_layers] for _ in range(num_layers)
    ]
    norm_weight = random(shape.hidden)
    stream, attn = random(m, shape.hidden), random(m, shape.num_q_heads * shape.head_dim)
    qkv = torch.empty(m, shape.linear_layers[0][1], dtype=DTYPE, device=DEVICE)
    gated = torch.empty(m, shape.intermediate, dtype=DTYPE, device=DEVICE)
    scratch = torch.empty_like(stream)
    norm = {"norm_weight": norm_weight, "eps": 1e-6, "norm_scratch": scratch}

    def ours() -> None:
        for w_qkv, w_o, w_up, w_down in blocks:
            small_linear(qkv, stream, w_qkv, workspace, **norm)  # type: ignore[arg-type]
            small_linear(stream, attn, w_o, workspace, residual=stream)
            small_linear(gated, stream, w_up, workspace, **norm, glu=True)  # type: ignore[arg-type]
            small_linear(stream, gated, w_down, workspace, residual=stream)

    inner = random(m, shape.intermediate)

    def cublas() -> None:
        for w_qkv, w_o, w_up, w_down in blocks:
            linear(stream, w_qkv)
            linear(attn, w_o)
            linear(stream, w_up)
            linear(inner, w_down)

    timing = time_calls([ours], min_calls=2)
    base = time_calls([cublas], replays=7, min_calls=2)
    size = sum(w.numel() for block in blocks for w in block)
    return make_row(
        f"chain.{shape.name}.m{m}.{num_layers}-layers",
        timing,
        2.0 * size,
        2.0 * m * size,
        "cublas",
        base.p50_us,
    )


def fixed_rows(m: int) -> Iterator[Row]:
    """The batch-invariant GEMM on the 8B's layers beside cuBLAS: o and down with the residual in
    their ends; gate_up with its activation, which has a launch of its own beside."""
    workspace = new_gemm_workspace(DEVICE)
    for name, n, k in QWEN3_8B.linear_layers:
        glu = name == "gate_up"
        num_outputs = n // 2 if glu else n
        weights = [random(n, k, scale=k**-0.5) for _ in range(num_sets(2 * n * k))]
        x, out = random(m, k), random(m, num_outputs)
        residual = out if name in ("o", "down") else None
        ours = partial(
            fixed_linear, out, x, residual=residual, workspace=workspace, pdl=True, glu=glu
        )
        timing = time_calls([partial(ours, weight=w) for w in weights])
        base = time_calls([partial(_cublas, out, x, w, glu) for w in weights], replays=7)
        moved = 2.0 * (n * k + m * (num_outputs + k))
        beside = "cublas+silu" if glu else "cublas"
        yield make_row(f"fixed.8b.{name}.m{m}", timing, moved, 2.0 * m * n * k, beside, base.p50_us)


def _cublas(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, glu: bool) -> None:
    product = linear(x, weight)
    if glu:
        silu_mul(out, product, pdl=True)


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
