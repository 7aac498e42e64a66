# SPDX-License-Identifier: Apache-2.0
"""Folders to resume from that are not this trainer's, or not whole."""

import copy
import json
from pathlib import Path

import pytest

from verl.trainer.ppo.preflight_resume import check_resume
from verl.utils.config import compose_config, to_tree

A = "actor_rollout_ref"
TREES = {
    "ppo_trainer": to_tree(compose_config("ppo_trainer", [f"{A}.rollout.name=hf", "algorithm.adv_estimator=grpo"])),
    "sft_trainer_engine": to_tree(compose_config("sft_trainer_engine")),
}


def write_part(folder: Path) -> None:
    (folder / "dist_ckpt").mkdir(parents=True)
    (folder / "dist_ckpt" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / "extra_rank_0.pt").touch()


def write_checkpoint(folder: Path, *parts: str) -> Path:
    for part in parts:
        write_part(folder / part)
    (folder / "data.pt").touch()
    return folder


def problems(folder: Path, name: str = "ppo_trainer", critic: bool = False, auto: bool = False) -> list[str]:
    tree = copy.deepcopy(TREES[name])
    if auto:
        tree["trainer"]["default_local_dir"] = str(folder.parent)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(folder.name.rpartition("_")[2])
    else:
        tree["trainer"] |= {"resume_mode": "resume_path", "resume_from_path": str(folder)}
    if critic:
        tree["critic"]["enable"] = True
    return check_resume(tree, name)


@pytest.mark.parametrize("auto", [False, True])
def test_a_whole_checkpoint_passes(tmp_path: Path, auto: bool) -> None:
    assert problems(write_checkpoint(tmp_path / "ppo" / "global_step_3", "actor"), auto=auto) == []
    assert (
        problems(write_checkpoint(tmp_path / "gae" / "global_step_3", "actor", "critic"), critic=True, auto=auto) == []
    )
    assert problems(write_checkpoint(tmp_path / "sft" / "global_step_3", ""), "sft_trainer_engine", auto=auto) == []
    assert check_resume(TREES["ppo_trainer"], "ppo_trainer") == []


@pytest.mark.parametrize("auto", [False, True])
def test_a_checkpoint_of_the_other_trainer_is_named(tmp_path: Path, auto: bool) -> None:
    sft = write_checkpoint(tmp_path / "sft" / "global_step_3", "")
    ppo = write_checkpoint(tmp_path / "ppo" / "global_step_3", "actor")
    (found,) = problems(sft, auto=auto)
    assert "is a checkpoint of verl.trainer.sft_trainer, which" in found and "trainer.resume_mode=disable" in found
    for folder in (sft / "huggingface", ppo / "actor" / "huggingface"):
        folder.mkdir()
        (folder / "config.json").touch()
    (found,) = problems(sft, auto=auto)
    assert f"set {A}.model.path={sft}/huggingface and resume_mode=disable" in found
    (found,) = problems(ppo, "sft_trainer_engine", auto=auto)
    assert "checkpoint of verl.trainer.main_ppo" in found and f"set model.path={ppo}/actor/huggingface" in found


def test_foreign_folders_are_called_what_they_are(tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run" / "global_step_7", "actor").parent
    (found,) = problems(run)
    assert (
        found
        == f"trainer.resume_from_path={run} is the folder of a run; name one of its checkpoints, the last of "
        + (f"which is {run}/global_step_7")
    )
    other = tmp_path / "other"
    other.mkdir()
    assert "holds no checkpoint of this trainer (it is empty); name the folder global_step_N" in problems(other)[0]
    (other / "notes.txt").touch()
    assert "holds no checkpoint of this trainer (notes.txt)" in problems(other)[0]
    (other / "model_world_size_2_rank_0.pt").touch()
    assert "is an FSDP checkpoint" in problems(other)[0]
    (other / "config.json").touch()
    assert "is a Hugging Face model and no checkpoint of a run; set model.path" in problems(other)[0]


def test_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "global_step_3", "actor")
    assert "holds no critic, and this run has one" in problems(folder, critic=True)[0]
    (folder / "actor" / "extra_rank_0.pt").unlink()
    (found,) = problems(folder)
    assert found.endswith(f"set {A}.actor.checkpoint.load_contents=[model,optimizer]")
    (folder / "actor" / "dist_ckpt" / "metadata.json").unlink()
    assert "no metadata.json in it" in problems(folder)[0]
    (folder / "data.pt").unlink()
    assert f"{folder}/data.pt is missing" in problems(folder)[0]
    assert "is not called global_step_<number>" in problems(write_checkpoint(tmp_path / "best", "actor"))[0]


def test_a_marker_of_a_step_that_is_gone(tmp_path: Path) -> None:
    (found,) = problems(tmp_path / "run" / "global_step_3", auto=True) if (tmp_path / "run").mkdir() is None else ()
    assert found.startswith(f"trainer.default_local_dir={tmp_path}/run: ") and "is missing" in found
