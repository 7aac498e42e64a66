# SPDX-License-Identifier: Apache-2.0
"""Checks of the configs of generation and evaluation before anything is started; see `preflight`."""

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.trainer.ppo import preflight_tables as tables
from verl.trainer.ppo.preflight import Findings, check_section, name_error, read_findings
from verl.trainer.ppo.preflight_batch import get
from verl.trainer.ppo.preflight_files import (
    PROMPT_ROW,
    check_data_sources,
    check_model_folder,
    check_reward_file,
    open_data_files,
)
from verl.trainer.ppo.preflight_model import check_generation_model
from verl.trainer.ppo.preflight_values import with_values
from verl.trainer.ppo.preflight_warnings import model_code_warnings
from verl.utils.config import is_of_type

__all__ = [
    "check_evaluation_config",
    "check_generation_config",
    "validate_evaluation_config",
    "validate_generation_config",
]


def validate_generation_config(config: DictConfig) -> None:
    """Check a ``generation`` config and its files.

    Raises:
        ValueError: every problem found, one a line, each with the key, its value and the nearest right one.
    """
    check_generation_config(config).refuse()


def check_generation_config(config: DictConfig, is_dry_run: bool = False) -> Findings:
    """`validate_generation_config` as findings; raises ``ValueError`` only for a config that cannot be read at all."""
    found = read_findings(config, "generation", is_dry_run)
    tree, errors = found.tree, found.errors
    data = tree["data"]
    if found.may_check(""):
        _check_words_and_counts(tree, errors)
        for path in ("rollout", "model"):
            check_section(tree, path, errors)
        if data["n_samples"] != 1 and not get(tree, "rollout.do_sample"):
            errors.append(
                f"data.n_samples={data['n_samples']} equal responses would come of rollout.do_sample=False; set "
                "data.n_samples=1, or rollout.do_sample=True"
            )
        _check_output(data["output_path"], ".parquet", errors)
        errors += check_generation_model(tree)
    if found.may_check("data", "model"):
        if not data["path"]:
            errors.append("data.path is empty; name at least one .parquet, .json or .jsonl file")
        open_data_files("data.path", data["path"], {data["prompt_key"]: PROMPT_ROW["prompt"]}, errors)
        errors += check_model_folder("model", tree["model"], found.notes if is_dry_run else None)
        found.notes += model_code_warnings("model", tree["model"])
    if found.may_check(""):
        found.errors = with_values(errors, tree, "generation")
    return found


def validate_evaluation_config(config: DictConfig) -> None:
    """Check an ``evaluation`` config and its files.

    Raises:
        ValueError: every problem found, one a line, each with the key, its value and the nearest right one.
    """
    check_evaluation_config(config).refuse()


def check_evaluation_config(config: DictConfig, is_dry_run: bool = False) -> Findings:
    """`validate_evaluation_config` as findings; raises ``ValueError`` only for a config that cannot be read at all."""
    found = read_findings(config, "evaluation", is_dry_run)
    if not found.may_check(""):
        return found
    tree, errors = found.tree, found.errors
    data, custom = tree["data"], tree["custom_reward_function"]
    check_section(tree, "scoring", errors)
    needed = {
        data["response_key"]: ["240", "042"],
        data["data_source_key"]: PROMPT_ROW["data_source"],
        data["reward_model_key"]: PROMPT_ROW["reward_model"],
    }
    if not data["path"]:
        errors.append("data.path is empty; name at least one .parquet, .json or .jsonl file")
    files = open_data_files("data.path", data["path"], needed, errors)
    if custom["path"]:
        errors += check_reward_file(custom, "custom_reward_function")
    else:
        errors += check_data_sources("data.path", data["data_source_key"], files, key_of_own="custom_reward_function")
    if data["output_path"]:
        _check_output(data["output_path"], ".json", errors)
    found.errors = with_values(errors, tree, "evaluation")
    return found


def _check_words_and_counts(tree: dict, errors: list[str]) -> None:
    for key, known in tables.ONE_OF["generation"].items():
        if get(tree, key) not in known:
            name_error(key, get(tree, key), known, errors)
    for key in tables.AT_LEAST_ONE["generation"]:
        value = get(tree, key)
        if not is_of_type(value, int) or value < 1:
            errors.append(f"{key}={value!r} must be a whole number of at least 1")


def _check_output(path: Any, suffix: str, errors: list[str]) -> None:
    if not isinstance(path, str) or not path:
        return  # said where the values are checked
    file = Path(path).expanduser()
    above = next(folder for folder in file.parents if folder.exists())
    if file.is_dir():
        errors.append(f"data.output_path={path} is a folder; name a file that ends in {suffix}")
    elif not above.is_dir() or not os.access(above, os.W_OK):
        errors.append(f"data.output_path={path} cannot be written, because {above} is no folder that may be written to")
    elif file.suffix != suffix:
        errors.append(f"data.output_path={path} must end in {suffix}; use {Path(path).with_suffix(suffix)}")
