# SPDX-License-Identifier: Apache-2.0
"""verl: reinforcement learning for language models, with gradients that do not depend on the parallel layout.

Importing the package is cheap: nothing heavy (torch, ray) is loaded until a name that needs it is used.
"""

from pathlib import Path

__version__ = (Path(__file__).parent / "version" / "version").read_text(encoding="utf-8").strip()
__all__ = ["DataProto", "__version__"]


def __getattr__(name: str):
    """Resolve ``verl.DataProto`` on first use, because its module imports torch and tensordict."""
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
