"""The private functions of torch that disthooks needs, named and typed in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_autograd: Any = torch._C._autograd

#: Number that the next graph node made in this thread will get: it has grown once an operator is under way.
sequence_number: Callable[[], int] = _autograd._get_sequence_nr

#: False inside torch.func's transforms, which forbid saved-tensor hooks.
hooks_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled

#: The innermost pair of saved-tensor hooks of this thread, or None; call it with True.
top_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = (
    _autograd._top_saved_tensors_default_hooks
)


class StorageRef:
    """Keeps the address of a storage object from being given to another one, without keeping its memory.

    >>> address = StorageRef(torch.ones(3).untyped_storage()).address
    """

    __slots__ = ("_ref", "address")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address: int = storage._cdata
        self._ref: Any = storage._weak_ref()

    def __del__(self, _free: Callable[[Any], Any] = torch.UntypedStorage._free_weak_ref) -> None:
        _free(self._ref)
