# SPDX-License-Identifier: Apache-2.0
"""How a dry run goes on checking after something wrong: with defaults in its place, without what follows from it."""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from verl.trainer.ppo import preflight_tables as tables
from verl.trainer.ppo.preflight_batch import get
from verl.utils.config import is_of_type, suggested_keys

__all__ = ["all_positive", "is_consequence", "value_in_words", "with_defaults_at", "with_usable_numbers"]


def all_positive(tree: Mapping, keys: tuple[str, ...]) -> bool:
    """Whether numbers can be divided by these; those that cannot are reported by the checks of single values."""
    return all(value is None or (is_of_type(value, int) and value > 0) for value in (get(tree, key) for key in keys))


def with_defaults_at(tree: dict, defaults: Mapping, keys: Iterable[str]) -> dict:
    """``tree`` with the defaults at these keys, and without those that have none."""
    tree = copy.deepcopy(tree)
    for key in sorted(keys):
        *parents, leaf = key.split(".")
        node, group = tree, defaults
        for name in parents:
            if not isinstance(group.get(name, {}), Mapping):
                # Keys below one that takes a value.
                leaf = name
                break
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node, group = node[name], group.get(name, {})
        if leaf in group:
            node[leaf] = copy.deepcopy(group[leaf])
        else:
            node.pop(leaf, None)
    return tree


def with_usable_numbers(tree: dict, defaults: Mapping, config_name: str) -> tuple[dict, list[str]]:
    """``tree`` with defaults in place of counts and sizes that are not positive, and the keys of these."""
    keys = tables.DIVISORS.get(config_name, tables.AT_LEAST_ONE.get(config_name, ()))
    wrong = [
        key
        for key in keys
        if not all_positive(tree, (key,)) or (get(tree, key) is None and get(defaults, key) is not None)
    ]
    return (with_defaults_at(tree, defaults, wrong) if wrong else tree), wrong


def is_consequence(error: str, causes: Iterable[str]) -> bool:
    """Whether a sentence is about a key that has its default only because what was meant for it cannot be used.

    Args:
        error: the sentence.
        causes: keys, or sentences that begin with one and may suggest another.
    """
    names = re.findall(r"[\w.]*\w", error)
    for cause in causes:
        suspects = {re.split("[= ]", cause, maxsplit=1)[0], *suggested_keys(cause)}
        for suspect in suspects:
            leaf = suspect.rpartition(".")[2]
            # A key of another section that follows this one has the same last part.
            if suspect in names or ("_" in leaf and any(name.rpartition(".")[2] == leaf for name in names)):
                return True
    return False


def value_in_words(value: Any) -> str:
    """A value as it is written on a command line."""
    return "null" if value is None else str(value)
