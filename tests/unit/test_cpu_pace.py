"""The number of threads follows what steps took, and trials of the slower number become rare."""

from __future__ import annotations

from collections.abc import Callable

from engine.cpu.pace import ThreadPacer, cores_are_free


def run(
    pacer: ThreadPacer, seconds: Callable[[int], float], steps: int, size: int = 8
) -> list[int]:
    """Threads of each of `steps` steps that take `seconds(threads)`."""
    chosen = []
    for _ in range(steps):
        threads = pacer.choose(size)
        pacer.record(size, seconds(threads))
        chosen.append(threads)
    return chosen


def test_all_threads_are_used_soon_where_they_help() -> None:
    chosen = run(ThreadPacer(4, lambda: True), lambda threads: 1.0 / threads, 500)
    assert chosen[10:].count(4) > 470


def test_one_thread_is_used_where_more_are_slower_and_trials_become_rare() -> None:
    chosen = run(ThreadPacer(2, lambda: True), lambda threads: 20.0 if threads == 2 else 1.0, 4000)
    assert 5 <= chosen.count(2) <= 13
    assert chosen[1000:].count(2) <= 6


def test_a_change_of_load_is_noticed() -> None:
    pacer = ThreadPacer(2, lambda: True)
    run(pacer, lambda threads: 1.0 / threads, 200)
    busy = run(pacer, lambda threads: 30.0 if threads == 2 else 1.0, 400)
    assert busy[-100:].count(2) == 0
    quiet = run(pacer, lambda threads: 1.0 / threads, 1000)
    assert quiet[-100:].count(2) >= 98


def test_a_slow_step_by_chance_does_not_turn_the_choice_for_long() -> None:
    pacer = ThreadPacer(2, lambda: True)
    run(pacer, lambda threads: 1.0 / threads, 100)
    pacer.record(8, 50.0)
    chosen = run(pacer, lambda threads: 1.0 / threads, 300)
    assert chosen[-100:].count(2) >= 97


def test_steps_of_other_sizes_are_judged_apart() -> None:
    pacer = ThreadPacer(2, lambda: True)
    run(pacer, lambda threads: 1.0 * threads, 300, size=1)
    prompts = run(pacer, lambda threads: 1.0 / threads, 300, size=200)
    assert prompts[-50:].count(2) >= 48
    assert run(pacer, lambda threads: 1.0 * threads, 50, size=1).count(2) <= 1


def test_a_single_thread_is_never_left() -> None:
    assert set(run(ThreadPacer(1, lambda: True), lambda _: 1.0, 100)) == {1}


def test_while_other_work_runs_a_step_gets_one_thread_and_judges_nothing() -> None:
    free = [True]
    pacer = ThreadPacer(2, lambda: free[0])
    run(pacer, lambda threads: 1.0 / threads, 100)
    free[0] = False
    assert set(run(pacer, lambda _: 9.0, 100)) == {1}
    free[0] = True
    assert run(pacer, lambda threads: 1.0 / threads, 100).count(2) >= 97


def test_more_threads_than_cores_never_have_room() -> None:
    assert not cores_are_free(100_000)
