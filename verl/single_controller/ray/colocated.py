# SPDX-License-Identifier: Apache-2.0
"""The worker that holds several workers in one process."""

from verl.single_controller.base import Worker


class ColocatedWorker(Worker):
    """Constructs each of its members, which share rank, device and process group.

    Args:
        members: Class, arguments and keyword arguments by name.
    """

    def __init__(self, members: dict[str, tuple[type, tuple, dict]]):
        self._members = {name: cls(*args, **kwargs) for name, (cls, args, kwargs) in members.items()}

    def _member(self, member: str | None) -> Worker:
        return self if member is None else self._members[member]
