"""Whether two SUBMITs with one job id ask for the same."""

from __future__ import annotations

import hashlib
from array import array

from tokenbus.request import JobRequest


def digest_of(request: JobRequest) -> bytes:
    """128 bits over everything that decides the answer; `have` and the deadline do not."""
    digest = hashlib.blake2b(digest_size=16)
    head = (
        request.prompt,
        request.messages,
        request.params,
        request.priority,
        request.tenant,
        request.idempotency_key,
        request.model,
        request.durable,
    )
    digest.update(repr(head).encode())
    digest.update(array("i", request.input_ids or ()).tobytes())
    return digest.digest()
