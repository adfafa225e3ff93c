"""What one call with hooks on needs to have tensors computed again.

The packed value of a tensor that may be computed again.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from disthooks._tensors import Layout
from disthooks._torch import node_name
from disthooks.saved.contents import StoredContent
from disthooks.saved.pipeline import OpenPipeline
from disthooks.saved.recompute.formulas import FORMULAS
from disthooks.saved.recompute.graph import Edge, Reader, Unknown, is_as_made, saves_now
from disthooks.saved.recompute.program import Norms, Planner, Program
from disthooks.saved.recompute.verify import MOST, Place, Recompute

# [Note: an origin is no cycle]
# An `Origin` waits until the contents of its tensor are taken, and holds the node that made the tensor. A node whose
# operator saves its own output (tanh, relu, exp) holds the packed value of that output, and so the origin: a cycle
# through C++ that no collector sees. The graph would stay in memory, although the user dropped it, until the next
# operator saves something. So the program of such a tensor is planned when it is packed, and its origin holds the
# program instead of the node: programs hold what was saved before, and no node. For other tensors planning waits,
# because the same operator may save what they can be computed from. A node of the user's own (`autograd.Function`) has
# no formula, and may have attributes that lead to anything: its outputs have no origin.


_WIDENED = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
}


_HELD = 8  # tensors


class Narrow(NamedTuple):
    """The dtype that a tensor was widened from, and the place where that was proven."""

    dtype: torch.dtype
    place: Place


class Origin(NamedTuple):
    """Where a tensor that is packed comes from: for the short time until its contents are taken.

    Attributes:
        again: of the call.
        edge: the output of the node that made it; None once its program is planned.
        layout: how it lies in its storage.
        where: name of the module.
        planned: its program, if it was planned when the tensor was packed and there is one.
    """

    again: Again
    edge: Edge | None
    layout: Layout
    where: str
    planned: Program | None = None

    def without_node(self, device: torch.device) -> Origin:
        """The same, planned now if the node saves its own output; see [Note: an origin is no cycle]."""
        if self.edge is None or not saves_now(self.edge.node):
            return self
        return self._replace(edge=None, planned=self.again.planned(self.edge, self.layout, device))

    def program(self, original: torch.Tensor) -> Program | None:
        """How to compute it, if that is known, and proven to give the bits of ``original``."""
        return self.again.program(self, original)

    def narrow(self, original: torch.Tensor) -> Narrow | None:
        """What it is a wide copy of, if it is one, and proven to be."""
        return self.again.narrow(self, original)


class Again:
    """Plans and proofs of one call.

    Args:
        pipeline: of the attachment; it knows what was proven. If what is stored does not come back as it was, proofs
            need what was there before it was stored: the last few tensors are held for that, in calls while something
            is to be proven.
        module_name: for errors and reports.
        module: the module whose forward it is, if there is one.
    """

    def __init__(self, pipeline: OpenPipeline, module_name: str, module: nn.Module | None) -> None:
        self._pipeline, self._counters, self._module_name = pipeline, pipeline.counters, module_name
        self._norms = Norms(module)
        places = list(pipeline.places.values())
        curious = not pipeline.is_lossless and not (places and all(place.settled for place in places))
        self._exact: collections.deque[torch.Tensor] = collections.deque(maxlen=_HELD if curious else 0)

    def remember(self, tensor: torch.Tensor) -> None:
        """``tensor`` is packed: what comes next may be a function of it."""
        self._exact.append(tensor.detach())

    def origin(self, owner: torch.Tensor) -> Origin | None:
        """Of ``owner``, which has all of its storage; None when it cannot be computed again."""
        node: Any = owner.grad_fn
        if node is None or node_name(node) not in FORMULAS:
            return None
        if not is_as_made(owner, node) or not fills_storage(owner):
            return None
        edge, layout = Edge(node, owner.output_nr), Layout.of(owner)
        return Origin(self, edge, layout, self._module_name)

    def planned(self, edge: Edge, layout: Layout, device: torch.device) -> Program | None:
        """How to compute the output of ``edge``, if that is known; nothing is proven of it yet."""
        steps = cast(Recompute, self._pipeline.recompute).steps
        return Planner(self._counters, self._norms, steps).program(edge, layout, device)

    def program(self, origin: Origin, original: torch.Tensor) -> Program | None:
        """See :class:`Origin`."""
        program = origin.planned
        if origin.edge is not None:
            program = self.planned(origin.edge, origin.layout, original.device)
        if program is None or not program.has_its_inputs():
            return None
        place = self._place(program.name, program.key)
        way = place.way(program.run_exact, program.variants, original)
        if way is None:
            if place.differs:
                self._counters.count_differed(place.where, original.nbytes)
            return None
        program.variant, program.place = way, place
        return program

    def narrow(self, origin: Origin, original: torch.Tensor) -> Narrow | None:
        """See :class:`Origin`."""
        if origin.edge is None or node_name(origin.edge.node) != "ToCopyBackward0":
            return None
        try:
            reader = Reader(origin.edge)
            dtype = reader.dtype_of(reader.input(0))
        except Unknown:
            return None
        if dtype not in _WIDENED.get(original.dtype, ()):
            return None
        place = self._place("narrow", (dtype, origin.layout, original.device))
        way = place.way(lambda _: original.to(dtype).to(original.dtype), 1, original)
        return None if way is None else Narrow(dtype, place)

    def _place(self, name: str, key: Any) -> Place:
        places = self._pipeline.places
        found = places.get((self._module_name, key))
        if found is None:
            if len(places) > MOST:
                places.clear()
            where = f"{self._module_name!r} ({name})" if self._module_name else f"({name})"
            found = places[self._module_name, key] = self._pipeline.proofs.place(
                (self._module_name, key), where, cast(Recompute, self._pipeline.recompute).check == "always"
            )
        return found


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is all of its storage, each element once, as it is."""
    if type(tensor) is not torch.Tensor or tensor._is_view() or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.nbytes != tensor.untyped_storage().nbytes() or tensor.storage_offset():
        return False
    expected = 1
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


