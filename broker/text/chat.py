"""Chat messages -> prompt text, by the model's own Jinja template in a sandbox.

A template is untrusted code that came with a checkpoint: it runs in Jinja's immutable sandbox, and
its output is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenbus.errors import InvalidField, TooLarge, Unsupported

MAX_RENDERED_CHARS = 8 << 20


class _TemplateRefused(jinja2.TemplateError):
    """The template called raise_exception: these messages are not for it."""


class ChatTemplate:
    """A compiled template. Raises Unsupported at construction if it cannot be compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            message = f"the model's chat template does not compile: {error}"
            raise Unsupported(message, field="model") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Prompt text that ends where the assistant begins. Raises InvalidField for `messages`."""
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            message = f"messages: the model's chat template refuses them: {error}"
            raise InvalidField(message[:400], field="messages") from error
        if len(text) > MAX_RENDERED_CHARS:
            message = f"messages: {len(text)} characters after the chat template"
            raise TooLarge(message, field="messages")
        return text


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefused(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
