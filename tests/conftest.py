# SPDX-License-Identifier: Apache-2.0
"""Settings of every test: one thread per process, no network, and `gpu` tests only where there is a device."""

import os

# Before torch is imported anywhere, and inherited by every process a test starts.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"
for _variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_variable] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, visibly and with the reason, on a machine without an accelerator."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu":
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator, and torch finds none on this machine"))
