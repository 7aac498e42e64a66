#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Lints the tree (ruff, mypy on the typed core) and runs every test that this machine can run. No download, no network.
#
#   bash scripts/test.sh                     everything
#   bash scripts/test.sh tests/utils -k dev  arguments go to pytest as they are
set -uo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VERL_VENV:-$ROOT/.venv}"
[[ "$VENV" == /* ]] || VENV="$PWD/$VENV"
VERL_VENV="$VENV" bash "$ROOT/scripts/setup_env.sh" || exit $?
cd "$ROOT" || exit 1

# One thread per process: the tests start several processes, and idle threads that spin steal their cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

lint=0
"$VENV/bin/python" -m ruff check . || lint=$?
"$VENV/bin/python" -m ruff format --check . || lint=$?
"$VENV/bin/python" -m mypy || lint=$?
"$VENV/bin/python" -m pytest "$@"
tests=$?

say() { [[ $1 -eq 0 ]] && echo passed || echo "FAILED (exit code $1)"; }
echo "lint: $(say "$lint"), tests: $(say "$tests")"
[[ $lint -eq 0 && $tests -eq 0 ]]
