# SPDX-License-Identifier: Apache-2.0
"""Print a composed config, or the frozen list of every key that the trainers accept.

Usage: ``print_cfg.py CONFIG_NAME [key=value ...]`` or ``print_cfg.py --keys``. Exit code 2: no such config or key.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's, whatever the environment has installed

from verl.utils.environment import use_environment  # noqa: E402

use_environment()

from omegaconf import OmegaConf  # noqa: E402

from verl.utils.config import compose_config, did_you_mean, explain_hydra_error, flatten, to_tree  # noqa: E402

CONFIG_NAMES = ("ppo_trainer", "sft_trainer_engine", "generation", "evaluation")


def accepted_keys() -> str:
    """Each config's keys with their defaults, one a line, interpolations as written."""
    lines = []
    for name in CONFIG_NAMES:
        tree = to_tree(compose_config(name), resolve=False)
        lines += [f"{name}: {key} = {value!r}" for key, value in sorted(flatten(tree).items())]
    return "\n".join(lines) + "\n"


def composed(name: str, overrides: list[str]) -> str:
    """A config as yaml, interpolations as written.

    Raises:
        ValueError: no such config, or an override that does not fit it; with the nearest name.
    """
    from hydra.errors import HydraException

    from verl.trainer.ppo.preflight_tables import MOVED

    if name not in (known := (*CONFIG_NAMES, "ppo_megatron_trainer")):
        names = ", ".join(known)
        raise ValueError(f"{name} is no config.{did_you_mean(name, (*known, '--keys'))} There are {names}, and --keys.")
    try:
        return OmegaConf.to_yaml(compose_config(name, overrides))
    except HydraException as error:
        raise ValueError(explain_hydra_error(error, name, MOVED)) from error


def main(arguments: list[str]) -> int:
    """Print what the command line asks for; returns the exit code."""
    if set(arguments) & {"-h", "--help"}:
        print(__doc__)
        return 0
    try:
        if not arguments:
            raise ValueError(f"name a config: {', '.join(CONFIG_NAMES)}; or --keys")
        print(accepted_keys() if arguments == ["--keys"] else composed(arguments[0], arguments[1:]), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
