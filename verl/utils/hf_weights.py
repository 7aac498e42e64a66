# SPDX-License-Identifier: Apache-2.0
"""Refresh the weights of a transformers model in place from a stream of hub-named tensors.

A training engine exports tensors under the names that a checkpoint on the hub has. transformers 5 keeps some of them in
another shape in memory: the experts of a Qwen3-MoE or Mixtral layer are one fused `gate_up_proj` and one `down_proj`,
while the hub has three matrices per expert. `InPlaceLoader` copies each incoming tensor straight into the slice of
the parameter it belongs to, so that no second copy of the model, nor of one layer, is ever held.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class _Slot:
    """One hub tensor's place: a strided window of the tensor `owner` in the model's state dict (offset in elements)."""

    owner: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        owner = state[self.owner]
        return owner.as_strided(self.shape, self.stride, owner.storage_offset() + self.offset)


class InPlaceLoader:
    """Writes (hub name, tensor) pairs into a transformers model, again and again.

    The plan from hub name to parameter slice is built once, by handing transformers' own save-time conversion (the one
    `save_pretrained` uses) the model's tensors: its chunking and splitting give views, and a view tells where it
    points. The plan holds places and no tensors, so the model may move between devices afterwards.

    Args:
        model: a transformers `PreTrainedModel`. Dense models (1:1 names) and fused-expert models whose conversion only
            splits (Qwen2/3-MoE, Mixtral and the like) are supported.
        may_stay: tensors whose hub names hold one of these words need not be given; they keep their values.

    Raises:
        ValueError: the conversion of this model copies (for instance it transposes), so that no in-place plan exists.
    """

    def __init__(self, model: nn.Module, may_stay: tuple[str, ...] = ()):
        self.model = model
        self.may_stay = may_stay
        self._slots = _build_plan(model)
        self._names_of_slot: dict[_Slot, list[str]] = {}
        for name, slot in self._slots.items():
            self._names_of_slot.setdefault(slot, []).append(name)

    @property
    def names(self) -> list[str]:
        """All hub names that `load` accepts, those of tied weights included."""
        return list(self._slots)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every tensor into its place, casting to the parameter's dtype and device.

        Each tensor is copied before the next one is asked for, so a generator may reuse its buffer. Every place but
        those that may stay must be written exactly once; of tied weights any one name is enough, and a second one must
        carry the same values.
        The iterable is always read to its end, also after a fault, because the exporter may be in step with other
        ranks.

        Raises:
            ValueError: one error that lists names that are missing, unexpected, given twice or of a wrong shape, and
                tied weights that differ. The places that were right have been written by then.
        """
        # The state dict shares the model's memory, has the persistent buffers, and tied weights under each of their
        # names.
        state = self.model.state_dict()
        seen: set[str] = set()
        written: set[_Slot] = set()
        faults: list[str] = []
        for name, tensor in weights:
            slot = self._slots.get(name)
            if slot is None:
                faults.append(f"unexpected: {name}")
                continue
            if name in seen:
                faults.append(f"given twice: {name}")
                continue
            seen.add(name)
            if tuple(tensor.shape) != slot.shape:
                faults.append(f"wrong shape: {name} is {tuple(tensor.shape)}, the model has {slot.shape}")
                continue
            place = slot.view(state)
            if slot not in written:
                place.copy_(tensor)
                written.add(slot)
            elif not torch.equal(place, tensor.to(place)):
                faults.append(f"tied weights differ: {' and '.join(self._names_of_slot[slot])}")
        faults += [
            f"missing: {' or '.join(names)}"
            for names in self._names_of_slot.values()
            if not seen.intersection(names) and not any(word in name for name in names for word in self.may_stay)
        ]
        if faults:
            raise ValueError(_describe(self.model, faults))


def _build_plan(model: nn.Module) -> dict[str, _Slot]:
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()
    owner_of_storage: dict[int, str] = {}
    for name, tensor in state.items():
        owner_of_storage.setdefault(tensor.untyped_storage().data_ptr(), name)
    slots = {}
    pretrained: Any = model  # one of transformers'
    for hub_name, view in revert_weight_conversion(pretrained, dict(state)).items():
        owner = owner_of_storage.get(view.untyped_storage().data_ptr())
        if owner is None:
            raise ValueError(
                f"{type(model).__name__} cannot be refreshed in place: the checkpoint tensor {hub_name} is not a plain "
                "slice of a parameter in memory"
            )
        offset = view.storage_offset() - state[owner].storage_offset()
        slots[hub_name] = _Slot(owner, tuple(view.shape), tuple(view.stride()), offset)
    _check_cover(model, state, owner_of_storage, slots)
    return slots


def _check_cover(
    model: nn.Module, state: dict[str, torch.Tensor], owner_of_storage: dict[int, str], slots: dict[str, _Slot]
) -> None:
    """Every element of every tensor belongs to exactly one slot, else a load could leave a part stale unseen."""
    covered = dict.fromkeys(owner_of_storage.values(), 0)
    for slot in set(slots.values()):
        covered[slot.owner] += math.prod(slot.shape)
    wrong = [name for name, count in covered.items() if count != state[name].numel()]
    if wrong:
        raise ValueError(f"{type(model).__name__} cannot be refreshed in place: no full plan for {', '.join(wrong)}")


def _describe(model: nn.Module, faults: list[str], limit: int = 20) -> str:
    shown = "; ".join(faults[:limit])
    more = f"; and {len(faults) - limit} more" if len(faults) > limit else ""
    return f"weights for {type(model).__name__} do not fit ({len(faults)} faults): {shown}{more}"
