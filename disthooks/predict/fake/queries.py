"""What dispatch modes of a prediction ask often, answered without a way through all of them."""

# [Note: half of all calls ask for a device]
# `tensor.device` of a fake tensor is an operator, `prim::device`, that goes through every mode. In a step of a decoder
# more than half of all calls are this one. The first mode answers it, with what the fake mode would say.

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

#: The operator behind ``tensor.device``.
DEVICE_OF: Any = torch.ops.prim.device.default
_META = torch.device("meta")
_LEAVES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def device_of(tensor: FakeTensor) -> torch.device:
    """What ``tensor.device`` says. See [Note: half of all calls ask for a device]."""
    return _META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """All tensors in ``values``, however deep, in the order of ``torch.utils._pytree``."""
    found: list[torch.Tensor] = []
    for value in values:
        _add(value, found)
    return found


def _add(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    kind = type(value)
    if kind in _LEAVES:
        return
    if kind is tuple or kind is list:
        for each in value:
            _add(each, found)
    elif kind is dict:
        for each in value.values():
            _add(each, found)
    else:  # a structure that somebody registered
        found += [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
