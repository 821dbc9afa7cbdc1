"""State of rows that got a new request: token ids, sampling settings and penalties, by one launch.

The host packs all of it into one piece of int32, a packet: a header of HEADER_INTS for each row,
and the rows' token ids wherever the headers say.

| int32 of a header | what |
|---|---|
| 0 | row; -1: padding, nothing is written |
| 1, 2 | number of token ids, and where in the packet they begin |
| 3 .. 5 | temperature, top_p, min_p: bits of float32 |
| 6 .. 8 | repetition, presence, frequency penalty: bits of float32 |
| 9 | top_k |
| 10, 11 | seed: lower half, upper half |
| 12 | min_position |
| 13 .. | MAX_STOP_IDS stop ids, padded with -1 |

Legend: R headers of the packet, N rows of the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.penalties import PenaltyTables
from kernels.sampling_tables import MAX_STOP_IDS, SamplingTables

_FIRST_STOP_ID = 13
HEADER_INTS = _FIRST_STOP_ID + MAX_STOP_IDS
_BLOCK = 1024


# No number that changes from step to step is an argument, only the grid follows from them: every
# step takes the same variant.
@triton.jit
def _write_new_rows_kernel(
    packet_ptr,
    token_table_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    top_k_ptr,
    seed_ptr,
    min_position_ptr,
    stop_id_ptr,
    table_stride,
    HEADER: tl.constexpr,
    FIRST_STOP_ID: tl.constexpr,
    STOP_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and BLOCK of its token ids; the first of a row writes its settings."""
    header = packet_ptr + tl.program_id(0).to(tl.int64) * HEADER
    row = tl.load(header).to(tl.int64)
    if row < 0:
        return
    num_tokens = tl.load(header + 1)
    ids_ptr = packet_ptr + tl.load(header + 2).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_tokens
    ids = tl.load(ids_ptr + position, mask=inside, other=0)
    tl.store(token_table_ptr + row * table_stride + position, ids, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(temperature_ptr + row, tl.load(header + 3).to(tl.float32, bitcast=True))
        tl.store(top_p_ptr + row, tl.load(header + 4).to(tl.float32, bitcast=True))
        tl.store(min_p_ptr + row, tl.load(header + 5).to(tl.float32, bitcast=True))
        tl.store(repetition_ptr + row, tl.load(header + 6).to(tl.float32, bitcast=True))
        tl.store(presence_ptr + row, tl.load(header + 7).to(tl.float32, bitcast=True))
        tl.store(frequency_ptr + row, tl.load(header + 8).to(tl.float32, bitcast=True))
        tl.store(top_k_ptr + row, tl.load(header + 9))
        lower = tl.load(header + 10).to(tl.int64) & 0xFFFFFFFF
        upper = tl.load(header + 11).to(tl.int64)
        tl.store(seed_ptr + row, (upper << 32) | lower)
        tl.store(min_position_ptr + row, tl.load(header + 12))
        stop = tl.arange(0, STOP_IDS)
        stop_ids = tl.load(header + FIRST_STOP_ID + stop)
        tl.store(stop_id_ptr + row * STOP_IDS + stop, stop_ids)


def write_new_rows(
    packet: torch.Tensor,
    num_rows: int,
    max_tokens: int,
    token_table: torch.Tensor,
    sampling: SamplingTables,
    penalties: PenaltyTables,
) -> None:
    """Write what a packet says of its rows; all others stay. Tokens are not counted for penalties.

    Args:
        packet: int32, at least [R * HEADER_INTS], begins with the R headers, whose rows (-1:
            padding) are distinct.
        num_rows: R, at least 1.
        max_tokens: at least the longest row's number of token ids; on the host.
        token_table: int32 [N, at least max_tokens], contiguous rows; the rows' first columns are
            written.
        sampling: tables of N rows, contiguous; written.
        penalties: of N rows; the three numbers are written, counts are not.
    """
    _write_new_rows_kernel[(num_rows, max(triton.cdiv(max_tokens, _BLOCK), 1))](
        packet, token_table, sampling.temperature, sampling.top_p, sampling.min_p,
        penalties.repetition, penalties.presence, penalties.frequency,
        sampling.top_k, sampling.seed, sampling.min_position, sampling.stop_ids,
        token_table.stride(0), HEADER=HEADER_INTS, FIRST_STOP_ID=_FIRST_STOP_ID,
        STOP_IDS=MAX_STOP_IDS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def write_new_rows_ref(
    packet: torch.Tensor,
    num_rows: int,
    token_table: torch.Tensor,
    sampling: SamplingTables,
    penalties: PenaltyTables,
) -> None:
    """Torch reference of `write_new_rows`."""
    floats = (
        sampling.temperature, sampling.top_p, sampling.min_p,
        penalties.repetition, penalties.presence, penalties.frequency,
    )  # fmt: skip
    for header in packet[: num_rows * HEADER_INTS].view(num_rows, HEADER_INTS):
        row, num_tokens, ids_at = header[:3].tolist()
        if row < 0:
            continue
        token_table[row, :num_tokens] = packet[ids_at : ids_at + num_tokens]
        for table, value in zip(floats, header[3:9].view(torch.float32), strict=True):
            table[row] = value
        sampling.top_k[row] = header[9]
        sampling.seed[row] = (header[11].long() << 32) + header[10].long() % (1 << 32)
        sampling.min_position[row] = header[12]
        sampling.stop_ids[row] = header[_FIRST_STOP_ID:]
