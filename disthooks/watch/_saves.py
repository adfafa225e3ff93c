"""A pair of saved-tensor hooks that only looks: what torch or an outer pair does with the tensors stays so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from disthooks._locks import Order, shared
from disthooks._tensors import exotic, storages_of
from disthooks._torch import StorageRef, hooks_allowed, top_hooks
from disthooks.errors import MutationError
from disthooks.watch._modules import shown, version_of

_autograd: Any = torch._C._autograd


class Told(Protocol):
    """Takes "pack" or "unpack", the module's name, the tensor, and what became of it."""

    def __call__(self, kind: str, name: str, tensor: torch.Tensor, fate: str) -> None:
        """Write it down."""


class Chained(threading.local):
    """What disthooks' own hooks said of the tensor that this thread has just given to them."""

    active = False
    fate: str | None = None


class Contents:
    """Tells a storage and version seen before from a new one, and a weight from an activation."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int | None], StorageRef] = {}
        self._lock = shared(Order.WATCH)

    def fate(self, tensor: torch.Tensor, weights: frozenset[int]) -> str:
        """ "parameter", "shared" or "saved"."""
        if isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter):
            return "parameter"
        if exotic(tensor) is not None:
            return "saved"
        ref = StorageRef(tensor.untyped_storage())
        if ref.address in weights:
            return "parameter"
        key = (ref.address, version_of(tensor))
        with self._lock:  # the reference that is kept keeps the address from being given to another storage
            return "saved" if self._seen.setdefault(key, ref) is ref else "shared"


def replica_weights(module: nn.Module) -> frozenset[int]:
    """Addresses of the storages of a DataParallel replica's weights, which are not Parameters there."""
    if not getattr(module, "_is_replica", False):
        return frozenset()
    return frozenset(address for address, (kind, _) in storages_of(module).items() if kind == "parameter")


class _Looked:
    """What autograd holds: what the outer pair made of the tensor, or else the tensor and its version."""

    __slots__ = ("fate", "name", "value", "version")

    def __init__(self, name: str, value: Any, version: int | None, fate: str) -> None:
        self.name, self.value, self.version, self.fate = name, value, version, fate


class Look:
    """The pair that one outermost forward opens in its thread, on top of the pair that is active there.

    Args:
        module: the module whose forward opens.
        name: finds the name of the innermost watched module of this thread.
        told: told of every tensor.
        contents: shared by all forwards of one trace.
        chained: likewise.
    """

    def __init__(
        self, module: nn.Module, name: Callable[[], str], told: Told, contents: Contents, chained: Chained
    ) -> None:
        self._name, self._told, self._contents, self._chained = name, told, contents, chained
        self._weights = replica_weights(module)
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._open = False

    def open(self) -> None:
        """Become the innermost pair of this thread, where hooks are allowed and would see anything."""
        self._outer = top_hooks(True)
        # Under checkpoint's own pair nothing is saved; on top of it a wrapper inside would not know it is there.
        checkpoint = self._outer is not None and self._outer[0].__module__ == "torch.utils.checkpoint"
        if hooks_allowed() and not checkpoint:
            _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._open = True

    def close(self) -> None:
        """Take the pair off.

        An interrupt may have left it open while the ``with`` of the outer pair ended and took this one off in
        place of its own: then its own is what must go.
        """
        top = top_hooks(True)
        if self._open and top is not None and (top[0] == self._pack or top == self._outer):
            _autograd._pop_saved_tensors_default_hooks()
        self._open = False

    def _pack(self, tensor: torch.Tensor) -> _Looked:
        name = self._name()
        fate = self._contents.fate(tensor, self._weights)
        if self._outer is None:
            # The tensor itself would make a cycle with the node that saves it; of a Parameter the alias would
            # keep what ZeRO-3 gathers.
            alias = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
            packed = _Looked(name, alias, version_of(tensor), fate)
        else:
            said, value = self._chain(self._outer[0], tensor)
            fate = said or fate
            packed = _Looked(name, value, None, fate)
        self._told("pack", name, tensor, fate)
        return packed

    def _unpack(self, packed: _Looked) -> torch.Tensor:
        if self._outer is not None:
            tensor: torch.Tensor = self._chain(self._outer[1], packed.value)[1]
        else:
            tensor = packed.value
            _check(packed)
        self._told("unpack", packed.name, tensor, packed.fate)
        return tensor

    def _chain(self, hook: Callable[..., Any], value: Any) -> tuple[str | None, Any]:
        self._chained.active, self._chained.fate = True, None
        try:
            result = hook(value)
            return self._chained.fate, result
        finally:
            self._chained.active = False


def _check(packed: _Looked) -> None:
    """What torch checks when no hooks are on, and leaves to them when they are."""
    if packed.version is not None and packed.value._version != packed.version:
        raise MutationError(
            f"a tensor of shape {tuple(packed.value.shape)} that {shown(packed.name)!r} saved for backward was "
            f"changed in place after it was saved (version {packed.value._version}, saved at {packed.version}); "
            "use an operator that is not in place, or change a clone()"
        )
