"""Eight jobs at once, their tokens as they come: `python stream.py [tcp://... or redis://...]`."""

from __future__ import annotations

import asyncio
import sys

from tokenbus import AsyncClient

SEAS = ["Baltic", "Black", "Caspian", "Red", "North", "Coral", "Dead", "Yellow"]


async def ask(client: AsyncClient, sea: str) -> None:
    """Print a line for every token."""
    stream = client.generate(f"The {sea} Sea is", max_tokens=16)
    async for token in stream:
        print(f"{sea:>8} {token.seq:>3} {token.text!r}")
    if stream.done is not None:
        print(f"{sea:>8} {stream.done.reason}, {stream.done.usage.completion_tokens} tokens")


async def main(address: str) -> None:
    """Ask about every sea at the same time, over one connection."""
    is_redis = address.startswith("redis")
    async with AsyncClient(redis=address) if is_redis else AsyncClient(zmq=address) as client:
        await asyncio.gather(*[ask(client, sea) for sea in SEAS])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555"))
