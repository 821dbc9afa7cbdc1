"""What a job is made of: prompt and sampling, as options."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

_PANEL = "Sampling"

Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", help="What to say; `-` reads standard input.")
]
System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="System message.")
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", metavar="TOKENS", rich_help_panel=_PANEL, help="Longest answer."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", metavar="T", rich_help_panel=_PANEL, help="0 is greedy."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", rich_help_panel=_PANEL, help="Smallest set with mass P."),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="K", rich_help_panel=_PANEL, help="The K likeliest tokens."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", rich_help_panel=_PANEL, help="At least P of the best."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="R",
        rich_help_panel=_PANEL,
        help="Over 1: less of what prompt and answer have.",
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty",
        metavar="P",
        rich_help_panel=_PANEL,
        help="Over 0: less of what the answer has.",
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        metavar="F",
        rich_help_panel=_PANEL,
        help="Over 0: the less, the more often the answer has it.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", rich_help_panel=_PANEL, help="Same seed, same tokens."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", rich_help_panel=_PANEL, help="Ends the answer; repeatable."
    ),
]


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What is said."""

    prompt: Prompt
    system: System = None
    raw: Raw = False

    def fields(self) -> dict[str, Any]:
        """`prompt` for a plain continuation, else `messages`. Raises typer.BadParameter."""
        text = sys.stdin.read() if self.prompt == "-" else self.prompt
        if self.raw and self.system is not None:
            reason = "a plain continuation has no system message"
            raise typer.BadParameter(reason, param_hint="--raw")
        if self.raw:
            return {"prompt": text}
        return {"messages": [*system_message(self.system), {"role": "user", "content": text}]}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen, and when it is enough. The names are those of the job's fields."""

    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    stop: Stop = None

    def fields(self) -> dict[str, Any]:
        """Those that were given."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value not in (None, [])
        }


def system_message(text: str | None) -> list[dict[str, str]]:
    """How a conversation with this system message begins."""
    return [{"role": "system", "content": text}] if text else []
