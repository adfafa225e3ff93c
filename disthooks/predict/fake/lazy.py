"""Lazy modules in a fake run: their parameters have no sizes until a dry run, and are fake tensors all the same."""

# [Note: lazy modules]
# A lazy module, such as `nn.LazyLinear`, learns the sizes of its parameters from its first input. Until then they are
# of torch's class `UninitializedParameter`. torch makes them by giving an empty tensor this class, which fails for a
# fake tensor. Here they are of another class, which becomes `FakeTensor` when the sizes are known. torch asks the user
# to run such a model once before an optimizer or an engine takes it. The prediction does so too, without gradients.

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

_Parameter: Any = UninitializedParameter
_Buffer: Any = UninitializedBuffer


class _FakeParameter(_Parameter, FakeTensor):  # type: ignore[misc]
    """A fake parameter whose size is not known yet. See [Note: lazy modules]."""

    cls_to_become = FakeTensor
    shape = torch.Tensor.shape  # the fake mode asks for it


class _FakeBuffer(_Buffer, FakeTensor):  # type: ignore[misc]
    cls_to_become = FakeTensor
    shape = torch.Tensor.shape


def new_parameter(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
    made: Any = nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad)
    made.__class__ = _FakeParameter
    return made


def new_buffer(
    cls: Any, requires_grad: bool = False, device: Any = None, dtype: Any = None, persistent: bool = True
) -> Any:
    made: Any = torch.empty(0, device=device, dtype=dtype, requires_grad=requires_grad)
    made.persistent, made._is_buffer = persistent, True
    made.__class__ = _FakeBuffer
    return made


def copy_lazy(tensor: Any, memo: dict[int, Any]) -> Any:
    """``__deepcopy__`` of both classes for a fake run; torch's own looks at ``data``, which is no fake tensor."""
    if id(tensor) not in memo:
        kind: Any = UninitializedParameter if isinstance(tensor, UninitializedParameter) else UninitializedBuffer
        memo[id(tensor)] = kind(tensor.requires_grad, tensor.device, tensor.dtype)
    return memo[id(tensor)]


def has_lazy(model: nn.Module) -> bool:
    return any(is_lazy(each) for each in [*model.parameters(), *model.buffers()])
