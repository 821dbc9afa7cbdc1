"""Why a model cannot be loaded.

Every error names the thing that is wrong and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import ModelError


class UnsupportedModelError(ModelError):
    """The checkpoint asks for something this engine does not implement.

    feature: what kind of thing (`architecture`, `rope scaling`, `quantization`, ...). found: the
    checkpoint's value. supported: the values that would work.
    """

    def __init__(self, feature: str, found: object, supported: Iterable[object]) -> None:
        self.feature = feature
        self.found = found
        self.supported = tuple(supported)
        listed = ", ".join(str(s) for s in self.supported)
        super().__init__(f"unsupported {feature}: {found} (supported: {listed})")


class InvalidConfigError(ModelError):
    """A model's configuration lacks a value, or holds one that contradicts another."""


class CheckpointError(ModelError):
    """Tensors are missing, unexpected, of the wrong shape, or the file is damaged."""


class TensorMismatchError(CheckpointError):
    """The checkpoint's tensors are not those that its configuration implies."""

    def __init__(self, missing: Iterable[str], unexpected: Iterable[str]) -> None:
        self.missing = tuple(sorted(missing))
        self.unexpected = tuple(sorted(unexpected))
        parts = []
        if self.missing:
            parts.append(f"missing tensors: {', '.join(self.missing)}")
        if self.unexpected:
            parts.append(f"unexpected tensors: {', '.join(self.unexpected)}")
        super().__init__("; ".join(parts))


class MemoryPlanError(ModelError):
    """The weights or the KV cache do not fit in memory. Carries the numbers."""

    def __init__(self, what: str, needed_bytes: int, available_bytes: int, advice: str) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        gib = 1 << 30
        super().__init__(
            f"{what} needs {needed_bytes / gib:.2f} GiB, "
            f"{available_bytes / gib:.2f} GiB is available: {advice}"
        )


class DeviceUnavailableError(ModelError):
    """The configured device cannot be used by this process."""
