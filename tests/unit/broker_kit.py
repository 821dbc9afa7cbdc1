"""Stand-ins for the actors around the part of the broker that is tested."""

from __future__ import annotations

from typing import Any


class Mailbox:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def tell(self, message: object) -> bool:
        self.messages.append(message)
        return True
