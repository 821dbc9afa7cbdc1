"""The last part of every step: logits in, tokens out, with no more work than its rows ask for."""

from __future__ import annotations

import torch

from engine.gpu.buffers import SharedBuffers
from engine.gpu.row_tables import RowTables, SampleKind
from kernels.penalties import count_sampled, penalise
from kernels.sampler import sample


def sample_rows(
    kind: SampleKind,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: RowTables,
    buffers: SharedBuffers,
    pdl: bool = False,
) -> None:
    """Sample into the first S places of the out buffers and into the token table.

    kind: the largest of the rows' own. logits float32 [S, V], changed where a row has penalties.
    rows int32 [S], -1: nothing is done. positions int32 [S]: where the tokens will stand.
    pdl: the sampler's kernels may start while the one before runs.
    """
    out_tokens = buffers.out_tokens[: len(rows)]
    is_penalised = kind == SampleKind.PENALISED
    if is_penalised:
        penalise(logits, rows, tables.penalties)
    sample(
        out_tokens, buffers.out_bad[: len(rows)], logits, rows, positions,
        tables.sampling, tables.token_table, buffers.sampler,
        has_filters=kind >= SampleKind.FILTERED, pdl=pdl,
    )  # fmt: skip
    if is_penalised:
        count_sampled(tables.penalties, out_tokens, rows)
