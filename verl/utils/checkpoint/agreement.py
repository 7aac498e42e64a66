# SPDX-License-Identifier: Apache-2.0
"""Errors of one rank, such as a full disk, raised on all of them: the others would wait in their next collective.

Importing this module does not import torch.
"""

__all__ = ["raise_everywhere"]


def raise_everywhere(error: Exception | None) -> None:
    """Return if no rank comes with an error; else raise the first rank's on every rank. Collective.

    Without a process group this process is the only one.

    Raises:
        ValueError: the first error is one.
        OSError: it is another kind.
    """
    import torch.distributed as dist

    own = None if error is None else (isinstance(error, ValueError), str(error))
    everywhere: list[tuple[bool, str] | None] = [own]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
    first = next((found for found in everywhere if found is not None), None)
    if first is not None:
        is_value_error, text = first
        raise (ValueError if is_value_error else OSError)(text) from error
