# SPDX-License-Identifier: Apache-2.0
"""The gradient norm of a MoE with a z-loss, through Ray workers, with and without ``calculate_per_token_loss``.

The flag once made the norm grow with the number of tokens, because Megatron then expects the loss to come with a token
count (docs/objective.md, section 4).
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.models.engine_world import VOCAB, padded_batch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.config import (
    HFModelConfig,
    McoreActorConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Odd lengths, one of them below 2 * cp; rows 2k and 2k + 1 are as long, so both data-parallel ranks hold the same.
LENGTHS = ((4, 3), (4, 3), (1, 2), (1, 2), (7, 8), (7, 8), (5, 4), (5, 4))


class _RebuildingWorker(TrainingWorker):
    """A training worker that starts over with another configuration of the same layout, without a new process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rebuild(self, config: TrainingWorkerConfig) -> None:
        from verl.utils.megatron.cpu_backend import reset_megatron_state

        reset_megatron_state()
        super().__init__(config)
        self.reset()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plant_two_items(self) -> None:
        """What the loss callback returned before the fix: no token count for Megatron to divide by."""
        right = self.engine.postprocess_micro_batch_func

        def two_items(*args: Any, **kwargs: Any) -> tuple:
            items = right(*args, **kwargs)
            return items[0], items[-1]

        self.engine.postprocess_micro_batch_func = two_items


def _create_tiny_moe_model(folder: str) -> str:
    from verl.utils.tiny_model import save_tiny_qwen3_moe

    return save_tiny_qwen3_moe(
        folder, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, experts=4, moe_intermediate=32, vocab=VOCAB
    )


def _build_data(micro_batches: int, dp_size: int) -> Any:
    """A policy batch, cut into equal micro-batches on each data-parallel rank."""
    data = left_right_2_no_padding(padded_batch(LENGTHS))
    rows = len(LENGTHS) // dp_size // micro_batches
    return tu.assign_non_tensor(data, temperature=1.0, micro_batch_size_per_gpu=rows)


def _config(path: str, cp: int, per_token_loss: bool) -> TrainingWorkerConfig:
    return TrainingWorkerConfig(
        model_config=HFModelConfig(path=path),
        engine_config=McoreEngineConfig(
            context_parallel_size=cp,
            dtype="float32" if get_device_name() == "cpu" else "bfloat16",
            override_transformer_config={"moe_z_loss_coeff": 0.1, "calculate_per_token_loss": per_token_loss},
        ),
        # The weights stay as they are, so that every call sees the same model.
        optimizer_config=McoreOptimizerConfig(lr=0.0, weight_decay=0.0, total_training_steps=100),
    )


def _grad_norm(group: Any, micro_batches: int, dp_size: int) -> float:
    metrics = tu.get_non_tensor_data(group.train_batch(_build_data(micro_batches, dp_size)), "metrics", {})
    return float(metrics["grad_norm"])


@pytest.fixture(scope="module")
def start_group() -> Iterator[Callable]:
    """Start a group of Ray workers; a cluster that is started for them ends with the module."""
    import ray

    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    own_cluster = not ray.is_initialized()
    if own_cluster:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)

    def start(workers: int, config: TrainingWorkerConfig) -> Any:
        pool = RayResourcePool([workers], num_cpus_per_worker=0.25, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(_RebuildingWorker), config))
        group.set_loss_fn(partial(ppo_loss, config=McoreActorConfig()))
        group.reset()
        return group, pool

    yield start
    if own_cluster:
        ray.shutdown()


@pytest.mark.timeout(280)
def test_moe_zloss_invariant_to_per_token_loss(start_group: Callable, tmp_path: Path) -> None:
    on_cpu = get_device_name() == "cpu"
    workers = 2 if on_cpu else min(2, get_torch_device().device_count())
    rtol = 1e-5 if on_cpu else 5e-2
    path = _create_tiny_moe_model(str(tmp_path / "model"))
    norms: dict[str, float] = {}
    for cp in (1, 2)[:workers]:
        group, pool = start_group(workers, _config(path, cp, False))
        dp_size = workers // cp
        for flag in (False, True):
            if flag:
                group.rebuild(_config(path, cp, True))
                group.set_loss_fn(partial(ppo_loss, config=McoreActorConfig()))
            for micro_batches in (1, 4):
                norms[f"cp{cp}, flag {flag}, {micro_batches} micro-batches"] = _grad_norm(group, micro_batches, dp_size)
        group.plant_two_items()
        broken = _grad_norm(group, 4, dp_size)
        group.shutdown()
        pool.release()
        reference = norms["cp1, flag False, 1 micro-batches"]
        print({name: f"{norm:.7g}" for name, norm in norms.items()}, f"two items, cp{cp}: {broken:.4g}")
        assert reference > 0.01
        assert {name: norm for name, norm in norms.items() if abs(norm / reference - 1) > rtol} == {}
        assert broken > 2 * reference, "two items with the flag on must not look right"
