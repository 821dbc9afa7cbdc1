"""Submit a job, read half of it, and let another process read the rest.

`python resume.py redis://localhost` prints a command that reads on, at once or later.
"""

from __future__ import annotations

import sys

from tokenbus import Client


def begin(client: Client, address: str) -> None:
    """Submit, read ten tokens, leave: `tail` does not own the job, so it goes on."""
    job = client.submit("Once upon a time", max_tokens=64)
    last = 0
    for token in client.tail(job):
        print(token.text, end="", flush=True)
        last = token.seq + len(token.ids) - 1
        if last >= 10:
            break
    print(f"\n\npython resume.py {address} {job} {last}")


def go_on(client: Client, job: str, last: int) -> None:
    """Read what follows."""
    print(client.tail(job, from_seq=last).text())


def main(address: str, job: str = "", last: str = "0") -> None:
    """Begin, or go on where the printed command says."""
    with Client(redis=address) as client:
        if job:
            go_on(client, job, int(last))
        else:
            begin(client, address)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["redis://localhost"])
