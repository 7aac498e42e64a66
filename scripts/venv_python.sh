#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the Python of this checkout's environment: .venv, or the folder named by VERL_VENV. For the hooks, which are to
# run whether or not the shell that commits has entered it.
#
#   bash scripts/venv_python.sh -m ruff check .
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${VERL_VENV:-$ROOT/.venv}/bin/python"
if [[ ! -x "$PYTHON" ]]; then
    echo "venv_python: $PYTHON is not there; make the environment with: bash scripts/setup_env.sh" >&2
    exit 2
fi
exec "$PYTHON" "$@"
