"""Sequences of operators without Python between them: the same function, with or without."""

from __future__ import annotations

import pytest
import torch

from engine.cpu.compiled import compiled


def halved_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add(y).mul_(0.5)


def test_a_compiled_function_gives_the_bits_of_the_function() -> None:
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    script = compiled(halved_sum)
    assert script is not halved_sum
    for _ in range(4):  # the interpreter rewrites a function after its first calls
        assert torch.equal(script(x, y), halved_sum(x, y))


@pytest.mark.parametrize("error", [RuntimeError("not on this Python"), AttributeError("script")])
def test_where_torch_compiles_nothing_the_function_runs_itself(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def script(_: object) -> None:
        raise error

    monkeypatch.setattr(torch.jit, "script", script)
    assert compiled(halved_sum) is halved_sum
