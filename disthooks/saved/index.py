"""Finds what is packed already, so that one content is packed once."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from disthooks._tensors import Layout
from disthooks.saved.region import is_most_of

if TYPE_CHECKING:
    from disthooks.saved.packed import Packed


# What two saved tensors have in common that are views of one packed value: address of the storage object, version,
# region, number of the call (0, but for what is shared in one call alone), identity of the tensor that counts the
# changes. The packed value holds a weak reference to the storage: while it is in use, no other one gets its address.
Key = tuple[int, int, object, int, int]


class Index:
    """The packed values of one attachment that are alive, by what they are of. Those that are gone are sorted out
    from time to time: a callback for each would cost more.

    Ask and change it under the lock of the ledger.
    """

    def __init__(self) -> None:
        self._packed: dict[Key, weakref.ref[Packed]] = {}
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Packed]]] = {}  # by the owner's identity
        self._most = 1024

    def find(self, key: Key) -> Packed | None:
        """What is packed under ``key``."""
        reference = self._packed.get(key)
        return None if reference is None else reference()

    def add(self, key: Key, packed: Packed) -> None:
        """Have ``packed`` found under ``key`` as long as it lives."""
        if len(self._packed) + len(self._seen) > self._most:
            self._sort_out()
        self._packed[key] = weakref.ref(packed)

    def forget(self, packed: Packed) -> None:
        """Nothing is to share ``packed`` any more."""
        self._packed = {key: reference for key, reference in self._packed.items() if reference() is not packed}
        self._seen = {number: seen for number, seen in self._seen.items() if seen[1]() is not packed}

    def see(self, owner: torch.Tensor, packed: Packed) -> None:
        """Have ``packed``, which is all of its storage, found for ``owner`` and its views without a closer look."""
        self._seen[id(owner)] = weakref.ref(owner), weakref.ref(packed)

    def seen(self, tensor: torch.Tensor, owner: torch.Tensor, at_least: int) -> tuple[Packed, Layout] | None:
        """What ``tensor``, of any kind, was packed as, if that is quickly said; ``owner`` counts its changes."""
        found = self._seen.get(id(owner))
        if found is None or found[0]() is not owner:
            return None
        packed = found[1]()
        if packed is None or tensor._version != packed.version:
            return None
        if tensor is not owner and (type(tensor) is not torch.Tensor or tensor.is_nested):
            return None  # a view of plain memory that is no plain tensor
        if tensor.untyped_storage()._cdata != packed.source.address:
            return None
        layout = Layout.of(tensor)
        if layout == packed.first:
            return packed, packed.first
        nbytes = tensor.nbytes
        whole = nbytes >= at_least and is_most_of(layout, nbytes, packed.nbytes)
        return (packed, layout) if whole and (packed.any_dtype or layout.dtype is packed.first.dtype) else None

    def _sort_out(self) -> None:
        self._packed = {key: reference for key, reference in self._packed.items() if reference() is not None}
        self._seen = {number: seen for number, seen in self._seen.items() if seen[1]() is not None}
        self._most = 2 * (len(self._packed) + len(self._seen)) + 1024
