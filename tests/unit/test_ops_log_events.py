"""The catalogue of log events agrees with the calls in the code."""

from __future__ import annotations

from ops.log_events import MEANINGS, find_events


def test_every_event_has_a_meaning_and_every_meaning_an_event() -> None:
    events = find_events()
    assert sorted(events.keys() - MEANINGS.keys()) == []
    assert sorted(MEANINGS.keys() - events.keys()) == []


def test_no_event_has_a_key_for_text_of_a_job() -> None:
    forbidden = {"prompt", "messages", "text", "ids", "token_ids", "password", "secret", "url"}
    assert [name for name, event in find_events().items() if forbidden & event.keys.keys()] == []


def test_the_line_of_a_job_has_its_keys() -> None:
    expected = ["job", "door", "attempt", "prompt_tokens", "completion_tokens", "cached_tokens"]
    expected += ["queue_ms", "ttft_ms", "total_ms", "tok_s", "reason"]
    events = find_events()
    assert list(events["job.finished"].keys) == expected
    assert list(events["job.failed"].keys) == [*expected, "error", "dead"]
