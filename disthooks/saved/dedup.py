"""Finds what is packed already, so that one content is packed once."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from disthooks._tensors import Layout, is_most_of

if TYPE_CHECKING:
    from disthooks.saved.packed import Packed


# What two saved tensors have in common that are views of one packed value: address of the storage object, version,
# region, identity of the tensor that counts the changes. The packed value holds a weak reference to the storage: while
# it is in use, no other one gets its address. Equal keys do not say that the contents are equal: see
# [Note: contents are of one moment] in contents.py.
Key = tuple[int, int, object, int]


def is_written_uncounted(tensor: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether ``tensor``, whose changes ``owner`` counts, is a leaf to be optimised, or a view of one.

    They are written through ``.data``, uncounted: line searches, attacks and ``gradcheck`` do it.
    """
    return (tensor.requires_grad and tensor.is_leaf) or (owner.requires_grad and owner.is_leaf)


class ContentIndex:
    """The packed values of one attachment that are alive, by what they are of. Those that are gone are sorted out
    from time to time: a callback for each would cost more.

    Change it, and ask ``find``, under the lock of the counters; ``lookup_view`` and ``withdraw`` need none.
    """

    def __init__(self) -> None:
        self._packed: dict[Key, weakref.ref[Packed]] = {}
        self._views: dict[int, weakref.ref[Packed]] = {}  # by the owner's identity
        self._most = 1024

    def find(self, key: Key) -> Packed | None:
        """What is packed under ``key``."""
        reference = self._packed.get(key)
        packed = None if reference is None else reference()
        return None if packed is None or packed.is_withdrawn else packed

    def add(self, key: Key, packed: Packed) -> None:
        """Have ``packed`` found under ``key`` as long as it lives."""
        if len(self._packed) + len(self._views) > self._most:
            self._sort_out()
        self._packed[key] = weakref.ref(packed)

    def withdraw(self, packed: Packed) -> None:
        """Nothing is to share ``packed`` any more. A destructor may say so: see [Note: the order of locks]."""
        packed.is_withdrawn = True

    def remember(self, owner: torch.Tensor, packed: Packed) -> None:
        """Have ``packed``, which is all of its storage, found for ``owner`` and its views without a closer look."""
        self._views[id(owner)] = weakref.ref(packed)

    def lookup_view(self, tensor: torch.Tensor, owner: torch.Tensor, at_least: int) -> tuple[Packed, Layout] | None:
        """What ``tensor``, of any kind, was packed as, if that is quickly said; ``owner`` counts its changes."""
        found = self._views.get(id(owner))
        packed = None if found is None else found()
        if packed is None or packed.is_withdrawn or packed.owner() is not owner or tensor._version != packed.version:
            return None
        if owner.dim() < 2 and not owner.requires_grad:
            return None
        if tensor is not owner and (type(tensor) is not torch.Tensor or tensor.is_nested):
            return None  # a view of plain memory that is no plain tensor
        if tensor.untyped_storage()._cdata != packed.storage_ref.address:
            return None
        layout = Layout.of(tensor)
        if layout == packed.first_layout:
            return packed, packed.first_layout
        nbytes = tensor.nbytes
        whole = nbytes >= at_least and is_most_of(layout, nbytes, packed.nbytes)
        return (packed, layout) if whole and (packed.is_untyped or layout.dtype is packed.first_layout.dtype) else None

    def _sort_out(self) -> None:
        self._packed = {key: reference for key, reference in self._packed.items() if reference() is not None}
        self._views = {number: seen for number, seen in self._views.items() if seen() is not None}
        self._most = 2 * (len(self._packed) + len(self._views)) + 1024
