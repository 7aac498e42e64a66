# SPDX-License-Identifier: Apache-2.0
"""A function that a config names by the Python file it stands in. Needs no torch."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.config import did_you_mean

__all__ = ["FileFunction"]


class FileFunction:
    """A function of a Python file with fixed keywords. It pickles as the file's path: another process imports the file
    again.

    Args:
        key: the config's group that names the function by ``path`` and ``name``; for the messages.
        path: the file.
        name: the function in it.
        kwargs: given to the function on every call.

    Raises:
        ValueError: naming the key: the file is missing or cannot be imported, has no such function, or the function is
            a coroutine.
    """

    def __init__(self, key: str, path: str, name: str, kwargs: Mapping[str, Any]):
        self._arguments = (key, path, name, dict(kwargs))
        self._function = _find_function(_import_file(path, key), path, name, key)

    def __call__(self, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(**kwargs, **self._arguments[3])

    def __reduce__(self) -> tuple:
        return FileFunction, self._arguments


def _find_function(module: ModuleType, path: str, name: str, key: str) -> Callable[..., Any]:
    function: object = getattr(module, name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        has = ", ".join(names) or "no function"
        hint = did_you_mean(name, names)
        raise ValueError(f"{key}.name={name!r} is not a function of {path!r}; it has {has}.{hint}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{key}.name={name!r} is a coroutine; a plain function is needed")
    return function


def _import_file(path: str, key: str) -> ModuleType:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}.path={path!r}: the file does not exist")
    spec = importlib.util.spec_from_file_location(f"verl_custom_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key}.path={path!r}: a Python file (.py) is needed")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ValueError(f"{key}.path={path!r}: importing the file failed: {error!r}") from error
    return module
