"""Read a node of the autograd graph: its inputs, the tensors that it saved, and its arguments.

Nothing here holds a node. A node that is held by a value which autograd saved on that node is a cycle through C++ that
is never freed. An annotation of a value is written on the node that made the value: it lives as long as somebody can
ask for it. A table by the numbers of nodes would mix them up, because each thread counts its nodes from 0.
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
    """The graph does not tell how a value was computed, or one of its inputs is not there any more."""


class Edge(NamedTuple):
    """The output of ``node`` with this ``number``."""

    node: Any
    number: int


def leaf_of(edge: Edge) -> Any:
    """The leaf tensor that ``edge`` stands for, or None if it stands for the output of an operator."""
    # The name is compared, because a node of the user's own may have an attribute `variable` too.
    return edge.node.variable if node_name(edge.node) == "torch::autograd::AccumulateGrad" else None


class Saved(NamedTuple):
    """A tensor that a node saved: exactly the tensor that its operator worked with.

    Attributes:
        held: the object that autograd holds for the tensor.
        must_copy: whether the tensor may be written where it lies without a count (running statistics, weights).
    """

    held: Handle | InPlace
    must_copy: bool = False


Source = Edge | Saved


class _Annotation(NamedTuple):
    held: weakref.ref[Packed | InPlace]
    layout: Layout


def is_as_made(tensor: torch.Tensor, node: Any) -> bool:
    """Whether ``tensor`` has the values that ``node`` gave it.

    A change under ``no_grad`` leaves the node of a tensor as it was. The version tells: it is 0 if nobody wrote into
    the tensor. If an operator made the tensor in place, it is the operator that saves tensors now.
    """
    return tensor._version == 0 or saves_now(node)


def saves_now(node: Any) -> bool:
    """Whether the operator of ``node`` is the one that saves tensors now."""
    return bool(node._sequence_nr() == sequence_number() - 1)


def annotate(tensor: torch.Tensor, held: Packed | InPlace, layout: Layout) -> None:
    """Write on the node of ``tensor`` that ``held`` has its value, with ``layout``, so that Recompute finds it there.

    If the tensor may have been changed since its node made it, nothing is written.
    """
    node: Any = tensor.grad_fn
    if node is not None and is_as_made(tensor, node):
        node.metadata.setdefault(_KEY, {})[tensor.output_nr] = _Annotation(weakref.ref(held), layout)


def annotation(edge: Edge) -> Handle | InPlace | None:
    """The object that holds the value of ``edge``: a new handle, or the tensor in memory; None if nobody holds it."""
    found = edge.node.metadata.get(_KEY, {}).get(edge.number)
    held = None if found is None else found.held()
    return held.handle(found.layout) if isinstance(held, Packed) else held


class NodeReader:
    """Reads the node of one value; formulas are given one.

    Args:
        edge: the value, an output of the node.
    """

    def __init__(self, edge: Edge) -> None:
        self._node = edge.node
        about = edge.node._input_metadata[edge.number]
        self.dtype: torch.dtype = about.dtype
        self.shape: tuple[int, ...] = tuple(about.shape)
        self.device: torch.device = about.device

    def input(self, place: int) -> Edge:
        """The input of the operator at ``place``, if a gradient flows to it.

        Raises:
            NotComputable: if no gradient flows there. The graph knows nothing of such a constant.
        """
        edges = self._node.next_functions
        if place >= len(edges) or edges[place][0] is None:
            raise NotComputable
        return Edge(*edges[place])

    def saved(self, name: str, must_copy: bool = False) -> Saved | None:
        """The tensor that the node saved by that ``name``; None if the operator was not given one, or did not save it.

        Raises:
            NotComputable: if something else than disthooks holds the tensor, or it was released.
        """
        # `_saved_<name>` would restore the tensor from its store; `_raw_saved_<name>` does not.
        try:
            held = getattr(getattr(self._node, f"_raw_saved_{name}"), "data", None)
        except (AttributeError, RuntimeError) as error:
            raise NotComputable from error
        if isinstance(held, torch.Tensor) and held.dim() == 0 and held.is_cpu:
            held = InPlace(held, "")  # a Python number, which torch saves without hooks
        if held is not None and not isinstance(held, (Handle, InPlace)):
            raise NotComputable
        return None if held is None else Saved(held, must_copy)

    def operand(self, place: int, name: str) -> Source:
        """The operand at ``place``: the tensor saved by ``name`` if there is one, otherwise the input."""
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

    def is_given(self, place: int) -> bool:
        """Whether a gradient flows to the input at ``place``."""
        edges = self._node.next_functions
        return place < len(edges) and edges[place][0] is not None

    def device_of(self, edge: Edge) -> torch.device:
        """The device of another value."""
        return self._about(edge).device  # type: ignore[no-any-return]

    def dtype_of(self, edge: Edge) -> torch.dtype:
        """The dtype of another value."""
        return self._about(edge).dtype  # type: ignore[no-any-return]

    def _about(self, edge: Edge) -> Any:
        leaf = leaf_of(edge)
        return edge.node._input_metadata[edge.number] if leaf is None else leaf
