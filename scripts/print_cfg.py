# SPDX-License-Identifier: Apache-2.0
"""Print a composed config, or the frozen list of every key that the trainers accept.

Usage: ``print_cfg.py CONFIG_NAME [key=value ...]`` or ``print_cfg.py --keys``.
"""

import sys
from pathlib import Path

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's, whatever the environment has installed

from verl.utils.config import compose_config, flatten  # noqa: E402

CONFIG_NAMES = ("ppo_trainer", "sft_trainer_engine", "generation", "evaluation")


def accepted_keys() -> str:
    """Each config's keys with their defaults, one a line, interpolations as written."""
    lines = []
    for name in CONFIG_NAMES:
        tree = OmegaConf.to_container(compose_config(name))
        lines += [f"{name}: {key} = {value!r}" for key, value in sorted(flatten(tree).items())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Print what the command line asks for."""
    if arguments == ["--keys"]:
        print(accepted_keys(), end="")
    elif arguments and not arguments[0].startswith("-"):
        print(OmegaConf.to_yaml(compose_config(arguments[0], arguments[1:])), end="")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
