# SPDX-License-Identifier: Apache-2.0
"""When the rollout's model is on the device: during generation, and otherwise only if nothing else needs the room."""

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.workers import engine_workers
from verl.workers.engine_workers import ActorRolloutRefWorker


class RecordingRollout:
    def __init__(self, config: Any, model_config: Any) -> None:
        self.calls: list[str] = []

    def resume(self, tags: list[str] | None = None) -> None:
        self.calls.append("resume")

    def release(self) -> None:
        self.calls.append("release")

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.calls.append("generate")
        return DataProto(meta_info={})


@pytest.mark.parametrize(
    ("role", "free_cache_engine", "calls"),
    [
        ("actor_rollout", True, ["release", "resume", "generate", "release"]),
        ("actor_rollout", False, ["generate"]),
        ("rollout", True, ["generate"]),
    ],
)
def test_the_rollout_gives_way(
    monkeypatch: pytest.MonkeyPatch, role: str, free_cache_engine: bool, calls: list[str]
) -> None:
    rollout = SimpleNamespace(name="hf", mode="sync", free_cache_engine=free_cache_engine)
    actor = SimpleNamespace(set_loss_fn=lambda loss: None)
    monkeypatch.setattr(engine_workers, "omega_conf_to_dataclass", lambda node: rollout if node else actor)
    monkeypatch.setattr(engine_workers, "get_rollout_class", lambda name, mode: RecordingRollout)
    monkeypatch.setattr(ActorRolloutRefWorker, "init_distributed", lambda self, timeout_s: None)
    monkeypatch.setattr(ActorRolloutRefWorker, "_build", lambda self, *args: actor)
    actor.optim = None
    config = OmegaConf.create({"nccl_timeout": 1, "model": {}, "actor": {}, "ref": {}, "rollout": {"name": "hf"}})
    worker = ActorRolloutRefWorker(config, role)
    worker.init_model()
    output = worker.generate_sequences(DataProto(meta_info={}))
    assert worker.rollout.calls == calls
    assert output.meta_info["timing"]["generate_sequences"] >= 0
