"""The KV cache's books: allocation, sharing, eviction order, prefix hits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_manager import BROKEN, ROOT, BlockManager
from engine.errors import IntegrityError, OutOfBlocks

SIZE = 4


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def fill(manager: BlockManager, tokens: np.ndarray, salt: int = 0) -> list[int]:
    """Allocate and register the full blocks of `tokens`."""
    blocks = manager.allocate(len(tokens) // SIZE)
    serial = ROOT
    for i, block in enumerate(blocks):
        chunk = tokens[i * SIZE : (i + 1) * SIZE].tobytes()
        serial = manager.register(block, serial, salt, chunk)
    return blocks


def test_allocate_takes_distinct_blocks_and_refuses_more_than_there_are() -> None:
    manager = BlockManager(5, SIZE)
    taken = manager.allocate(3)
    assert len(set(taken)) == 3
    with pytest.raises(OutOfBlocks, match="asked for 3 KV blocks, 2 are free"):
        manager.allocate(3)
    assert manager.num_free == 2
    manager.check_integrity([taken])


def test_a_prefix_is_hit_block_by_block_up_to_the_first_difference() -> None:
    manager = BlockManager(8, SIZE)
    blocks = fill(manager, np.arange(12, dtype=np.int32))
    query = np.arange(12, dtype=np.int32)
    assert manager.match(query, 0, 3).blocks == blocks
    assert manager.match(query, 0, 2).blocks == blocks[:2]
    query[5] = 99
    assert manager.match(query, 0, 3).blocks == blocks[:1]
    assert manager.match(query[1:], 0, 2).blocks == []


def test_an_equal_block_after_another_prefix_is_no_hit() -> None:
    manager = BlockManager(8, SIZE)
    fill(manager, ids(1, 1, 1, 1, 2, 2, 2, 2))
    assert manager.match(ids(3, 3, 3, 3, 2, 2, 2, 2), 0, 2).blocks == []


def test_tokens_that_collide_under_a_rolling_hash_do_not_share_blocks() -> None:
    """Token j + 31, token j+1 - 1: equal under h * 31 + t, as in the reports of cross-talk."""
    manager = BlockManager(8, SIZE)
    fill(manager, ids(100, 100, 7, 7))
    assert manager.match(ids(99, 131, 7, 7), 0, 1).blocks == []
    assert manager.match(ids(101, 69, 7, 7), 0, 1).blocks == []


def test_two_salts_never_share() -> None:
    manager = BlockManager(8, SIZE)
    blocks = fill(manager, ids(1, 2, 3, 4), salt=1)
    assert manager.match(ids(1, 2, 3, 4), 2, 1).blocks == []
    assert manager.match(ids(1, 2, 3, 4), 1, 1).blocks == blocks


def test_a_prefix_whose_head_was_evicted_is_no_hit_even_if_the_tail_is_there() -> None:
    manager = BlockManager(3, SIZE)
    head, tail = fill(manager, ids(1, 1, 1, 1, 2, 2, 2, 2))
    manager.release([head])
    taken = manager.allocate(2)
    assert head in taken
    assert manager.match(ids(1, 1, 1, 1, 2, 2, 2, 2), 0, 2).blocks == []
    serial = manager.register(taken[0], ROOT, 0, ids(1, 1, 1, 1).tobytes())
    assert serial != ROOT
    assert manager.match(ids(1, 1, 1, 1, 2, 2, 2, 2), 0, 2).blocks == [taken[0]]
    manager.check_integrity([[tail], taken])


def test_blank_blocks_are_used_before_cached_ones_and_tails_before_heads() -> None:
    manager = BlockManager(4, SIZE)
    head, tail = fill(manager, ids(1, 1, 1, 1, 2, 2, 2, 2))
    manager.release([head, tail])
    assert manager.allocate(2) == [2, 3]
    assert manager.allocate(1) == [tail]
    assert manager.match(ids(1, 1, 1, 1, 2, 2, 2, 2), 0, 2).blocks == [head]


def test_a_hit_makes_a_prefix_young_again() -> None:
    manager = BlockManager(2, SIZE)
    old, young = (fill(manager, ids(t, t, t, t))[0] for t in (1, 2))
    manager.release([old])
    manager.release([young])
    manager.share([old])
    manager.release([old])
    assert manager.allocate(1) == [young]


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    manager = BlockManager(4, SIZE)
    blocks = fill(manager, ids(1, 2, 3, 4))
    manager.share(blocks)
    assert manager.count_reclaimable([blocks]) == 0
    assert manager.count_reclaimable([blocks, blocks]) == 1
    manager.release(blocks)
    assert manager.num_free == 3
    manager.release(blocks)
    assert manager.num_free == 4


def test_releasing_a_free_block_is_an_integrity_error() -> None:
    manager = BlockManager(2, SIZE)
    blocks = manager.allocate(1)
    manager.release(blocks)
    with pytest.raises(IntegrityError, match="released with 0 references"):
        manager.release(blocks)


def test_registering_the_same_content_twice_keeps_the_first_block() -> None:
    manager = BlockManager(4, SIZE)
    first = fill(manager, ids(1, 2, 3, 4))
    second = fill(manager, ids(1, 2, 3, 4))
    assert manager.match(ids(1, 2, 3, 4), 0, 1).blocks == first
    manager.check_integrity([first, second])


def test_forgotten_blocks_are_not_hit() -> None:
    manager = BlockManager(4, SIZE)
    blocks = fill(manager, ids(1, 2, 3, 4))
    manager.forget(blocks)
    assert manager.match(ids(1, 2, 3, 4), 0, 1).blocks == []
    manager.check_integrity([blocks])


def test_a_disabled_cache_never_hits() -> None:
    manager = BlockManager(4, SIZE, enable_prefix_cache=False)
    blocks = manager.allocate(1)
    assert manager.register(blocks[0], ROOT, 0, ids(1, 2, 3, 4).tobytes()) == BROKEN
    assert manager.match(ids(1, 2, 3, 4), 0, 1).blocks == []


@pytest.mark.parametrize("damage", ["count", "link", "table", "key"])
def test_check_integrity_finds_damage(damage: str) -> None:
    manager = BlockManager(4, SIZE)
    blocks = fill(manager, np.arange(8, dtype=np.int32))
    tables = [blocks]
    manager.check_integrity(tables)
    if damage == "count":
        manager._refs[blocks[0]] += 1
    elif damage == "link":
        manager._next[2] = 2
    elif damage == "table":
        tables = [blocks[:1]]
    else:
        manager._key[blocks[0]] = None
    with pytest.raises(IntegrityError):
        manager.check_integrity(tables)


class BlockMachine(RuleBasedStateMachine):
    """Owners of random token strings over few tokens come and go; a model remembers what each
    block holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12, SIZE)
        self.owners: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> salt, whole prefix
        self.count = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=0, max_size=5),
        salt=st.integers(0, 1),
        registers=st.booleans(),
    )
    def enter(self, tokens: list[int], salt: int, registers: bool) -> None:
        """A new owner of 0 to 5 blocks, each of one repeated token."""
        flat = np.repeat(np.array(tokens, np.int32), SIZE)
        match = self.manager.match(flat, salt, len(tokens))
        for i, block in enumerate(match.blocks):
            assert self.content[block] == (salt, tuple(tokens[: i + 1])), "hit on another prefix"
        missing = len(tokens) - len(match.blocks)
        if missing + self.manager.count_free(match.blocks) > self.manager.num_free:
            return
        self.manager.share(match.blocks)
        table = match.blocks + self.manager.allocate(missing)
        serial = match.serial
        for i in range(len(match.blocks), len(tokens)):
            self.content[table[i]] = (salt, tuple(tokens[: i + 1]))
            if registers:
                chunk = flat[i * SIZE : (i + 1) * SIZE].tobytes()
                serial = self.manager.register(table[i], serial, salt, chunk)
        self.count += 1
        self.owners[self.count] = table

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        before = self.manager.num_free
        table = self.owners.pop(owner)
        gain = self.manager.count_reclaimable([table])
        self.manager.release(table)
        assert self.manager.num_free == before + gain

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        self.manager.forget(self.owners[data.draw(st.sampled_from(sorted(self.owners)))])

    @invariant()
    def books_add_up(self) -> None:
        self.manager.check_integrity(self.owners.values())

    def teardown(self) -> None:
        for table in self.owners.values():
            self.manager.release(table)
        assert self.manager.num_used == 0
        self.manager.forget(range(self.manager.num_blocks))
        assert self.manager.num_cached == 0
        self.manager.check_integrity([])


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
