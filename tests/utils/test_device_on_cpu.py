# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
import torch

from verl.utils import device


class FakeAccelerator:
    """Stands in for ``torch.cuda`` or ``torch.npu``."""

    def __init__(self, available: bool, index: int = 0):
        self.available, self.index = available, index

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return self.index


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that makes torch look as on a machine with the given accelerators."""

    def pretend(cuda: bool = False, npu: bool = False, verl_device: str | None = None, index: int = 0):
        monkeypatch.setattr(torch, "cuda", FakeAccelerator(cuda, index))
        monkeypatch.setattr(torch, "npu", FakeAccelerator(npu, index), raising=False)
        if verl_device is None:
            monkeypatch.delenv("VERL_DEVICE", raising=False)
        else:
            monkeypatch.setenv("VERL_DEVICE", verl_device)
        device.get_device_name.cache_clear()

    yield pretend
    device.get_device_name.cache_clear()


@pytest.mark.parametrize(
    ("has", "name", "visible", "backend", "resource"),
    [
        ({}, "cpu", "", "gloo", "CPU"),
        ({"cuda": True}, "cuda", "CUDA_VISIBLE_DEVICES", "nccl", "GPU"),
        ({"npu": True}, "npu", "ASCEND_RT_VISIBLE_DEVICES", "hccl", "NPU"),
        ({"cuda": True, "npu": True}, "cuda", "CUDA_VISIBLE_DEVICES", "nccl", "GPU"),
        ({"cuda": True, "verl_device": "cpu"}, "cpu", "", "gloo", "CPU"),
        ({"cuda": True, "npu": True, "verl_device": "NPU"}, "npu", "ASCEND_RT_VISIBLE_DEVICES", "hccl", "NPU"),
        ({"verl_device": ""}, "cpu", "", "gloo", "CPU"),
    ],
)
def test_everything_follows_from_the_device_kind(machine, has, name, visible, backend, resource):
    machine(**has)
    assert device.get_device_name() == name
    assert device.get_visible_devices_keyword() == visible
    assert device.get_nccl_backend() == backend
    assert device.ray_resource_name() == resource
    assert device.is_cuda_available is (name == "cuda")
    assert device.is_npu_available is (name == "npu")
    assert device.get_torch_device() is (device.CPUDevice if name == "cpu" else getattr(torch, name))


def test_device_id_is_the_current_one(machine):
    machine(cuda=True, index=3)
    assert device.get_device_id() == 3
    machine()
    assert device.get_device_id() == 0


def test_the_kind_is_decided_once(machine):
    machine()
    assert device.get_device_name() == "cpu"
    torch.cuda.available = True
    assert device.get_device_name() == "cpu"


@pytest.mark.parametrize("wanted", ["cuda", "gpu"])
def test_a_kind_that_cannot_be_used_is_refused(machine, wanted):
    machine(npu=True, verl_device=wanted)
    with pytest.raises(ValueError, match=f"VERL_DEVICE={wanted} .*usable here: npu, cpu"):
        device.get_device_name()


def test_unknown_attribute_is_an_attribute_error():
    assert not hasattr(device, "is_tpu_available")


def test_cpu_device_answers_what_verl_asks():
    cpu = device.CPUDevice
    cpu.set_device(0)
    cpu.synchronize()
    cpu.empty_cache()
    assert cpu.is_available() and cpu.device_count() == 1
    assert torch.zeros(2, device=torch.device("cpu", cpu.current_device())).sum() == 0


def test_cpu_memory_is_that_of_the_process_in_bytes():
    before = device.CPUDevice.memory_allocated()
    held = torch.ones(64 * 2**20 // 4)
    grown = device.CPUDevice.memory_allocated() - before
    assert held.sum() > 0 and 48 * 2**20 < grown < 96 * 2**20
    assert device.CPUDevice.max_memory_allocated() >= before


def test_cpu_manual_seed_repeats_the_draw():
    with torch.random.fork_rng(devices=[]):
        device.CPUDevice.manual_seed(7)
        first = torch.rand(4)
        device.CPUDevice.manual_seed(7)
        assert torch.equal(first, torch.rand(4))


def test_import_does_not_load_torch():
    code = "import sys, verl.utils.device; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
