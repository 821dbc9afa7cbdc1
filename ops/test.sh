#!/usr/bin/env bash
# Runs the tests; makes .venv and fetches the small model first where they are missing. Arguments go to pytest:
#   ops/test.sh                          everything
#   ops/test.sh tests/unit -k scheduler  a part
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/ops/setup.sh"
cd "$root"
.venv/bin/tokenbus model fetch smollm2-135m >&2

# Two test processes on two cores: one thread of torch in each, or their threads wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -n 2 --no-loadscope-reorder "$@"
