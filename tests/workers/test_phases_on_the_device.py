# SPDX-License-Identifier: Apache-2.0
"""What actor, reference and rollout hold on the device in each phase of a step is what the memory estimate counts.

On a CPU the device's memory is the host's. Weights and gradients are told by their storages, which are freed all the
same; the optimizer's state and the rollout's model are counted on the device from one move there to the next move away.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.models.engine_world import padded_batch, save_sharp_model
from tests.utils.memory_world import _optimizer_bytes
from tests.utils_dist import run_world
from verl.utils import tensordict_utils as tu
from verl.utils.config import compose_config
from verl.utils.memory_estimate import Layout, MemoryEstimate, RolloutLoad, estimate_memory
from verl.utils.model_size import read_model_shape
from verl.workers.utils.padding import left_right_2_no_padding

pytestmark = pytest.mark.gloo

A = "actor_rollout_ref"
# param_offload of the actor, optimizer_offload, param_offload of the reference, free_cache_engine
SETTINGS = [(True, True, True, True), (False, False, False, False), (True, False, False, False)]
STATE = ("weights", "gradients", "optimizer state", "reference model's weights", "rollout's copy of the model")


class Watched:
    """A worker with all three parts, and what they hold when they are looked at."""

    def __init__(self, path: str, params: bool, optimizer: bool, reference: bool, gives_way: bool) -> None:
        from verl.workers.engine_workers import ActorRolloutRefWorker

        self.optimizer_is_there, self.rollout_is_there = True, True
        self.seen: dict[str, dict[str, int]] = {}
        arguments = [f"{A}.model.path={path}", f"{A}.rollout.name=hf", "data.max_prompt_length=16"]
        arguments += [f"{A}.actor.megatron.param_offload={params}", f"{A}.actor.megatron.optimizer_offload={optimizer}"]
        arguments += [f"{A}.ref.megatron.param_offload={reference}", f"{A}.rollout.free_cache_engine={gives_way}"]
        arguments += ["data.max_response_length=4", f"{A}.actor.ppo_micro_batch_size_per_gpu=4"]
        self.worker = ActorRolloutRefWorker(compose_config("ppo_trainer", arguments)[A], A)

    @contextmanager
    def watching(self) -> Iterator[None]:
        from verl.utils.megatron import cpu_backend, offload

        cpu_backend.install()
        from megatron.core import dist_checkpointing

        from verl.workers.rollout.hf_rollout import HFRollout

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(offload, "has_device_memory", lambda: True))
            for owner, name, flag, value in (
                (offload, "load_optimizer", "optimizer_is_there", True),
                (offload, "offload_optimizer", "optimizer_is_there", False),
                (HFRollout, "resume", "rollout_is_there", True),
                (HFRollout, "release", "rollout_is_there", False),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._marking(getattr(owner, name), flag, value)))
            stack.enter_context(
                mock.patch.object(dist_checkpointing, "save", self._looking(dist_checkpointing.save, "save_checkpoint"))
            )
            yield

    def _marking(self, stock: Any, flag: str, value: bool) -> Any:
        def call(*args: Any) -> Any:
            setattr(self, flag, value)
            return stock(*args)

        return call

    def _looking(self, stock: Any, phase: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            self.seen[phase] = self.held()
            return result

        return call

    def look_in_each_phase(self) -> None:
        worker = self.worker
        for owner, name, phase in (
            (worker.rollout, "generate_sequences", "generate"),
            (worker.actor.engine, "infer_batch", "log_prob"),
            (worker.ref.engine, "infer_batch", "ref_log_prob"),
            (worker.actor.engine, "optimizer_step", "update"),
        ):
            setattr(owner, name, self._looking(getattr(owner, name), phase))
        stock = worker.rollout.update_weights

        def update_weights(weights: Any, **kwargs: Any) -> None:
            def watched() -> Iterator[Any]:
                for number, item in enumerate(weights):
                    if number == 0:
                        self.seen["update_weights"] = self.held()
                    yield item

            stock(watched(), **kwargs)

        worker.rollout.update_weights = update_weights

    def held(self) -> dict[str, int]:
        worker = self.worker
        chunks = worker.actor.engine.module
        buffers = [b for m in chunks for b in (*m.buffers, *m.expert_parallel_buffers)]
        weights = {p.untyped_storage().data_ptr() for m in chunks for p in m.parameters()}
        parts = (
            storage_bytes(p for m in chunks for p in m.parameters()),
            storage_bytes(b.grad_data for b in buffers),
            _optimizer_bytes(worker.actor.engine.optimizer, weights) * self.optimizer_is_there,
            storage_bytes(p for m in worker.ref.engine.module for p in m.parameters()),
            storage_bytes(worker.rollout.model.parameters()) * self.rollout_is_there,
        )
        return dict(zip(STATE, parts, strict=True))


def storage_bytes(tensors: Any) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.size() for storage in storages if storage.size()}.values())


def one_step(watched: Watched, folder: str) -> None:
    from verl.protocol import DataProto

    worker, rows = watched.worker, padded_batch()
    worker.init_model()
    watched.look_in_each_phase()
    data = left_right_2_no_padding(rows)
    tu.assign_non_tensor(data, temperature=1.0, micro_batch_size_per_gpu=4, use_dynamic_bsz=False)
    # One update before, because the optimizer's moments are made by the first one.
    for _ in range(2):
        worker.update_actor(data.copy())
        worker.update_weights()
    width = rows["prompts"].shape[1]
    prompts = {key: rows[key][:, :width] for key in ("input_ids", "attention_mask", "position_ids")}
    worker.generate_sequences(DataProto.from_dict(prompts, meta_info={"eos_token_id": 1, "pad_token_id": 0}))
    worker.compute_log_prob(data)
    worker.compute_ref_log_prob(data)
    worker.save_checkpoint(folder)


def in_world(rank: int, world: int, path: str, folder: str) -> list[dict[str, dict[str, int]]]:
    from verl.utils.megatron.cpu_backend import reset_megatron_state

    found = []
    for number, settings in enumerate(SETTINGS):
        watched = Watched(path, *settings)
        with watched.watching():
            one_step(watched, f"{folder}/{number}")
        found.append(watched.seen)
        reset_megatron_state()
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, dict[str, int]]]]:
    root = Path(tmp_path_factory.mktemp("phases"))
    path = save_sharp_model(str(root / "model"), hidden=64, head_dim=64, moe_intermediate=64, vocab=64)
    return path, run_world(in_world, 1, path, str(root), timeout_s=240)[0]


def estimated(path: str, params: bool, optimizer: bool, reference: bool, gives_way: bool) -> MemoryEstimate:
    return estimate_memory(
        read_model_shape(json.loads((Path(path) / "config.json").read_text())),
        Layout(world_size=1),
        max_tokens_per_rank=64,
        reference=True,
        param_offload=params,
        optimizer_offload=optimizer,
        reference_offload=reference,
        rollout=RolloutLoad(rows=6, tokens=20, gives_way=gives_way),
        transformer_engine=False,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_a_phase_holds_what_the_estimate_says(measured: tuple[str, list], number: int) -> None:
    path, seen = measured[0], measured[1][number]
    expected = estimated(path, *SETTINGS[number])
    assert seen.keys() == expected.phases.keys()
    for phase, held in seen.items():
        counted = {part.name: part.bytes for part in expected.parts if not part.phases or phase in part.phases}
        assert held == {name: counted.get(name, 0) for name in STATE}, phase
    everything = {part.name: part.bytes for part in expected.parts}
    assert all(everything[name] for name in STATE)


def test_a_part_that_stays_is_seen_in_every_phase(measured: tuple[str, list]) -> None:
    stays = measured[1][1]
    assert len({tuple(held.items()) for held in stays.values()}) == 1
    assert all(number > 0 for held in stays.values() for number in held.values())
