"""Reads a node of the autograd graph: its inputs, the tensors that it saved, and its arguments.

No object that lives longer than a plan holds a node. If a value that autograd saved on a node held this node, the two
would be a cycle through C++ that is never freed. An annotation of a value is written on the node that made the value,
so it lives as long as the node. A table by the numbers of nodes would confuse nodes, because each thread counts its
nodes from 0.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from disthooks._tensors import Layout
from disthooks._torch import node_name, sequence_number
from disthooks.saved.packed import Handle, InPlace, Packed

_KEY = "disthooks"


class NotComputable(Exception):
    """The graph does not say how a value was computed, or one of the inputs is gone."""


class Edge(NamedTuple):
    """The output of ``node`` with this ``number``."""

    node: Any
    number: int


#: The dtypes of the tensors that torch makes of Python's numbers.
_OF_NUMBERS = (torch.float64, torch.int64, torch.complex128, torch.bool)


def leaf_of(edge: Edge) -> Any:
    """The leaf tensor that ``edge`` stands for, or None if it stands for the output of an operator."""
    # The name is compared, because a node of the user's own may have an attribute `variable` too.
    return edge.node.variable if node_name(edge.node) == "torch::autograd::AccumulateGrad" else None


def metadata_of(edge: Edge) -> Any:
    """An object that has the dtype, shape and device of the value of ``edge``."""
    leaf = leaf_of(edge)
    return edge.node._input_metadata[edge.number] if leaf is None else leaf


class Saved(NamedTuple):
    """A tensor that a node saved: exactly the tensor that its operator used.

    Attributes:
        held: the object that autograd holds for the tensor.
        must_copy: whether the tensor may be written in place without a new version, as running statistics and weights.
    """

    held: Handle | InPlace
    must_copy: bool = False


Source = Edge | Saved


class _Annotation(NamedTuple):
    held: weakref.ref[Packed | InPlace]
    layout: Layout


def is_as_made(tensor: torch.Tensor, node: Any) -> bool:
    """Whether ``tensor`` has the values that ``node`` gave it.

    A change under ``no_grad`` does not change the node of a tensor, but its version: the version is 0 if no operator
    wrote into the tensor. An operator that works in place raises the version too, so a tensor with a higher version is
    still as it was made if the operator of ``node`` is the one that saves tensors now.
    """
    return tensor._version == 0 or saves_now(node)


def saves_now(node: Any) -> bool:
    return bool(node._sequence_nr() == sequence_number() - 1)


def annotate(tensor: torch.Tensor, held: Packed | InPlace, layout: Layout) -> None:
    """Annotate the node of ``tensor``: ``held`` has its value, with ``layout``. Recompute finds the value there.

    The node stays as it is if the tensor may have been changed since the node made it.
    """
    node: Any = tensor.grad_fn
    if node is not None and is_as_made(tensor, node):
        node.metadata.setdefault(_KEY, {})[tensor.output_nr] = _Annotation(weakref.ref(held), layout)


def annotation(edge: Edge) -> Handle | InPlace | None:
    """The object that holds the value of ``edge``: a new handle, or a tensor in memory; None if no object holds it."""
    found = edge.node.metadata.get(_KEY, {}).get(edge.number)
    held = None if found is None else found.held()
    return held.handle(found.layout) if isinstance(held, Packed) else held


class NodeReader:
    """Reads the node of one value, for the formulas."""

    def __init__(self, edge: Edge) -> None:
        self._node, self.name = edge.node, node_name(edge.node)
        metadata = edge.node._input_metadata[edge.number]
        self.dtype: torch.dtype = metadata.dtype
        self.shape: tuple[int, ...] = tuple(metadata.shape)
        self.device: torch.device = metadata.device

    def input(self, place: int) -> Edge:
        """The input of the operator at ``place``.

        Raises:
            NotComputable: if no gradient flows to it. The graph does not have such a constant.
        """
        if not self.has_gradient(place):
            raise NotComputable
        return Edge(*self._node.next_functions[place])

    def saved(self, name: str, must_copy: bool = False) -> Saved | None:
        """The tensor that the node saved as ``name``; None if the operator did not get one, or did not save it.

        Raises:
            NotComputable: if the tensor is not held by disthooks, or was released.
        """
        # `_saved_<name>` would restore the tensor from its store; `_raw_saved_<name>` does not.
        try:
            held = getattr(self._node, f"_raw_saved_{name}").data
        except (AttributeError, RuntimeError) as error:
            raise NotComputable from error
        # torch saves a Python number without hooks. A tensor may look like one, but a number was never written.
        looks_alike = isinstance(held, torch.Tensor) and held.dim() == 0 and held.is_cpu and held.dtype in _OF_NUMBERS
        if looks_alike and held._version == 0:
            held = InPlace(held, "")
        if held is not None and not isinstance(held, (Handle, InPlace)):
            raise NotComputable
        return None if held is None else Saved(held, must_copy)

    def operand(self, place: int, name: str) -> Source:
        """The operand at ``place``: the tensor saved as ``name`` if there is one, otherwise the input."""
        try:
            found = self.saved(name)
        except NotComputable:
            found = None
        return self.input(place) if found is None else found

    def number(self, name: str) -> Any:
        """The argument ``name`` of the operator, which is not a tensor."""
        try:
            return getattr(self._node, f"_saved_{name}")
        except (AttributeError, RuntimeError) as error:
            raise NotComputable from error

    def has_gradient(self, place: int) -> bool:
        edges = self._node.next_functions
        return place < len(edges) and edges[place][0] is not None
