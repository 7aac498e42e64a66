# SPDX-License-Identifier: Apache-2.0
"""Looking into a memory estimate."""

from verl.utils.memory_estimate import MemoryEstimate, MemoryPart


def part(estimate: MemoryEstimate, name: str) -> MemoryPart:
    """The part of that name, of which there must be one."""
    (found,) = (part for part in estimate.parts if part.name == name)
    return found
