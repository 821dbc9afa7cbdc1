"""One job's events -> tokens in order, each once, with the checksum of them all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.assemble import Assembler, Verdict
from tokenbus.errors import ProtocolError
from tokenbus.events import Done, Tokens, Usage, crc32_of_ids


def tokens(seq: int, *ids: int) -> Tokens:
    return Tokens("j", 1, seq, ids, "")


def done(seq: int, crc: int) -> Done:
    return Done("j", 1, seq, "stop", "", Usage(), crc)


def test_events_in_order_are_new_and_repeats_are_dropped() -> None:
    job = Assembler()
    taken = [job.take(tokens(1, 5, 6)), job.take(tokens(1, 5, 6)), job.take(tokens(3, 7))]
    assert taken == [Verdict.NEW, Verdict.REPEAT, Verdict.NEW]
    assert Verdict.NEW is job.finish(done(3, crc32_of_ids((5, 6, 7))))


def test_a_hole_is_noticed_and_not_taken() -> None:
    job = Assembler()
    assert Verdict.HOLE is job.take(tokens(2, 6))
    assert Verdict.HOLE is job.finish(done(1, 0))
    assert job.last == 0


def test_an_event_that_overlaps_what_was_seen_is_asked_for_again() -> None:
    """Its text cannot be split, so handing it out would repeat some."""
    job = Assembler()
    job.take(tokens(1, 5, 6))
    assert Verdict.HOLE is job.take(tokens(2, 6, 7))


def test_a_wrong_crc_or_a_short_end_is_a_protocol_error() -> None:
    job = Assembler()
    job.take(tokens(1, 5))
    with pytest.raises(ProtocolError) as caught:
        job.finish(done(1, 1))
    assert caught.value.field == "crc"
    with pytest.raises(ProtocolError):
        job.finish(done(0, 0))


def test_a_reader_from_the_middle_cannot_check_the_crc_unless_it_has_the_ids() -> None:
    late = Assembler(after=2)
    late.take(tokens(3, 7))
    assert Verdict.NEW is late.finish(done(3, 1))
    knowing = Assembler(have=(5, 6))
    knowing.take(tokens(3, 7))
    assert Verdict.NEW is knowing.finish(done(3, crc32_of_ids((5, 6, 7))))
    assert knowing.ids == [5, 6, 7]


def test_the_first_event_may_start_before_the_asked_position() -> None:
    late = Assembler(after=2)
    assert Verdict.REPEAT is late.take(tokens(1, 5, 6))
    assert Verdict.NEW is late.take(tokens(2, 6, 7))
    assert late.last == 3


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30), st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_is_lost_or_repeated_every_token_is_taken_once(
    ids: list[int], data: st.DataObject
) -> None:
    """A lossy, repeating channel: after a hole the sender resumes at last + 1, as RESUME asks."""
    job, seen, at = Assembler(), [], 0
    for _ in range(200):
        size = data.draw(st.integers(1, 4)) if at < len(ids) else 0
        event = tokens(at + 1, *ids[at : at + size])
        at = min(at + size, len(ids))
        fate = data.draw(st.sampled_from(["ok", "ok", "lost", "twice"]))
        for _ in range({"ok": 1, "lost": 0, "twice": 2}[fate] if event.ids else 0):
            verdict = job.take(event)
            if verdict is Verdict.NEW:
                seen += event.ids
            if verdict is Verdict.HOLE:
                at = job.last
        if at == len(ids):
            if job.finish(done(len(ids), crc32_of_ids(ids))) is Verdict.NEW:
                break
            at = job.last
    assert seen == ids[: len(seen)]
    assert job.ids == seen
