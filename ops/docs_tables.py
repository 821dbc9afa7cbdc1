"""The tables in the documentation that are made from the code: files, settings, exit codes.

`python -m ops.docs_tables` rewrites them between their markers; a test fails when they are stale.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from broker.metrics_catalogue import table as metrics_table
from ops.exit_codes import MEANINGS
from ops.log_events import table as events_table
from ops.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = ("broker", "engine", "kernels", "clients/python/tokenbus", "ops")


def files_table() -> str:
    """One line for each product file: its name, and the first sentence of its docstring."""
    parts = []
    for folder in _FOLDERS:
        lines = [f"**`{folder}/`**\n"]
        for path in sorted((ROOT / folder).rglob("*.py")):
            summary = first_sentence(path)
            if summary:
                lines.append(f"- `{path.relative_to(ROOT)}`: {summary}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop; empty for none."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[\w)`\"'])\. ", paragraph)[0].rstrip(".")


def settings_table() -> str:
    """Every setting with its variable, type and range, default and meaning."""
    rows = ["| key | environment | values | default | meaning |", "|---|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        section = field.default
        if isinstance(section, BaseModel):
            rows += [
                _row(f"{name}.{key}", inner) for key, inner in type(section).model_fields.items()
            ]
        else:
            rows.append(_row(name, field))
    return "\n".join(rows)


def _row(key: str, field: Any) -> str:
    variable = PREFIX + key.replace(".", "__").upper()
    default = _default(key, field)
    return f"| `{key}` | `{variable}` | {_values(field)} | {default} | {field.description} |"


def _default(key: str, field: Any) -> str:
    if key == "data_dir":
        return "`~/.local/share/tokenbus`"
    value = field.default
    if hasattr(value, "get_secret_value"):
        value = value.get_secret_value()
    if value is PydanticUndefined or value == "":
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`"


def _values(field: Any) -> str:
    options = getattr(field.annotation, "__args__", ())
    if options and all(isinstance(option, str) for option in options):
        return ", ".join(f"`{option}`" for option in options)
    name = {"SecretStr": "text", "str": "text", "Path": "path", "bool": "`true`, `false`"}.get(
        field.annotation.__name__, field.annotation.__name__
    )
    limits = []
    for bound in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (limit := getattr(bound, attribute, None)) is not None:
                limits.append(f"{sign} {limit:,}")
    return " ".join([name, ", ".join(limits)]).strip()


def exit_codes_table() -> str:
    """Every exit code and its meaning."""
    rows = [f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "files": ("docs/ARCHITECTURE.md", files_table),
    "settings": ("docs/OPERATIONS.md", settings_table),
    "exit codes": ("docs/OPERATIONS.md", exit_codes_table),
    "metrics": ("docs/OPERATIONS.md", metrics_table),
    "events": ("docs/OPERATIONS.md", events_table),
}


def updated(name: str, document: str) -> str:
    """The document with this table made anew. Raises ValueError if it has no markers."""
    begin, end = f"<!-- {name}: made by ops/docs_tables.py -->", f"<!-- end of {name} -->"
    if begin not in document or end not in document:
        raise ValueError(f"no markers for {name!r}")
    head, _, rest = document.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{TABLES[name][1]()}\n\n{end}{tail}"


def main() -> None:
    """Rewrite every table in place."""
    for name, (file, _) in TABLES.items():
        path = ROOT / file
        path.write_text(updated(name, path.read_text()))


if __name__ == "__main__":
    main()
