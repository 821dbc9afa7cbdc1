"""Per-row state on the device: token ids by position, block table, sampling settings.

A request keeps its row from admission to its end, so all of this is written once; afterwards only
block table entries change and the sampler adds tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from broker.ring.records import Sampling
from engine.gpu.memory import StepLimits
from engine.gpu.new_row_upload import NewRowUpload, SentRows
from engine.plan import NewRow
from kernels.new_rows import write_new_rows
from kernels.penalties import PenaltyTables, count_new_rows, new_penalty_tables
from kernels.sampling_tables import SamplingTables, new_sampling_tables


class SampleKind(IntEnum):
    """What sampling a row takes. Each does the work of those before it: a step takes the largest
    of its rows.
    """

    PLAIN = 0  # greedy, or the whole distribution
    FILTERED = 1  # top_k, top_p or min_p: a threshold is searched for
    PENALISED = 2  # logits are changed by the tokens that the row has


class RowTables:
    """Device tables indexed by row.

    token_table int32 [rows, max_model_len + 1]; block_table int32 [rows, blocks per sequence];
    sampling: the sampler's own tables. penalties: numbers and counted tokens of the rows that have
    penalties. kinds uint8 [rows], on the host: each row's `SampleKind`.
    """

    def __init__(self, limits: StepLimits, vocab_size: int, device: torch.device) -> None:
        rows = limits.max_num_seqs
        columns = limits.max_model_len + 1
        self.token_table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(
            rows, limits.blocks_per_seq, dtype=torch.int32, device=device
        )
        self.sampling: SamplingTables = new_sampling_tables(rows, device)
        self.penalties: PenaltyTables = new_penalty_tables(rows, vocab_size, device)
        self.kinds = np.zeros(rows, dtype=np.uint8)
        self._upload = NewRowUpload(limits, device)

    def take_over(self, new_rows: Sequence[NewRow]) -> None:
        """Write the state of rows that got a new request, on the current stream."""
        if not new_rows:
            return
        kinds = [_kind_of(new.sampling) for new in new_rows]
        counted = {  # with penalties now, or in the run before
            new.row
            for new, kind in zip(new_rows, kinds, strict=True)
            if SampleKind.PENALISED in (kind, self.kinds[new.row])
        }
        for sent in self._upload.send(new_rows, counted):
            self._write(sent)
        self.kinds[[new.row for new in new_rows]] = kinds

    def warm_up(self) -> None:
        """Compile what a new row with penalties launches, by a row of padding."""
        self._write(self._upload.padding())

    def _write(self, sent: SentRows) -> None:
        write_new_rows(
            sent.packet, sent.num_rows, sent.max_tokens,
            self.token_table, self.sampling, self.penalties,
        )  # fmt: skip
        if sent.runs.numel():
            count_new_rows(self.penalties, self.token_table, sent.runs, sent.max_tokens)


def _kind_of(s: Sampling) -> SampleKind:
    if s.has_penalties:
        return SampleKind.PENALISED
    narrows = s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0
    return SampleKind.FILTERED if narrows and s.temperature > 0.0 else SampleKind.PLAIN
