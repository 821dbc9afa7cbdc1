#!/usr/bin/env bash
# Makes .venv with everything the worker and its tests need. Does nothing when it is already right.
# Needs bash and Python 3.11 or newer. Speaks on stderr only, one line a phase; the details are in a log file.
#
#   PYTHON=/path/to/python3.12   use this interpreter
#   TOKENBUS_TORCH_INDEX=URL     package index for torch, such as PyTorch's CPU-only one (smaller on Linux)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
log=$venv/setup.log
stamp=$venv/setup.stamp

say() { printf '%s\n' "$*" >&2; }

usable() { # is this command a Python of at least 3.11 that can make virtual environments?
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        if usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "error: Python 3.11 or newer with the venv module is needed, and none was found."
    say "       Install it (Debian, Ubuntu: apt install python3-venv) or set PYTHON=/path/to/python3."
    return 1
}

fingerprint() { # what an installed environment depends on: the requirements and where it stands
    cat "$root/pyproject.toml" "$root/clients/python/pyproject.toml" "$root/constraints.txt"
    printf '%s\n' "$root" "${TOKENBUS_TORCH_INDEX:-}"
}

is_current() {
    [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && fingerprint | cmp -s - "$stamp"
}

phase() { # phase "what" command...: runs it quietly; on failure shows the end of the log
    local what=$1 start=$SECONDS
    shift
    printf '%s ... ' "$what" >&2
    if ! "$@" >>"$log" 2>&1; then
        say "failed."
        tail -n 25 "$log" >&2
        say "error: '$what' failed; the whole output is in $log"
        return 1
    fi
    say "done ($((SECONDS - start)) s)"
}

install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"; }

main() {
    local python
    is_current && return
    python=$(find_python)
    mkdir -p "$venv"
    if command -v flock >/dev/null; then # two runs in one checkout: the second waits, then finds the work done
        exec 9>"$venv/setup.lock"
        flock 9
        is_current && return
    fi
    cd "$root"
    rm -f "$stamp"
    : >"$log"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        phase "Making .venv with $("$python" -V)" "$python" -m venv "$venv"
    fi
    # torch alone first: it is most of the download, and may come from an index of its own. That one need not
    # have what torch requires, and its builds (2.13.0+cpu) count as newer than those of the default index.
    phase "Installing torch" install ${TOKENBUS_TORCH_INDEX:+--extra-index-url "$TOKENBUS_TORCH_INDEX"} torch
    phase "Installing the client package" install -e clients/python
    phase "Installing the worker and its test tools" install -e '.[test]'
    fingerprint >"$stamp"
}

main
