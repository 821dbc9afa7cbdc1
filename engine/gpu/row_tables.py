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
from engine.plan import NewRow
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

    def take_over(self, new_rows: Sequence[NewRow]) -> None:
        """Write the state of rows that got a new request, on the current stream."""
        if not new_rows:
            return
        for new in new_rows:
            ids = torch.from_numpy(np.array(new.token_ids, dtype=np.int32))
            self.token_table[new.row, : len(ids)].copy_(_pinned(ids), non_blocking=True)
        rows = self._upload(torch.tensor([new.row for new in new_rows]))
        for name, values in _sampling_columns(new_rows, self.sampling.stop_ids.shape[1]).items():
            table: torch.Tensor = getattr(self.sampling, name)
            table.index_copy_(0, rows, self._upload(values.to(table.dtype)))
        penalised = []  # now, or in the run before
        for new in new_rows:
            kind = _kind_of(new.sampling)
            if SampleKind.PENALISED in (kind, self.kinds[new.row]):
                penalised.append(new)
            self.kinds[new.row] = kind
        if penalised:
            self._take_over_penalties(penalised)

    def warm_up(self) -> None:
        """Compile what a new row with penalties launches, by a row of padding."""
        padding = torch.full((3, 1), -1, dtype=torch.int32, device=self.token_table.device)
        count_new_rows(self.penalties, self.token_table, padding, max_length=1)

    def _take_over_penalties(self, new_rows: Sequence[NewRow]) -> None:
        """Write the penalties of rows whose old or new run has any, and count the tokens that
        `take_over` wrote."""
        p, settings = self.penalties, [new.sampling for new in new_rows]
        numbers = torch.tensor(
            [
                [s.repetition_penalty for s in settings],
                [s.presence_penalty for s in settings],
                [s.frequency_penalty for s in settings],
            ]
        )
        rows = [new.row for new in new_rows]
        num_prompt = [new.num_prompt_tokens for new in new_rows]
        lengths = [len(new.token_ids) for new in new_rows]
        index = self._upload(torch.tensor(rows))
        for table, values in zip(
            (p.repetition, p.presence, p.frequency), self._upload(numbers), strict=True
        ):
            table.index_copy_(0, index, values)
        runs = self._upload(torch.tensor([rows, num_prompt, lengths], dtype=torch.int32))
        count_new_rows(p, self.token_table, runs, max(lengths))

    def _upload(self, values: torch.Tensor) -> torch.Tensor:
        return _pinned(values).to(self.token_table.device, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy; torch's caching allocator keeps it until the stream is past the transfer."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _kind_of(s: Sampling) -> SampleKind:
    if s.has_penalties:
        return SampleKind.PENALISED
    narrows = s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0
    return SampleKind.FILTERED if narrows and s.temperature > 0.0 else SampleKind.PLAIN


def _sampling_columns(new_rows: Sequence[NewRow], max_stop_ids: int) -> dict[str, torch.Tensor]:
    """`SamplingTables` field -> one value per new row."""
    stop_ids = np.full((len(new_rows), max_stop_ids), -1, dtype=np.int32)
    for index, new in enumerate(new_rows):
        held_back = new.stop_token_ids[:max_stop_ids]
        stop_ids[index, : len(held_back)] = held_back
    seeds = np.array([new.sampling.seed for new in new_rows], dtype=np.uint64).view(np.int64)
    return {
        "temperature": torch.tensor([new.sampling.temperature for new in new_rows]),
        "top_k": torch.tensor([new.sampling.top_k for new in new_rows]),
        "top_p": torch.tensor([new.sampling.top_p for new in new_rows]),
        "min_p": torch.tensor([new.sampling.min_p for new in new_rows]),
        "seed": torch.from_numpy(seeds),
        "min_position": torch.tensor([new.min_position for new in new_rows]),
        "stop_ids": torch.from_numpy(stop_ids),
    }
