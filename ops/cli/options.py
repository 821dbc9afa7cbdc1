"""Options that all commands share, and groups of options: dataclasses whose fields are options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ops.exit_codes import CommandError, ExitCode

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings file (default: ./tokenbus.toml if it is there)."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any other setting, such as engine.max_num_seqs=8."
    ),
]


def nested(assignments: list[str] | None) -> dict[str, Any]:
    """`["engine.max_num_seqs=8"]` -> `{"engine": {"max_num_seqs": "8"}}`."""
    tree: dict[str, Any] = {}
    for text in assignments or []:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise CommandError(
                ExitCode.USAGE,
                f"--set {text!r} is not KEY=VALUE",
                "Write --set engine.dtype=float32.",
            )
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = value
    return tree


def with_assignments(assignments: list[str] | None, **flags: Any) -> dict[str, Any]:
    """The flags that were given, over what --set says."""
    return nested(assignments) | {key: value for key, value in flags.items() if value is not None}


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A Typer command that has, for each parameter that is a dataclass, one option a field.

    So an option that several commands take, with its name, help and type, stands in one place.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            parameters += _parameters_of(kind)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            fields = [field.name for field in dataclasses.fields(kind)]
            values[name] = kind(**{field: values.pop(field) for field in fields})
        command(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=(
                inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            ),
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
