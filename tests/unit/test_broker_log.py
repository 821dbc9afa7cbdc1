"""The log: several processes write to one file or pipe."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json
import sys
import structlog
from broker.log import configure_logging

class Stderr:
    writes = []
    def write(self, text): self.writes.append(text)
    def flush(self): pass
    def isatty(self): return False

sys.stderr = Stderr()
configure_logging()
for number in range(2):
    structlog.get_logger().info("a.line", number=number)
print(json.dumps(Stderr.writes))
"""


def test_a_line_and_its_end_are_one_write() -> None:
    """Two writes would let another process's line come between them."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    writes = json.loads(done.stdout)
    assert [text.count("\n") for text in writes] == [1, 1]
    assert [json.loads(text)["number"] for text in writes] == [0, 1]
