# SPDX-License-Identifier: Apache-2.0
"""From a hydra config to typed configs, and from hydra's errors to one clear sentence."""

import dataclasses
import functools
import importlib
import re
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

CONFIG_DIR = Path(__file__).resolve().parents[1] / "trainer" / "config"

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a dict"}


def omega_conf_to_dataclass(
    config: DictConfig | Mapping | None, dataclass_type: type | None = None, path: str = ""
) -> Any:
    """Build a typed config, and those nested in it.

    Args:
        config: a node of a hydra config, or a plain mapping; interpolations are resolved. None gives None.
        dataclass_type: the class to build; None takes the node's ``_target_``.
        path: the node's full key, put before the keys in error messages.

    Raises:
        ValueError: unknown keys, values of the wrong type, or values the class refuses; all of them in one message.
    """
    if config is None:
        return None
    values = to_tree(config) if isinstance(config, DictConfig) else dict(config)
    errors: list[str] = []
    built = _build(values, dataclass_type, path, errors)
    if errors:
        raise ValueError("\n".join(errors))
    return built


def _build(values: dict[str, Any], cls: type | None, path: str, errors: list[str]) -> Any:
    cls = cls or _target(values, path)
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    kwargs, wrong = {}, set()
    for name, value in values.items():
        key = f"{path}.{name}" if path else name
        if name not in names:
            errors.append(f"{key} is not a field of {cls.__name__}.{did_you_mean(name, names)}")
            wrong.add(name)
            continue
        before = len(errors)
        kwargs[name] = _convert(value, hints[name], key, errors)
        if len(errors) > before:
            wrong.add(name)
    # With something wrong inside, the other fields are checked too, but for what is said of the wrong ones.
    for name in wrong:
        kwargs.pop(name, None)
    try:
        built = cls(**kwargs)
    except ValueError as error:
        # A class names the field first, so that the node's path in front of it gives the full key.
        problems = [problem for problem in str(error).splitlines() if not wrong & set(re.findall(r"\w+", problem))]
        errors += [f"{path}.{problem}" if path else problem for problem in problems]
        return None
    return None if wrong else built


def _target(values: Mapping, path: str) -> type:
    target = values.get("_target_")
    if not target:
        raise ValueError(f"{path or 'the config'} has no _target_ and no class was given for it")
    module, _, name = target.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _convert(value: Any, hint: Any, key: str, errors: list[str]) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if value is None and (type(None) in options or hint is Any):
        return None
    wanted = next(option for option in options if option is not type(None))
    origin = typing.get_origin(wanted) or wanted
    if origin is Any or dataclasses.is_dataclass(value):
        return value
    if isinstance(origin, type) and dataclasses.is_dataclass(origin):
        if isinstance(value, Mapping):
            return _build(dict(value), None if value.get("_target_") else origin, key, errors)
        errors.append(f"{key}={value!r} must be a group of keys")
        return value
    if not is_of_type(value, origin):
        errors.append(f"{key}={value!r} must be {_WORDS.get(origin, 'a list')}")
        return value
    return origin(value) if origin in (float, tuple, str) else value


def is_of_type(value: Any, wanted: type) -> bool:
    """Whether a yaml value may stand for ``wanted``: any number for float, any scalar for text, a list for a tuple."""
    if wanted is bool or isinstance(value, bool):
        return isinstance(value, bool) and wanted in (bool, str)
    if wanted is float:
        return isinstance(value, int | float)
    if wanted is str:
        return isinstance(value, str | int | float)
    if wanted in (list, tuple):
        return isinstance(value, list | tuple)
    return isinstance(value, wanted)


def type_in_words(wanted: type) -> str:
    """The name of a yaml type in an error message."""
    return _WORDS[wanted]


