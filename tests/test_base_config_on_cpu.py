# SPDX-License-Identifier: Apache-2.0
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from verl.base_config import BaseConfig


@dataclass
class _Config(BaseConfig):
    _mutable_fields = frozenset({"steps"})

    steps: int = 1
    name: str = "a"


def test_reads_as_a_mapping() -> None:
    config = _Config(steps=3)
    assert dict(config) == {"steps": 3, "name": "a"}
    assert (config["steps"], config.get("name"), config.get("absent", 7), len(config)) == (3, "a", 7, 2)
    assert "absent" not in config and "_target_" not in config
    with pytest.raises(KeyError):
        config["absent"]


def test_only_mutable_fields_may_be_reassigned() -> None:
    config = _Config()
    config.steps = 5
    assert config.steps == 5
    with pytest.raises(FrozenInstanceError, match="_Config.name is set once"):
        config.name = "b"


def test_copies_and_pickles() -> None:
    config = _Config(steps=2, name="b")
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, name="c") == _Config(steps=2, name="c")
