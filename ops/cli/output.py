"""Printing for people and for programs, and the end of a command that cannot go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ops.exit_codes import CommandError


def print_json(value: object) -> None:
    """One JSON value in one line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table; numbers are aligned to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def print_facts(facts: dict[str, Any]) -> None:
    """Names and values, one pair a line."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def fail(error: CommandError, *, as_json: bool) -> NoReturn:
    """Say what is wrong and how to mend it on stderr (JSON: on stdout); leave with its code."""
    if as_json:
        body = {"error": error.message, "remedy": error.remedy, "exit_code": int(error.code)}
        print_json(body)
    else:
        print(f"error: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"       {error.remedy}", file=sys.stderr)
    raise SystemExit(int(error.code))
