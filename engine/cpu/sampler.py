"""Sampling on the CPU: Gumbel-max with counter noise over the tokens that can still win.

The noise of a token is a function of (seed, position, token id) alone and spans less than
`GUMBEL_SPAN`, so tokens further below the best scaled logit are dropped before any is drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.cpu.tables import RowTables
from engine.plan import BoolArray, IntArray
from kernels.noise import GUMBEL_SPAN, gumbel_ref

_GREEDY_BELOW = 1e-5

FloatArray = npt.NDArray[np.float32]
LongArray = npt.NDArray[np.int64]


def sample(
    logits: torch.Tensor, rows: IntArray, positions: IntArray, tables: RowTables
) -> tuple[IntArray, BoolArray]:
    """Choose a token for each row.

    logits float32 [S, V], may be changed; rows and positions int32 [S]: whose they are and where
    the token will stand. Returns token ids int32 [S] and bad bool [S], true where logits were not
    finite.
    """
    bad = ~torch.isfinite(logits.sum(dim=1)).numpy()  # a NaN or an infinity survives any sum
    if tables.penalties:
        _penalise(logits, rows, positions, tables)
    for i in np.flatnonzero(positions < tables.min_position[rows]):
        logits[i, tables.stop_ids[rows[i]].astype(np.int64)] = -torch.inf
    tokens: IntArray = logits.numpy().argmax(axis=1).astype(np.int32)
    warm = tables.temperature[rows] >= _GREEDY_BELOW
    for i in np.flatnonzero(warm & ~bad):
        tokens[i] = sample_row(logits[i].numpy(), int(rows[i]), int(positions[i]), tables)
    return tokens, bad


def _penalise(logits: torch.Tensor, rows: IntArray, positions: IntArray, tables: RowTables) -> None:
    for i, row in enumerate(rows.tolist()):
        penalties = tables.penalties.get(row)
        if penalties is not None:
            penalties.apply(logits[i].numpy(), tables.tokens[row, : positions[i]])


def sample_row(logits: FloatArray, row: int, position: int, tables: RowTables) -> int:
    """One row with temperature: float32 [V] -> token id."""
    scaled = logits / tables.temperature[row]
    ids = _filtered(scaled, tables, row)
    noisy = scaled[ids] + gumbel_ref(int(tables.seed[row]), position, ids)
    return int(ids[np.argmax(noisy)])  # ids rise, so the first of equal values is the lowest id


def _filtered(scaled: FloatArray, tables: RowTables, row: int) -> LongArray:
    """Ids that pass top_k, top_p and min_p, in this order, and can win; ascending."""
    best = scaled.max()
    ids = _top_k(scaled, int(tables.top_k[row]))
    top_p, min_p = float(tables.top_p[row]), float(tables.min_p[row])
    if top_p < 1.0:
        ids = _top_p(scaled, ids, top_p)
    if min_p > 0.0:
        weights = np.exp(scaled[ids] - best)
        ids = ids[weights >= np.float32(min_p)]
    return np.sort(ids[scaled[ids] > best - GUMBEL_SPAN])


def _top_k(scaled: FloatArray, k: int) -> LongArray:
    """Ids of the k largest, lower ids first among equals; all ids when k is 0."""
    size = len(scaled)
    if not 0 < k < size:
        return np.arange(size)
    threshold = np.partition(scaled, size - k)[size - k]
    above = np.flatnonzero(scaled > threshold)
    equal = np.flatnonzero(scaled == threshold)
    return np.concatenate([above, equal[: k - len(above)]])


def _top_p(scaled: FloatArray, ids: LongArray, p: float) -> LongArray:
    """The smallest set of most probable ids whose share of `ids`' mass reaches p."""
    values = scaled[ids]
    weights = np.exp((values - values.max()).astype(np.float64))
    needed = p * weights.sum()
    # Few tokens hold nearly all mass: sort those first, and everything only if they fall short.
    for floor in (1e-4, 0.0):
        kept = np.flatnonzero(weights >= floor)
        if floor == 0.0 or weights[kept].sum() >= needed:
            break
    order = kept[np.lexsort((ids[kept], -values[kept]))]
    mass = np.cumsum(weights[order])
    count = int(np.searchsorted(mass, needed)) + 1
    return ids[order[:count]]
