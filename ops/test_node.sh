#!/usr/bin/env bash
# Builds and tests the Node client. Without node 20 or npm it says so and succeeds: the worker needs neither.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../clients/node"

if ! command -v npm >/dev/null || ! node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null; then
    echo "node client: skipped, it needs node 20 and npm"
    exit 0
fi
npm ci --no-audit --no-fund --loglevel=error
# A test that hangs is an error, not a night.
if command -v timeout >/dev/null; then timeout 300 npm test; else npm test; fi
