# SPDX-License-Identifier: Apache-2.0
"""What print_cfg.py prints, and its one sentence about what it cannot. The list of keys is frozen in tests/trainer."""

import pytest
import yaml

from tests.scripts.loading import load_script

script = load_script("print_cfg.py")


def test_a_config_is_printed_with_what_the_command_line_changes(capsys):
    assert script.main(["sft_trainer_engine", "trainer.nnodes=3", "engine.context_parallel_size=2"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["trainer"]["nnodes"] == 3 and tree["engine"]["context_parallel_size"] == 2


def test_the_other_name_of_the_ppo_config_is_known(capsys):
    assert script.main(["ppo_megatron_trainer"]) == 0
    assert "actor_rollout_ref:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ppo_trainr"], "ppo_trainr is no config. Did you mean ppo_trainer?"),
        (["nope"], "nope is no config. There are ppo_trainer, sft_trainer_engine, generation, evaluation,"),
        (["--kyes"], "--kyes is no config. Did you mean --keys?"),
        ([], "name a config: ppo_trainer,"),
        (["ppo_trainer", "trainer.nnode=3"], "trainer.nnode is not a key of ppo_trainer. Did you mean trainer.nnodes?"),
        (["ppo_trainer", "trainer.nnodes"], "trainer.nnodes cannot be read"),
        (["ppo_trainer", "+trainer.nnodes=3"], "+trainer.nnodes adds a key that is already there"),
        (["ppo_trainer", "model_engine=fsdp"], "model_engine=fsdp is not available; choose one of: megatron"),
    ],
)
def test_a_wrong_call_gets_one_sentence_and_exit_code_2(capsys, arguments, said):
    assert script.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and output.err.count("\n") == 1
    assert said in output.err
