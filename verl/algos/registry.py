# SPDX-License-Identifier: Apache-2.0
"""A table of functions that users extend with a decorator and pick by name, or by path, in the configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import Enum

from verl.utils.config import did_you_mean

__all__ = ["Registry"]


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else str(name)


class Registry:
    """Functions by name.

    Args:
        kind: what is registered, in words ("policy loss"); it opens the error messages.
        key: the configuration key that selects one; the error messages name it.
    """

    def __init__(self, kind: str, key: str):
        self._kind = kind
        self._key = key
        self._functions: dict[str, Callable] = {}

    def register(self, name: str | Enum) -> Callable[[Callable], Callable]:
        """Decorator that puts a function under `name`.

        Raises:
            ValueError: the name already belongs to another function.
        """
        plain = _plain(name)

        def put(function: Callable) -> Callable:
            present = self._functions.setdefault(plain, function)
            if present is not function:
                raise ValueError(
                    f"{self._kind} {plain!r} is already registered as {present.__module__}.{present.__qualname__}; "
                    f"register {function.__module__}.{function.__qualname__} under another name"
                )
            return function

        return put

    def get(self, name: str | Enum) -> Callable:
        """The function registered under `name`, or the one that ``package.module:function`` names.

        Raises:
            ValueError: nobody registered that name (the message lists the names there are and the closest one), or the
                module or function cannot be had.
        """
        plain = _plain(name)
        if plain in self._functions:
            return self._functions[plain]
        if ":" in plain:
            return self._import(plain)
        hint = did_you_mean(plain, self._functions)
        raise ValueError(f"{self._key}={plain!r} is no known {self._kind} (known: {', '.join(self.names())}).{hint}")

    def _import(self, path: str) -> Callable:
        module_name, _, function_name = path.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ValueError(
                f"{self._key}={path!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
                "its folder must be the working directory or in PYTHONPATH"
            ) from error
        function: object = getattr(module, function_name, None)
        if not callable(function):
            known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            hint = did_you_mean(function_name, known)
            raise ValueError(f"{self._key}={path!r}: {module_name} has no function {function_name!r}.{hint}")
        return function

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._functions)
