#!/usr/bin/env bash
# Runs a program for one step, and writes reports of it to ./profile_<program>/.
#
#   scripts/profile.sh PROGRAM [ARGS ...]
#
# The same as `ipu-pipeline profile PROGRAM [ARGS ...]`, whose --help says more. It uses the checkout's own
# virtual environment if there is one, else the python3 that is found first; PYTHON names another.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: $0 PROGRAM [ARGS ...]" >&2
    echo "Writes reports of a step of PROGRAM to ./profile_<program>/." >&2
    exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
    PYTHON="$root/.venv/bin/python"
    [ -x "$PYTHON" ] || PYTHON=python3
fi
exec "$PYTHON" -m ipu_pipeline profile "$@"