def to_tree(config: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """A node of a config as nested dicts and lists, its interpolations resolved unless told otherwise."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=resolve))


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested mapping by dotted key; lists and empty mappings are leaves."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def compose_config(config_name: str, overrides: Iterable[str] = ()) -> DictConfig:
    """Compose a shipped config from a command line's ``key=value``; usable inside and outside a running hydra job."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return compose(config_name, overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = running


@functools.cache
def default_tree(config_name: str) -> dict[str, Any]:
    """A shipped config without overrides as nested dicts, interpolations resolved; to be read only."""
    return to_tree(compose_config(config_name))


def closest_keys(key: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known dotted keys most like ``key``, best first: by last part, then by the whole; none if none is near.

    Of those that are equally near, the ones that are named first come first.
    """
    known, (parent, _, leaf) = sorted(known) if isinstance(known, set) else list(known), key.rpartition(".")
    leaves = Counter(name.rpartition(".")[2] for name in known)

    def likeness(candidate: str) -> float:
        group, _, last = candidate.rpartition(".")
        leaf_ratio = SequenceMatcher(None, leaf, last).ratio()
        whole = SequenceMatcher(None, key, candidate).ratio()
        # A word such as enable, which many groups have, says little of the group that was meant.
        if group != parent and whole < 0.85 and (leaf_ratio < 0.85 or leaves[last] > 4):
            return 0.0
        return 0.7 * leaf_ratio + 0.3 * whole

    scored = sorted(((likeness(candidate), candidate) for candidate in known), key=lambda pair: -pair[0])
    return [candidate for score, candidate in scored[:count] if score > 0.6]


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """`` Did you mean KEY?`` with the nearest known key, or nothing."""
    close = closest_keys(key, known)
    return f" Did you mean {close[0]}?" if close else ""


def suggested_keys(text: str) -> list[str]:
    """The keys that `did_you_mean` has put into a text."""
    return re.findall(r" Did you mean ([\w.]+)\?", text)


def explain_hydra_error(error: Exception, config_name: str, moved: Mapping[str, str] | None = None) -> str:
    """Say in a sentence what hydra or OmegaConf refused, with the nearest key that exists.

    Args:
        error: what composing or reading the config raised.
        config_name: the config that was asked for; its keys are the ones suggested.
        moved: advice by key, group or last part of either, for what has another name here; ``{parent}`` in an advice
            is the group that it was written in.
    """
    text = str(error)
    override = re.match(r"Could not override '([^']+)'", text)
    if override:
        return explain_unknown_key(override.group(1), config_name, moved)
    append = re.match(r"Could not append to config\. An item is already at '([^']+)'", text)
    if append:
        return f"+{append.group(1)} adds a key that is already there: leave out the +."
    group = re.search(r"Could not find '([^']+)/([^'/]+)'(?:\s+Available options in '[^']+':((?:\s*\n\t\S+)+))?", text)
    if group:
        known = ", ".join((group.group(3) or "").split()) or "none"
        return f"{group.group(1)}={group.group(2)} is not available; choose one of: {known}."
    merged = re.match(r"Error merging override ([\w.]+)=(.*)", text)
    if merged:
        return (
            f"{merged.group(1)} is a group of keys and cannot be {merged.group(2)}; write {merged.group(1)}.KEY=VALUE."
        )
    # Interpolation errors say the key below; parse errors say the argument in their first line, or not at all.
    full_key = re.search(r"full_key: (\S+)", text)
    said = [
        line.strip() for line in text.splitlines() if line.strip() and not re.search(r"hydra\.cc|_(key|type)[:=]", line)
    ]
    unread = getattr(error, "override", None)
    if isinstance(unread, str):
        key, _, value = unread.partition("=")
        advice = f"; a value with other signs than letters, digits and ./_- needs quotes: \"{key}='{value.strip()}'\""
        reason = next((line for line in said if unread not in line and line != "^"), "it is not understood")
        return f"the argument {unread} cannot be read: {reason}{advice if value else ''}."
    return f"{f'{full_key.group(1)}: ' if full_key else ''}{'; '.join(said[:2])}."


def explain_unknown_key(key: str, config_name: str, moved: Mapping[str, str] | None = None) -> str:
    """Say that a key does not exist, and which key comes nearest, is its new name, or takes it with a ``+``."""
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        parent = ".".join(parts[: depth - 1])
        for name in (".".join(parts[:depth]), parts[depth - 1]):
            if moved and name in moved:
                return f"{key} is not a key of {config_name}: {moved[name].format(parent=parent)}."
    if is_free_form(key) and parts[0] in default_tree(config_name):
        return f"{key} is a new key of a free-form group: write +{key}=..."
    known = [name for name in flatten(default_tree(config_name)) if not name.endswith("_target_")]
    groups = {name.rsplit(".", depth)[0] for name in known for depth in range(1, name.count(".") + 1)}
    if key in groups:
        example = next(name for name in known if name.startswith(f"{key}."))
        return f"{key} is a group of keys and takes no value; set one of them, such as {example}."
    return f"{key} is not a key of {config_name}.{did_you_mean(key, [*known, *groups])}"


FREE_FORM = (
    "override_transformer_config",
    "override_ddp_config",
    "override_mcore_model_config",
    "override_optimizer_config",
    "override_config",
    "engine_kwargs",
    "reward_kwargs",
    "apply_chat_template_kwargs",
    "ray_init",
)


def is_free_form(key: str) -> bool:
    """Whether a dotted key lies inside a group that takes keys of the user's own."""
    return any(part in FREE_FORM for part in key.split(".")[:-1])
