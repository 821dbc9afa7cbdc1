"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.util import dot_row_by_row


@pytest.fixture
def row_by_row_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which a row stands in another place and shall have the same bits; takes twice
    as long as BLAS."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_row_by_row)
