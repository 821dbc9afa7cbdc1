"""Which memory is moved onto huge pages, and that it keeps what it holds."""

from __future__ import annotations

import torch

from engine.cpu.huge_pages import HugePages, private_pieces

MIB = 1 << 20
MAPS = """\
555500000000-555500800000 r-xp 00000000 08:01 11 /usr/bin/python3.11
555501000000-555501900000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
7f0000100000-7f0002900000 rw-p 00000000 00:00 0
7f0010000000-7f0011000000 rw-p 00000000 08:01 12 /models/m.gguf
7f0020000000-7f0021000000 rw-s 00000000 00:01 13 /memfd:ring (deleted)
7ffe00000000-7ffe01000000 rw-p 00000000 00:00 0 [stack]
"""


def test_only_whole_huge_pages_of_private_memory_without_a_file_are_taken() -> None:
    assert list(private_pieces(MAPS)) == [
        (0x555501000000, 8 * MIB),
        (0x7F0000200000, 16 * MIB),
        (0x7F0001200000, 16 * MIB),
        (0x7F0002200000, 6 * MIB),
    ]


def test_memory_keeps_what_it_holds_and_the_work_ends() -> None:
    held = [torch.arange(i, i + 400_000) for i in range(24)]  # 3.2 MB each
    pages = HugePages()
    num_pieces = 1
    while pages.move_some():
        num_pieces += 1
    assert num_pieces > 1
    assert not pages.move_some()
    for i, tensor in enumerate(held):
        assert torch.equal(tensor, torch.arange(i, i + 400_000))
