# SPDX-License-Identifier: Apache-2.0
"""Checks of the folder that a run would go on from, by the names of the files in it."""

from collections.abc import Mapping
from pathlib import Path

from verl.trainer.ppo.preflight_batch import get
from verl.trainer.ppo.preflight_critic import uses_critic
from verl.utils.checkpoint.dist_weights import dist_checkpoint_problem
from verl.utils.checkpoint_folder import CheckpointFolder, step_of

__all__ = ["check_resume"]

_SHARDS, _STATE, _HF = "dist_ckpt", "data.pt", "huggingface"


def check_resume(tree: Mapping, config_name: str) -> list[str]:
    """Whether the checkpoint that will be read is one of this trainer, and whole.

    Args:
        tree: the config.
        config_name: "ppo_trainer" or "sft_trainer_engine".
    """
    trainer = tree["trainer"]
    mode, root, asked = trainer["resume_mode"], trainer["default_local_dir"], trainer["resume_from_path"]
    if mode == "auto":
        if not isinstance(root, str) or not root:
            return []
        try:
            found = CheckpointFolder(root).latest()
        except (OSError, ValueError) as error:
            return [f"trainer.default_local_dir={root}: {error}"]
        where = f"trainer.default_local_dir={root} with trainer.resume_mode='auto'"
        way_out = "set trainer.resume_mode=disable, or another trainer.default_local_dir"
    elif mode == "resume_path" and isinstance(asked, str) and Path(asked).expanduser().is_dir():
        found, where = str(Path(asked).expanduser()), f"trainer.resume_from_path={asked}"
        way_out = "name the folder global_step_N of a checkpoint, or set trainer.resume_mode=disable"
    else:
        return []
    if found is None:
        return []
    problem = _problem(Path(found), tree, config_name)
    return [f"{where} {problem or ''}".replace("{way_out}", way_out)] if problem else []


def _problem(folder: Path, tree: Mapping, config_name: str) -> str:
    """The rest of a sentence about the folder; nothing if it can be resumed from."""
    is_ppo = config_name == "ppo_trainer"
    of_ppo, of_sft = (folder / "actor").is_dir(), (folder / _SHARDS).is_dir()
    if of_sft and is_ppo and not of_ppo:
        return _other_trainer(folder / _HF, "verl.trainer.sft_trainer", "actor_rollout_ref.model.path")
    if of_ppo and not is_ppo and not of_sft:
        return _other_trainer(folder / "actor" / _HF, "verl.trainer.main_ppo", "model.path")
    if not (of_ppo if is_ppo else of_sft):
        return _foreign(folder)
    try:
        step_of(str(folder))
    except ValueError as error:
        return f"cannot be resumed from: {error}; {{way_out}}"
    if not (folder / _STATE).is_file():
        return f"is no complete checkpoint: {folder / _STATE} is missing; {{way_out}}"
    parts = {"actor": "actor_rollout_ref.actor.checkpoint"} if is_ppo else {"": "checkpoint"}
    if is_ppo and uses_critic(tree):
        if not (folder / "critic").is_dir():
            return "holds no critic, and this run has one; resume from a checkpoint of a run with a critic"
        parts["critic"] = "critic.checkpoint"
    for part, node in parts.items():
        if problem := dist_checkpoint_problem(str(folder / part / _SHARDS)):
            return f"cannot be resumed from: {folder / part / _SHARDS}: {problem}; {{way_out}}"
        contents = get(tree, f"{node}.load_contents") or []
        if "extra" in contents and not any((folder / part).glob("extra_rank_*.pt")):
            without = [name for name in contents if name != "extra"]
            return (
                f"holds no schedule and random state ({folder / part / 'extra_rank_0.pt'}), which {node}.load_contents "
                f"asks for; set {node}.load_contents=[{','.join(without)}]"
            )
    return ""


def _other_trainer(exported: Path, module: str, key: str) -> str:
    if (exported / "config.json").is_file():
        return f"is a checkpoint of {module}; to start from its model set {key}={exported} and resume_mode=disable"
    return (
        f"is a checkpoint of {module}, which this trainer cannot go on from, and holds no {_HF} folder to start from; "
        "{way_out}"
    )


def _foreign(folder: Path) -> str:
    steps = CheckpointFolder(str(folder)).steps()
    if steps:
        last = f"{folder}/global_step_{steps[-1]}"
        return f"is the folder of a run; name one of its checkpoints, the last of which is {last}"
    if (folder / "config.json").is_file():
        return "is a Hugging Face model and no checkpoint of a run; set model.path to it instead; {way_out}"
    if any(folder.glob("model_world_size_*")) or any(folder.glob("*/model_world_size_*")):
        return "is an FSDP checkpoint, and this trainer reads those of the Megatron engine; {way_out}"
    names = sorted(path.name for path in folder.iterdir())
    held = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"holds no checkpoint of this trainer ({held or 'it is empty'}); {{way_out}}"
