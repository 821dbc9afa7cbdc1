"""The engine's idle work: piece by piece, and a line in the log when it is done."""

from __future__ import annotations

from structlog.testing import capture_logs

from engine.idle_work import IdleWork


class Runner:
    """Has so many pieces to do."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces

    def prepare(self) -> bool:
        self.pieces -= self.pieces > 0
        return self.pieces > 0


def test_the_log_says_once_that_all_is_done_and_again_after_more_work() -> None:
    runner = Runner(4)
    work = IdleWork(runner)  # type: ignore[arg-type]
    with capture_logs() as logs:
        assert [work.do_piece() for _ in range(6)] == [True] * 3 + [False] * 3
        runner.pieces = 2
        assert [work.do_piece() for _ in range(3)] == [True, False, False]
    assert [(line["event"], line["pieces"]) for line in logs] == [
        ("engine.prepared", 3),
        ("engine.prepared", 1),
    ]


def test_a_runner_without_such_work_says_nothing() -> None:
    with capture_logs() as logs:
        assert not IdleWork(Runner(0)).do_piece()  # type: ignore[arg-type]
    assert logs == []
