#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What a machine with accelerators must show, in under 8 minutes: exact gradients over NCCL in the layouts that its 1, 2 or 4
# devices allow, the gradient norm with and without calculate_per_token_loss in bfloat16, and the tests marked gpu.
#
#   bash scripts/gpu_check.sh [report.md]
set -uo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT" || exit 1
PYTHON="${VERL_VENV:-$ROOT/.venv}/bin/python"
[[ -x "$PYTHON" ]] || PYTHON="$(command -v python3)"
REPORT="${1:-outputs/exactness_gpu.md}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 RAY_USAGE_STATS_ENABLED=0

if ! "$PYTHON" -c 'import sys; from verl.utils.device import get_device_name as d; sys.exit(d() == "cpu")'; then
    echo "error: torch finds no accelerator here; bash scripts/test.sh runs what a CPU can run" >&2
    exit 2
fi

failed=()
run() { # run NAME SECONDS COMMAND...
    local name="$1" limit="$2" code=0
    shift 2
    echo "== $name: $*"
    timeout "$limit" "$@" || code=$?
    case $code in
    0) ;;
    5) failed+=("$name: pytest found no test; mend the path or the marker in: $*") ;;
    124) failed+=("$name: not done after $limit seconds") ;;
    *) failed+=("$name (exit code $code)") ;;
    esac
}
run "exact gradients" 240 "$PYTHON" scripts/audit_gradients.py out="$REPORT" cases=1 timeout=230
run "z-loss and the flag" 130 "$PYTHON" -m pytest -q tests/models/test_moe_zloss_per_token_loss.py
run "gpu tests" 100 "$PYTHON" -m pytest -q -m gpu tests

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed"
