#!/usr/bin/env bash
# The whole thing in one command: a worker with an embedded Redis, eight chat jobs at once over both doors, their
# tokens live, a table. Needs bash and Python 3.11 or newer; --json prints one JSON object instead.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/ops/setup.sh"
exec "$root/.venv/bin/python" -m ops.demo "$@"
