#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From a fresh clone to a mixture-of-experts model trained with GRPO through megatron-core at context parallel size 2.
#
#   bash scripts/quickstart.sh           seed 0
#   bash scripts/quickstart.sh 1         another seed
#
# Makes the environment (scripts/setup_env.sh), then runs scripts/quickstart/run.py. Everything is written to
# outputs/quickstart; the numbers at the end are also in outputs/quickstart/summary.json.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VERL_VENV:-$ROOT/.venv}"
[[ "$VENV" == /* ]] || VENV="$PWD/$VENV"
SEED="${1:-0}"
if [[ $# -gt 1 || ! "$SEED" =~ ^[0-9]{1,9}$ ]]; then
    echo "quickstart: the only argument is a seed, a whole number below 1000000000; got: $*" >&2
    exit 2
fi

VERL_VENV="$VENV" bash "$ROOT/scripts/setup_env.sh"
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$VENV/bin/python" scripts/quickstart/run.py --seed "$SEED"
