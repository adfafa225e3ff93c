"""What the backward of a user's own ``autograd.Function`` is given when it asks for its saved tensors."""

# [Note: what a function of the user's own is given]
# The backward of an `autograd.Function` may write into what it saved, and may return it as a gradient. torch then knows
# that the tensor belongs to somebody, and does not make it a `.grad` that the next backward adds to. It cannot know
# that of what an unpack hook returns. So Python code is given memory that nobody else has: not the user's, not a
# store's, not that of another reader. The operators of torch only read (decision 110).
# One function may save thousands of views of one storage. So the memory from the first element of the view to the last
# is copied, and not the storage. The elements of a view such as `x[:, i]` are far apart: it begins and ends where the
# storage does. Such views of one node share one row of memory as long as no two of them have an element in common.

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from disthooks._tensors import Layout, StorageRegion, has_gaps, memory_under, region_of
from disthooks._torch import StorageRef, at_end_of_backward


class ReadByNode(threading.local):
    """The contents that the node of the user's own that runs in this thread has read. It keeps no packed value alive.

    Attributes:
        node: the identity of the node.
        once: the packed values that the node has read.
        copies: the contents of those that the node has read twice.
        rows: the memory for views with gaps, by the storage that they had when they were saved, and which bytes of it
            are given away. The views that the node was given hold the memory.
    """

    def __init__(self) -> None:
        self.node = 0
        self.once: weakref.WeakSet[Any] = weakref.WeakSet()
        self.copies: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()
        self.rows: dict[Any, tuple[StorageRef, torch.Tensor]] = {}

    def clear(self) -> None:
        self.once.clear()
        self.copies.clear()
        self.rows.clear()

    def of(self, python_node: Any) -> ReadByNode:
        """This, for ``python_node``: what another node has read is forgotten, because that node is done."""
        if self.node != id(python_node):
            self.node = id(python_node)
            self.clear()
        return self

    def row(self, key: Any, region: StorageRegion, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Memory of ``nbytes`` in which nobody was given the elements of ``region``; they are given away now."""
        reference, given = self.rows.get(key, (None, None))
        storage = None if reference is None else reference.get()
        at = region.size, region.stride, region.offset
        if storage is None or given is None or bool(given.as_strided(*at).any()):
            storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
            given = torch.zeros(nbytes // region.dtype.itemsize, dtype=torch.bool, device="cpu")
            self.rows[key] = StorageRef(storage), given
            at_end_of_backward(self.clear)
        given.as_strided(*at).fill_(True)
        return storage


read_by_node = ReadByNode()


def copy_for_python(view: torch.Tensor, layout: Layout, saved_in: tuple[int, int], node: Any) -> torch.Tensor:
    """``view`` in memory of its own. See [Note: what a function of the user's own is given]."""
    region = region_of(layout, saved_in[1]) if node is not None and has_gaps(layout, saved_in[1]) else None
    if region is None:
        # The copy has the same strides, so it takes the elements between those of the view, too.
        return layout.over(memory_under(view).clone().untyped_storage(), layout.offset)
    region = region.raw()
    row = read_by_node.of(node).row((saved_in, region.dtype, view.device), region, saved_in[1], view.device)
    region.over(row).copy_(region._replace(offset=int(view.storage_offset())).over(view.untyped_storage()))
    return layout.over(row)
