# SPDX-License-Identifier: Apache-2.0
"""The base of every typed config: a dataclass that is frozen once built and reads like a mapping."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar


@dataclass
class BaseConfig(Mapping):
    """A dataclass that is also a read-only ``Mapping`` of its fields, with ``get`` for optional keys.

    A field may be given a value once, at construction. Later only the names in ``_mutable_fields`` may be reassigned;
    any other assignment raises ``dataclasses.FrozenInstanceError``. ``_target_`` is the dotted path by which a yaml
    node says which class it becomes; it is not one of the mapping's keys.
    """

    _mutable_fields: ClassVar[frozenset[str]] = frozenset()

    _target_: str = ""

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ValueError("\n".join(problems))

    def _problems(self) -> list[str]:
        """What is wrong with the values, a sentence each that begins with the field; checked once, at construction."""
        return []

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} is set once; only {sorted(self._mutable_fields)} may be reassigned"
            )
        super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self) if field.name != "_target_"]
