"""When a crashed process is started again, and when it is given up."""

from __future__ import annotations

from ops.restart_policy import CrashRecord


def test_the_third_crash_in_a_row_without_getting_ready_is_the_last() -> None:
    record = CrashRecord()
    hopeless = []
    for time_s in (0.0, 1.0, 2.0):
        record.add(time_s, was_ready=False)
        hopeless.append(record.is_hopeless)
    assert hopeless == [False, False, True]


def test_getting_ready_in_between_starts_the_count_anew() -> None:
    record = CrashRecord()
    for time_s, was_ready in ((0.0, False), (1.0, False), (2.0, True), (3.0, False), (4.0, False)):
        record.add(time_s, was_ready=was_ready)
    assert not record.is_hopeless


def test_jobs_that_kill_engines_do_not_end_the_worker_but_twenty_crashes_a_minute_do() -> None:
    record = CrashRecord()
    for number in range(19):
        record.add(float(number), was_ready=True)
    assert not record.is_hopeless
    record.add(19.0, was_ready=True)
    assert record.is_hopeless


def test_the_wait_doubles_up_to_ten_seconds_and_is_short_again_after_a_quiet_minute() -> None:
    record = CrashRecord()
    waits = []
    for number in range(8):
        record.add(float(number), was_ready=True)
        waits.append(record.backoff_s)
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    record.add(200.0, was_ready=True)
    assert record.backoff_s == 0.2
