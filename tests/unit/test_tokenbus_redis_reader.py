"""The reader of reply streams gives a reader only entries that were read for it."""

from __future__ import annotations

from tokenbus.redis_reader import _Followed


def test_a_new_reader_is_not_given_the_answer_to_an_older_question() -> None:
    """An XREAD in flight was asked for a reader that left; a new one starts from the beginning."""
    followed = _Followed()
    assert followed.cursor == b"0"
    assert followed.read_from != followed.cursor
