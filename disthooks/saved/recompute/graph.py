"""Reads a node of the autograd graph: what went into it, what it saved, with which numbers.

Nothing here holds a node: one that is held by what autograd saved on it is a cycle through C++ that never dies. What
is known about a value is noted on its node, which lives exactly as long as anybody can ask. It cannot be mistaken for
another one: numbers of nodes begin anew in each thread.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from disthooks._tensors import Layout
from disthooks._torch import node_name, sequence_number
from disthooks.saved.packed import Handle, InPlace, Packed

_KEY = "disthooks"


class Unknown(Exception):
    """The graph does not tell how a value was computed, or from something that is not there."""


class Edge(NamedTuple):
    """Output ``number`` of ``node``."""

    node: Any
    number: int


def leaf_of(edge: Edge) -> Any:
    """The leaf whose gradient ``edge`` leads to, or None; a user's own node may have any attributes."""
    return edge.node.variable if node_name(edge.node) == "torch::autograd::AccumulateGrad" else None


class Saved(NamedTuple):
    """What a node saved: exactly what its operator had in hand.

    Attributes:
        held: what autograd holds for it.
        copied: whether it may be changed where it lies, without a count: running statistics, weights.
    """

    held: Handle | InPlace
    copied: bool = False


Source = Edge | Saved


class _Noted(NamedTuple):
    held: weakref.ref[Packed | InPlace]
    layout: Layout


def is_as_made(tensor: torch.Tensor, node: Any) -> bool:
    """Whether ``tensor`` is what its ``node`` made of it.

    After a change under ``no_grad`` a tensor has the node it had before. Its version tells: it is 0, or the
    operator that made it, in place, is the one that saves it now.
    """
    return tensor._version == 0 or saves_now(node)


def saves_now(node: Any) -> bool:
    """Whether the operator of ``node`` is the one that is saving tensors now."""
    return bool(node._sequence_nr() == sequence_number() - 1)


def note(tensor: torch.Tensor, held: Packed | InPlace, layout: Layout) -> None:
    """``tensor``, an output of its node, lies over ``held`` with ``layout``; nothing if it may have been changed."""
    node: Any = tensor.grad_fn
    if node is not None and is_as_made(tensor, node):
        node.metadata.setdefault(_KEY, {})[tensor.output_nr] = _Noted(weakref.ref(held), layout)


def noted(edge: Edge) -> Handle | InPlace | None:
    """What holds the value of ``edge``: a new handle, or what is kept in memory; None when nobody does."""
    found = edge.node.metadata.get(_KEY, {}).get(edge.number)
    held = None if found is None else found.held()
    return held.handle(found.layout) if isinstance(held, Packed) else held


class Reader:
    """One output of one node.

    Args:
        edge: the output.
    """

    def __init__(self, edge: Edge) -> None:
        self._node = edge.node
        about = edge.node._input_metadata[edge.number]
        self.dtype: torch.dtype = about.dtype
        self.shape: tuple[int, ...] = tuple(about.shape)
        self.device: torch.device = about.device

    def input(self, place: int) -> Edge:
        """The value that a gradient flows to at ``place``.

        Raises:
            Unknown: when it is a constant, of which the graph knows nothing.
        """
        edges = self._node.next_functions
        if place >= len(edges) or edges[place][0] is None:
            raise Unknown
        return Edge(*edges[place])

    def saved(self, name: str, copied: bool = False) -> Saved | None:
        """What the node saved by that name; None for what was not given to the operator, or not saved.

        Raises:
            Unknown: when something else than disthooks holds it, or it was released.
        """
        # Not `_saved_<name>`, which would bring it back.
        try:
            held = getattr(getattr(self._node, f"_raw_saved_{name}"), "data", None)
        except (AttributeError, RuntimeError) as error:
            raise Unknown from error
        if isinstance(held, torch.Tensor) and held.dim() == 0 and held.is_cpu:
            held = InPlace(held, "")  # a number in the code, which torch saves without hooks
        if held is not None and not isinstance(held, (Handle, InPlace)):
            raise Unknown
        return None if held is None else Saved(held, copied)

    def operand(self, place: int, name: str) -> Source:
        """What the operator got at ``place``, and may have saved by ``name``."""
        try:
            found = self.saved(name)
        except Unknown:
            found = None
        return self.input(place) if found is None else found

    def number(self, name: str) -> Any:
        """An argument of the operator that is no tensor."""
        try:
            return getattr(self._node, f"_saved_{name}")
        except (AttributeError, RuntimeError) as error:
            raise Unknown from error

    def is_given(self, place: int) -> bool:
        """Whether a gradient flows to the input at ``place``."""
        edges = self._node.next_functions
        return place < len(edges) and edges[place][0] is not None

    def device_of(self, edge: Edge) -> torch.device:
        """Where another value is."""
        return self._about(edge).device  # type: ignore[no-any-return]

    def dtype_of(self, edge: Edge) -> torch.dtype:
        """The dtype of another value."""
        return self._about(edge).dtype  # type: ignore[no-any-return]

    def _about(self, edge: Edge) -> Any:
        leaf = leaf_of(edge)
        return edge.node._input_metadata[edge.number] if leaf is None else leaf
