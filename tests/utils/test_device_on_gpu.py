# SPDX-License-Identifier: Apache-2.0
"""The device layer on a machine with an accelerator."""

import pytest
import torch
import torch.distributed as dist

from verl.utils import device

pytestmark = pytest.mark.gpu


def test_the_device_computes_and_accounts_for_its_memory():
    name, module = device.get_device_name(), device.get_torch_device()
    assert name != "cpu" and module.device_count() >= 1
    before = module.memory_allocated()
    ones = torch.ones(1024, 1024, device=torch.device(name, device.get_device_id()))
    assert module.memory_allocated() - before >= ones.numel() * ones.element_size()
    assert (ones @ ones).sum().item() == 1024**3  # sums of powers of two: exact in any precision of the product


def test_its_collectives_come_up_in_a_world_of_one():
    dist.init_process_group(device.get_nccl_backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.arange(4.0, device=torch.device(device.get_device_name(), device.get_device_id()))
        dist.all_reduce(values)
        assert values.tolist() == [0.0, 1.0, 2.0, 3.0]
    finally:
        dist.destroy_process_group()
