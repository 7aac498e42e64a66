# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Sourced by every run_*.sh: goes to the repository's folder, so that paths in a script are relative to it, and finds its
# Python. What a script trains, and with which settings, is in that script alone.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ ! -x .venv/bin/python ]] || python=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
