# SPDX-License-Identifier: Apache-2.0
"""Offloading on host tensors: storage is freed, views stay views, values come back."""

from types import SimpleNamespace

import torch

from verl.utils.megatron import offload


class Chunk:
    """What the data-parallel wrapper shows of itself: flat buffers, parameters that are views of them."""

    def __init__(self, buffered: bool = True) -> None:
        self.param = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
        grad = torch.ones(6)
        data = None
        if buffered:
            data = torch.arange(6.0)
            self.param.data = data.view(2, 3)
        self.buffers = [SimpleNamespace(param_data=data, grad_data=grad, params=[self.param], host_copy=None)]
        self.expert_parallel_buffers: list = []

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.param]


def test_parameters_come_back_as_the_same_views() -> None:
    chunk = Chunk()
    data = chunk.buffers[0].param_data
    for _ in range(2):  # a second call changes nothing
        offload.offload_params([chunk])
    assert data.untyped_storage().size() == 0
    assert offload.get_megatron_module_device([chunk]) == "cpu"
    offload.load_params([chunk])
    assert chunk.param.tolist() == [[0, 1, 2], [3, 4, 5]]
    data += 1  # the optimizer writes into the buffer, and the parameter sees it
    assert chunk.param[0, 0] == 1


def test_gradients_are_freed_and_come_back_as_zeros() -> None:
    chunk = Chunk()
    grad = chunk.buffers[0].grad_data
    offload.free_grads([chunk])
    assert grad.untyped_storage().size() == 0
    offload.load_grads([chunk])
    assert grad.tolist() == [0.0] * 6


def test_parameters_outside_a_buffer_are_moved_one_by_one() -> None:
    chunk = Chunk(buffered=False)
    storage = chunk.param.untyped_storage()
    for _ in range(2):
        offload.offload_params([chunk])
    assert storage.size() == 0 and offload.get_megatron_module_device([chunk]) == "cpu"
    offload.load_params([chunk])
    assert chunk.param.untyped_storage().data_ptr() == storage.data_ptr()  # never another tensor under the parameter
    assert chunk.param.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_device_of_a_chunk_without_flat_parameters() -> None:
    assert offload.get_megatron_module_device([Chunk(buffered=False)]) == "cpu"
    assert offload.get_megatron_module_device([torch.nn.Module()]) == "cpu"
    on_meta = torch.nn.Linear(2, 2, device="meta")
    assert offload.get_megatron_module_device([on_meta]) == "meta"


def test_the_optimizers_state_is_moved() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.ones(3)
    inner.step()
    optimizer = SimpleNamespace(optimizer=inner, shard_fp32_from_float16_groups=[[None]])
    offload.load_optimizer(optimizer, "meta")
    assert inner.state[weight]["exp_avg"].device.type == "meta"
    assert inner.state[weight]["step"].device.type == "cpu"  # a scalar stays where Adam reads it
