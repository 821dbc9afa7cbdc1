"""A chat in the terminal: `python chat.py [tcp://... or redis://...]`. Ctrl-C stops an answer."""

from __future__ import annotations

import sys
from typing import Any

from tokenbus import Client, TokenbusError


def answer(client: Client, messages: list[dict[str, Any]]) -> str:
    """Print the answer while it is made; closing the stream cancels the job."""
    text = ""
    with client.generate(messages=messages, max_tokens=256) as stream:
        try:
            for token in stream:
                text += token.text
                print(token.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except TokenbusError as error:
            print(f"[{error.code}: {error.message}]", end="")
    print()
    return text


def main(address: str) -> None:
    """Read a line, print an answer, until end of file."""
    messages: list[dict[str, Any]] = []
    is_redis = address.startswith("redis")
    with Client(redis=address) if is_redis else Client(zmq=address) as client:
        while True:
            try:
                line = input("> ")
            except EOFError:
                return
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": answer(client, messages)})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555")