class Recomputed(StoredContent):
    """Contents that are dropped where they can be computed again, and go into the store where they cannot.

    A wide copy of a narrow tensor, which nobody saved, is stored narrow.
    """

    __slots__ = ("_narrow", "_origin", "_program", "_wide")

    def __init__(self, origin: Origin, *args: Any) -> None:
        super().__init__(*args)
        self._origin: Origin | None = origin  # until the contents are taken: it holds a node, which holds this
        self._program: Program | None = None
        self._wide: torch.dtype | None = None
        self._narrow: Narrow | None = None
        self.is_in_order = self.is_in_order and self.first_layout == origin.layout

    @property
    def is_intact(self) -> bool:
        """As its base; what is computed again is the same as long as its sources are."""
        if self.is_offloaded and self._program is not None:
            return self._program.has_its_inputs()
        return super().is_intact

    def prepare(self) -> None:
        """Let go of the node that holds this; see [Note: an origin is no cycle]."""
        if self._origin is not None:
            self._origin = self._origin.without_node(self.alias.device)

    def stay_in_memory(self) -> None:
        """It will stay as it is."""
        super().stay_in_memory()
        self._origin = None

    def offload(self) -> None:
        """As its base, and let go of the graph."""
        try:
            super().offload()
        finally:
            self._origin = None

    def _offload(self, storage: torch.UntypedStorage) -> bool:
        origin = self._origin
        if self._copy is not None:
            storage = self._copy.untyped_storage()  # as it was saved: the user may have written since
        if origin is not None and not self.is_volatile:
            original = origin.layout.over(storage)
            program = origin.program(original)
            if program is not None:
                self._program, self.cost = program, program.cost
                self.counters.count_recomputed(program.name, self.nbytes, self.module_name)
                return True
            self._narrow = origin.narrow(original)
            self._wide = None if self._narrow is None else original.dtype
        if self._narrow is None or self._wide is None:
            return super()._offload(storage)
        self.cost, self.is_in_order = 1, False
        if self._copy is not None:
            self.release_copy()  # what is stored is narrow, and what is saved again is compared with what was wide
            self._weak_copy, self._copy = None, self._store.own(self.content(storage))
        taken = super()._offload(storage)
        if taken:
            narrow = self.nbytes * self._narrow.dtype.itemsize // self._wide.itemsize
            self.counters.count_recomputed("cast", self.nbytes - narrow, self.module_name)
        return taken

    def content(self, storage: torch.UntypedStorage, typed: bool = False) -> torch.Tensor:
        """As its base, or narrow."""
        if self._narrow is None or self._wide is None:
            return super().content(storage, typed)
        elements = self.nbytes // self._wide.itemsize
        wide = torch.empty(0, dtype=self._wide, device=self.alias.device).set_(storage, 0, (elements,), (1,))
        return wide.to(self._narrow.dtype)

    def _restore(self) -> torch.Tensor:
        if self._program is not None:
            return self._program.run()
        if self._narrow is not None:
            self._narrow.place.check(self.alias.device)
        content = super()._restore()
        return content if self._wide is None else content.to(self._wide)
