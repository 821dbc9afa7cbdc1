"""Compiles decode attention that joins its partial results, for every tile of the head sizes it is
made for, and prints a line each: programs a processor that the tile wants, and that fit."""

from __future__ import annotations

import json

import torch

from bench.offline import NUM_PROCESSORS, compiled_kernels, pretend
from kernels.decode_join import JOINED_HEAD_DIMS
from kernels.decode_partials import new_decode_workspace
from kernels.decode_plan import new_decode_plan
from kernels.new_tokens import NewTokens
from kernels.paged_decode import paged_decode
from kernels.tiles import WIDE_HIDDEN, DecodeTile, decode_tiles

META = torch.device("meta")
ROWS, BLOCKS, BLOCK_SIZE, MAX_SLOTS = 8, 64, 64, 2048


def compile_one(tile: DecodeTile, dtype: torch.dtype, head_dim: int, group_heads: int) -> None:
    """One launch with everything that a step may ask for."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    num_kv_heads = 8
    num_heads = num_kv_heads * group_heads
    programs = NUM_PROCESSORS * tile.programs_per_sm
    plan = new_decode_plan(ROWS, tile, programs, MAX_SLOTS, META, in_order=False, joins=True)
    qkv = empty(ROWS, (num_heads + 2 * num_kv_heads) * head_dim)
    q = qkv[:, : num_heads * head_dim].view(ROWS, num_heads, head_dim)
    cache = empty(BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    angles = empty(BLOCKS * BLOCK_SIZE, head_dim // 2, dtype=torch.float32)
    tables = empty(ROWS, BLOCKS, dtype=torch.int32)
    rows = empty(ROWS, dtype=torch.int32)
    paged_decode(
        empty(ROWS, num_heads, head_dim), q, cache, cache, tables, rows, rows, plan,
        new_decode_workspace(plan, num_heads, num_kv_heads, head_dim), 0.1, pdl=True,
        new_tokens=NewTokens(angles, angles, empty(head_dim), empty(head_dim), 1e-6),
    )  # fmt: skip


def main() -> None:
    """All of them; with few and many heads a group, since registers follow from it."""
    pretend()
    seen = set()
    for head_dim in JOINED_HEAD_DIMS:
        for hidden_size in (WIDE_HIDDEN // 4, WIDE_HIDDEN):
            for group_heads in (3, 8):
                for _, tile in decode_tiles(head_dim, torch.bfloat16, False, hidden_size):
                    compile_one(tile, torch.bfloat16, head_dim, group_heads)
                    for kernel in compiled_kernels("kernels.paged_decode"):
                        key = (kernel.options, kernel.registers, kernel.shared_bytes)
                        if kernel.name == "_paged_decode_kernel" and key not in seen:
                            seen.add(key)
                            fit, wanted = kernel.per_sm, tile.programs_per_sm
                            print(json.dumps({"fit": fit, "wanted": wanted, "of": kernel.options}))


if __name__ == "__main__":
    main()
