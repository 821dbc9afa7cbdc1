"""Failures of the engine process: one class a failure, a sentence that names the value and the
remedy.

A fault confined to one request is not here: it becomes a `Reject` record or a run that ends with
`Finish.ERROR`.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine process raises on purpose."""


class ConfigError(EngineError):
    """A setting cannot be used."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"engine setting {field} is {value!r}: {fix}")
        self.field = field
        self.value = value


class ModelError(EngineError):
    """Base of everything that keeps a model from being served."""


class OutOfBlocks(EngineError):
    """More KV blocks were asked for than are free: the caller has to look first, so this is a
    bug of ours.
    """

    def __init__(self, wanted_blocks: int, free_blocks: int) -> None:
        super().__init__(
            f"asked for {wanted_blocks} KV blocks, {free_blocks} are free: "
            "compare with num_free before allocating"
        )


class IntegrityError(EngineError):
    """The books of the KV cache, the rows or the steps in flight do not add up: a bug of ours,
    never user input."""


class PlanError(EngineError):
    """A step plan contradicts the state of the rows or the cache: a bug of ours, found by a
    strict runner.
    """


class LinkLost(EngineError):
    """The broker's end of the link is gone."""

    def __init__(self, where: str) -> None:
        super().__init__(f"the broker is gone (seen in {where}): drop all rows and connect again")


class LinkUnavailable(EngineError):
    """No broker could be reached at start within the time given."""

    def __init__(self, path: str, waited_s: float) -> None:
        super().__init__(
            f"no broker answered at {path} within {waited_s:g} s: "
            "start `python -m broker` with this link path"
        )
