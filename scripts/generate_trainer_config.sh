#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the flattened config and the list of accepted keys anew. Run it after a change of the hydra tree and commit the
# result: a test compares both with the tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
venv="${VERL_VENV:-.venv}"
[ -x "$venv/bin/python" ] && python="${PYTHON:-$venv/bin/python}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

generated=verl/trainer/config/_generated_ppo_megatron_trainer.yaml
{
    echo "# SPDX-License-Identifier: Apache-2.0"
    echo "# Written by scripts/generate_trainer_config.sh; edit the files it is composed of, not this one."
    "$python" scripts/print_cfg.py ppo_trainer model_engine=megatron
} >"$generated.new"
mv "$generated.new" "$generated"
"$python" scripts/print_cfg.py --keys >tests/trainer/config/accepted_keys.txt.new
mv tests/trainer/config/accepted_keys.txt.new tests/trainer/config/accepted_keys.txt
