"""Accounts for the blocks of the paged KV cache. Integers only: it owns no device memory and knows
no rows.

A block is in use (its reference count is above zero) or in the free list. A free block may still
hold the KV of a known prefix; then it is *cached* and can be taken back by a prompt that starts
with the same tokens. The list is in order of eviction: blocks without content first, then cached
blocks, least recently used first.

The prefix cache is a trie in one dictionary. The key of a full block is (serial of its parent,
cache salt, token bytes), a serial names one registration and is never given out twice, and the
dictionary compares whole keys. So a hit means equal tokens all the way back to position 0 in the
same tenant, not an equal hash: no collision can hand one tenant's KV to another. (Python keys its
hash of bytes per process, so slots cannot be aimed at from outside either.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import IntegrityError, OutOfBlocks

IntArray = npt.NDArray[np.int32]
Key = tuple[int, int, bytes]

ROOT = 0  # serial of the empty prefix
BROKEN = -1  # serial of a prefix that may not be continued in the cache


@dataclass(frozen=True, slots=True)
class KeyTail:
    """What is added to the keys of a run's blocks from `first_block` on: equal tokens alone do not
    make their KV equal.
    """

    first_block: int
    data: bytes


NO_TAIL = KeyTail(0, b"")


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: its blocks in order of position and the serial of the last one."""

    blocks: list[int]
    serial: int


class BlockManager:
    """Reference counts, an LRU free list with O(1) removal from its middle, and the prefix
    cache.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.num_free = num_blocks  # length of the free list, cached blocks included
        self._end = num_blocks  # sentinel of the circular list: next of it is evicted first
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self._refs = [0] * num_blocks
        self._key: list[Key | None] = [None] * num_blocks
        self._serial = [BROKEN] * num_blocks
        self._block_of: dict[Key, int] = {}
        self._last_serial = ROOT

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks, used or free, whose content a prompt can hit."""
        return len(self._block_of)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks off the free list, each with one reference; cached ones are
        forgotten.

        Raises: OutOfBlocks: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        following, refs, keys, end = self._next, self._refs, self._key, self._end
        taken = []
        block = following[end]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            if keys[block] is not None:
                self._forget(block)
            block = following[block]
        following[end] = block
        self._prev[block] = end
        self.num_free -= count
        return taken

    def match(
        self, token_ids: IntArray, cache_salt: int, max_blocks: int, tail: KeyTail = NO_TAIL
    ) -> Match:
        """Longest cached prefix of `token_ids` (int32 [L]) in full blocks, at most `max_blocks`;
        changes nothing.
        """
        blocks: list[int] = []
        serial = ROOT
        if not self.enable_prefix_cache or not self._block_of:
            return Match(blocks, serial)
        size = 4 * self.block_size
        data = token_ids[: max_blocks * self.block_size].tobytes()
        for at in range(0, len(data) - size + 1, size):
            tokens = data[at : at + size]
            if at >= tail.first_block * size:
                tokens += tail.data
            block = self._block_of.get((serial, cache_salt, tokens))
            if block is None:
                break
            blocks.append(block)
            serial = self._serial[block]
        return Match(blocks, serial)

    def shorten(self, match: Match, num_blocks: int) -> Match:
        """The first `num_blocks` blocks of a match, just found."""
        blocks = match.blocks[:num_blocks]
        return Match(blocks, self._serial[blocks[-1]] if blocks else ROOT)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the free list: what `share` would take off it."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def count_reclaimable(self, tables: Iterable[Sequence[int]]) -> int:
        """How many blocks would become free if all of `tables`, one an owner, were released."""
        counts = Counter(block for table in tables for block in table)
        return sum(1 for block, count in counts.items() if count == self._refs[block])

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of `blocks`; free ones leave the free list."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take an owner off each of `blocks`, given in order of position.

        The last block goes to the list first, so the tail of a prefix is evicted before its head.
        """
        refs, keys = self._refs, self._key
        for block in reversed(blocks):
            if refs[block] <= 0:
                raise IntegrityError(f"block {block} released with {refs[block]} references")
            refs[block] -= 1
            if refs[block] == 0:
                self._link(block, first=keys[block] is None)

    def register(self, block: int, parent: int, cache_salt: int, tokens: bytes) -> int:
        """Make a full block known to the prefix cache.

        Call it only after the step that writes the block was launched and with tokens known on the
        host.

        Args: block: a block in use whose KV belongs to `tokens`. parent: serial of the block before
            it, ROOT for the first one. tokens: little-endian int32 bytes of its block_size token
            ids, then the run's `KeyTail` where it applies.

        Returns: The serial to continue with: that of this block, or of an equal one registered
            before.
        """
        if not self.enable_prefix_cache or parent == BROKEN:
            return BROKEN
        key = (parent, cache_salt, tokens)
        known = self._block_of.get(key)
        if known is not None:
            return self._serial[known]
        self._last_serial += 1
        self._block_of[key] = block
        self._key[block] = key
        self._serial[block] = self._last_serial
        return self._last_serial

    def forget(self, blocks: Iterable[int]) -> None:
        """Strike blocks from the prefix cache: their content may not be trusted (non-finite
        values).
        """
        for block in blocks:
            if self._key[block] is not None:
                self._forget(block)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Compare the books: free + cached + in use == total, counts equal to the tables, no block
        listed twice.

        Args: owned: the block table of every owner.

        Raises: IntegrityError: naming the first difference.
        """
        listed = self._walk()
        counts = Counter(block for table in owned for block in table)
        for block, refs in enumerate(self._refs):
            if refs != counts[block]:
                raise IntegrityError(
                    f"block {block} has {refs} references, the tables hold {counts[block]}"
                )
            if (refs == 0) != (block in listed):
                raise IntegrityError(
                    f"block {block} with {refs} references: in free list {block in listed}"
                )
        for key, block in self._block_of.items():
            if self._key[block] != key:
                raise IntegrityError(f"cache entry of block {block} does not point back")
        num_keys = sum(1 for key in self._key if key is not None)
        if num_keys != len(self._block_of):
            raise IntegrityError(
                f"{num_keys} blocks have keys, the cache has {len(self._block_of)}"
            )
        num_cached = sum(1 for block in listed if self._key[block] is not None)
        in_use = sum(1 for refs in self._refs if refs > 0)
        num_blank = len(listed) - num_cached
        if num_blank + num_cached + in_use != self.num_blocks:
            raise IntegrityError(
                f"{num_blank} free + {num_cached} cached + {in_use} in use != {self.num_blocks}"
            )

    def _walk(self) -> set[int]:
        """Every block of the free list, checked in both directions."""
        listed: set[int] = set()
        before, block = self._end, self._next[self._end]
        while block != self._end:
            if block in listed:
                raise IntegrityError(f"block {block} is twice in the free list")
            if self._prev[block] != before:
                raise IntegrityError(
                    f"block {block}: back link is {self._prev[block]}, not {before}"
                )
            listed.add(block)
            before, block = block, self._next[block]
        if self._prev[self._end] != before or len(listed) != self.num_free:
            raise IntegrityError(f"free list has {len(listed)} blocks, count says {self.num_free}")
        return listed

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._block_of[key]
            self._key[block] = None
            self._serial[block] = BROKEN

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link(self, block: int, first: bool) -> None:
        """Put a block at the end of the list, or at its start: blank blocks are used up before
        cached ones.
        """
        before = self._end if first else self._prev[self._end]
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
