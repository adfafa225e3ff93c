"""What one call with hooks on needs to have tensors computed again."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._tensors import Layout
from disthooks._torch import node_name
from disthooks.saved.ledger import Ledger
from disthooks.saved.recompute.places import Place
from disthooks.saved.recompute.planner import Norms, Planner
from disthooks.saved.recompute.program import Program
from disthooks.saved.recompute.reader import Edge, Reader, Unknown, is_as_made
from disthooks.saved.recompute.stage import Recompute

_WIDENED = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
}


_HELD = 8  # tensors
_MOST = 1 << 14  # places: sizes that change all the time make ever new ones


class Origin(NamedTuple):
    """Where a tensor that is packed comes from: for the short time until its contents are taken."""

    again: Again
    edge: Edge
    layout: Layout
    where: str

    def program(self, original: torch.Tensor) -> Program | None:
        """How to compute it, if that is known, and proven to give the bits of ``original``."""
        return self.again.program(self, original)

    def narrow(self, original: torch.Tensor) -> torch.dtype | None:
        """The dtype of which it is a wide copy, if it is one, and proven to be."""
        return self.again.narrow(self, original)


class Again:
    """Plans and proofs of one call.

    Args:
        stage: of the pipeline.
        ledger: of the attachment, which knows what was proven.
        where: name of the module.
        module: the module whose forward it is, if there is one.
        lossless: whether what is stored comes back as it was. If not, proofs need what was there before it was stored:
            the last few tensors are held for that, in calls while something is to be proven.
    """

    def __init__(self, stage: Recompute, ledger: Ledger, where: str, module: nn.Module | None, lossless: bool) -> None:
        self._stage, self._ledger, self._where = stage, ledger, where
        ledger.recomputes = True
        self._norms = Norms(module)
        places: list[Place] = [] if lossless else list(ledger.places.values())
        curious = not lossless and not (places and all(place.settled for place in places))
        self._exact: collections.deque[torch.Tensor] = collections.deque(maxlen=_HELD if curious else 0)

    def remember(self, tensor: torch.Tensor) -> None:
        """``tensor`` is packed: what comes next may be a function of it."""
        self._exact.append(tensor.detach())

    def origin(self, owner: torch.Tensor) -> Origin | None:
        """Of ``owner``, which has all of its storage; None when it cannot be computed again."""
        node: Any = owner.grad_fn
        if node is None or not is_as_made(owner, node) or not fills_storage(owner):
            return None
        edge, layout = Edge(node, owner.output_nr), Layout.of(owner)
        return Origin(self, edge, layout, self._where)

    def program(self, origin: Origin, original: torch.Tensor) -> Program | None:
        """See :class:`Origin`."""
        planner = Planner(self._ledger, self._norms, self._stage.steps)
        program = planner.program(origin.edge, origin.layout, original.device)
        if program is None:
            return None
        place = self._place(program.name, program.key)
        way = place.way(program.run_exact, program.variants, original)
        if way is None:
            if place.differs:
                self._ledger.count_differed(place.where, original.nbytes)
            return None
        program.variant = way
        return program

    def narrow(self, origin: Origin, original: torch.Tensor) -> torch.dtype | None:
        """See :class:`Origin`."""
        node = origin.edge.node
        if node_name(node) != "ToCopyBackward0":
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
        return None if way is None else dtype

    def _place(self, name: str, key: Any) -> Place:
        places: dict[Any, Place] = self._ledger.places
        if len(places) > _MOST:
            places.clear()
        found = places.get((self._where, key))
        if found is None:
            where = f"{self._where!r} ({name})" if self._where else f"({name})"
            found = places.setdefault((self._where, key), Place(where, self._stage.check == "always"))
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
