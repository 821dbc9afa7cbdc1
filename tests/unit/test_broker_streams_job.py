"""The buffer of one job at the Redis door: whatever happens to its writes, order is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.streams.entries import fingerprint_of, is_whole, job_id_of, read_chunk, read_top
from broker.streams.jobs import Chunk, Ending, Job, JobTable
from tokenbus.request import JobRequest


def make_job(entry: str = "1-0", job: str = "j") -> Job:
    return Job("jobs", entry, JobRequest(job), "", lease_end=0.0, attempt=1)


@given(st.lists(st.sampled_from(["add", "launch", "land"]), max_size=60))
def test_tokens_stay_in_order_and_what_was_sent_stays_as_it_is(moves: list[str]) -> None:
    job, num_tokens = make_job(), 0
    for move in moves:
        if move == "add":
            assert job.next_seq == num_tokens + 1
            num_tokens += 1
            job.ids.append(num_tokens)
            job.texts.append(str(num_tokens))
        elif move == "launch":
            before = job.flight
            assert job.launch() is (before or job.flight)
        elif move == "land":
            job.land()
        assert job.output_ids() == list(range(1, num_tokens + 1))
        assert is_whole(job.log, job.written_seq)
    job.land()
    job.launch()
    job.land()
    assert "".join(chunk.text for chunk in job.log) == "".join(map(str, range(1, num_tokens + 1)))
    assert job.written_seq == num_tokens


def test_a_chunk_is_read_back_from_its_entry() -> None:
    chunk = Chunk(attempt=2, seq=5, ids=(7, 8, 9), text="é🙂")
    fields = [part.encode() for part in chunk.fields()]
    assert read_chunk(chunk.entry_id.encode(), fields) == chunk
    assert chunk.entry_id == "2-7"
    assert read_top([[b"2-7", fields]]) == (2, 7, b"tokens")
    assert read_top([]) == (0, 0, b"")


def test_what_no_worker_has_written_is_no_chunk() -> None:
    for fields in (
        [b"event", b"tokens"],
        [b"event", b"tokens", b"seq", b"x", b"ids", b"[1]", b"text", b""],
        [b"event", b"tokens", b"seq", b"1", b"ids", b"[]", b"text", b""],
        [b"event", b"done"],
        [b"other", b"1"],
    ):
        assert read_chunk(b"1-1", fields) is None


def test_a_hole_and_a_missing_end_are_seen() -> None:
    first, third = Chunk(1, 1, (1, 2), ""), Chunk(1, 4, (4,), "")
    assert is_whole([first], 2)
    assert not is_whole([first], 3)
    assert not is_whole([first, third], 4)
    assert is_whole([], 0)


def test_the_fingerprint_ignores_names_and_order_only() -> None:
    fields = {b"prompt": b"a", b"top_k": b"5"}
    same = {b"top_k": b"5", b"prompt": b"a", b"job": b"x", b"idempotency_key": b"y"}
    assert fingerprint_of(fields) == fingerprint_of(same)
    assert fingerprint_of(fields) != fingerprint_of({**fields, b"top_k": b"6"})
    assert fingerprint_of({b"a": b"bc"}) != fingerprint_of({b"ab": b"c"})


def test_the_id_for_the_answer_to_a_bad_entry() -> None:
    assert job_id_of({b"job": b"mine"}, "1-1") == "mine"
    assert job_id_of({b"job": b"no good"}, "1-1") == "1-1"
    assert job_id_of({b"job": b"\xff"}, "1-1") == "1-1"
    assert job_id_of({b"body": b"\x81\xa3job\xa1b"}, "1-1") == "b"
    assert job_id_of({b"body": b"\xc1"}, "1-1") == "1-1"


def test_the_table_counts_jobs_that_the_ledger_has_not_answered() -> None:
    table = JobTable()
    first, second = make_job("1-0", "a"), make_job("2-0", "b")
    table.add(first)
    table.add(second)
    table.name(first)
    table.settle(first)
    table.settle(first)
    assert table.num_unsettled == 1
    table.forget(second)
    table.forget(second)
    assert (table.num_unsettled, len(table), table.by_id("a")) == (0, 1, first)
    assert not table.is_held(second)


def test_a_job_has_work_while_anything_is_to_be_written_or_looked_up() -> None:
    job = make_job()
    assert not job.has_work
    job.in_doubt = True
    assert job.has_work
    job.in_doubt, job.ending = False, Ending()
    assert job.has_work
