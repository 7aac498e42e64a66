# SPDX-License-Identifier: Apache-2.0
"""Checks of the user's own score function: the file is parsed, not run."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.config import did_you_mean

__all__ = ["check_score_function"]

SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def check_score_function(custom: Mapping[str, Any], key: str, manager: str | None = None) -> list[str]:
    """Whether the file defines the function, and whether that takes the keywords it will be called with.

    Args:
        custom: the node with ``path``, ``name`` and ``reward_kwargs``; its ``path`` is that of a Python file.
        key: of the node.
        manager: name of the reward manager; "batch" calls once for a whole batch.
    """
    path, name, fixed = custom["path"], custom["name"], custom.get("reward_kwargs") or {}
    try:
        body = ast.parse(Path(path).expanduser().read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError) as error:
        return [f"{key}.path={path} is not a Python file: {error}"]
    names: set[str] = set()
    function: ast.FunctionDef | None = None
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            function = node if node.name == name and isinstance(node, ast.FunctionDef) else function
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            return []
    if name not in names and "*" not in names:
        defined = ", ".join(sorted(names)) or "nothing"
        if not isinstance(name, str) or not name:
            return [f"{key}.name={name!r} must name a function of {path}; it defines {defined}"]
        return [f"{key}.name={name} is not defined in {path}; it defines {defined}.{did_you_mean(name, names)}"]
    if function is None or function.decorator_list:
        return []
    return _check_keywords(function, custom, key, BATCH if manager == "batch" else SINGLE, fixed)


def _check_keywords(
    function: ast.FunctionDef, custom: Mapping[str, Any], key: str, given: tuple[str, ...], fixed: Mapping[str, Any]
) -> list[str]:
    where = f"{key}.name={custom['name']} of {custom['path']}"
    both = sorted(set(fixed) & set(given))
    if both:
        return [f"{key}.reward_kwargs.{both[0]} is given to the function anyway, for each response; leave it out"]
    arguments = function.args
    named = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    refused = [] if arguments.kwarg else [name for name in (*given, *fixed) if name not in named]
    if refused:
        return [
            f"{where} does not take {', '.join(refused)}; it is called with the keywords "
            f"{', '.join((*given, *fixed))}, so add them, or **kwargs"
        ]
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    optional = set(positional[len(positional) - len(arguments.defaults) :])
    optional |= {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    unset = [
        name
        for name in dict.fromkeys([*positional, *(argument.arg for argument in arguments.kwonlyargs)])
        if name not in optional and name not in (*given, *fixed)
    ]
    if not unset:
        return []
    return [
        f"{where} needs {', '.join(unset)}, which nobody gives; give a default, or set {key}.reward_kwargs.{unset[0]}"
    ]
