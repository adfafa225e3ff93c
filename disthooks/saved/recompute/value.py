"""The packed value of a tensor that may be computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from disthooks.saved.contents import InStore
from disthooks.saved.recompute.program import Program

if TYPE_CHECKING:
    from disthooks.saved.recompute.again import Narrow, Origin


class Recomputed(InStore):
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
        self.in_order = self.in_order and self.first == origin.layout

    @property
    def intact(self) -> bool:
        """As its base; what is computed again is the same as long as its sources are."""
        if self.taken and self._program is not None:
            return self._program.has_its_inputs()
        return super().intact

    def plan(self) -> None:
        """Let go of the node that holds this; see [Note: an origin is no cycle]."""
        if self._origin is not None:
            self._origin = self._origin.without_node(self.alias.device)

    def let_go(self) -> None:
        """It will stay as it is."""
        super().let_go()
        self._origin = None

    def take(self) -> None:
        """As its base, and let go of the graph."""
        try:
            super().take()
        finally:
            self._origin = None

    def _take(self, storage: torch.UntypedStorage) -> bool:
        origin = self._origin
        if self._copy is not None:
            storage = self._copy.untyped_storage()  # as it was saved: the user may have written since
        if origin is not None and not self.volatile:
            original = origin.layout.over(storage)
            program = origin.program(original)
            if program is not None:
                self._program, self.cost = program, program.cost
                self.ledger.count_recomputed(program.name, self.nbytes, self.where)
                return True
            self._narrow = origin.narrow(original)
            self._wide = None if self._narrow is None else original.dtype
        if self._narrow is None or self._wide is None:
            return super()._take(storage)
        self.cost, self.in_order = 1, False
        if self._copy is not None:
            self.settle()  # what is stored is narrow, and what is saved again is compared with what was wide
            self._weak_copy, self._copy = None, self._store.own(self.content(storage))
        taken = super()._take(storage)
        if taken:
            narrow = self.nbytes * self._narrow.dtype.itemsize // self._wide.itemsize
            self.ledger.count_recomputed("cast", self.nbytes - narrow, self.where)
        return taken

    def content(self, storage: torch.UntypedStorage, typed: bool = False) -> torch.Tensor:
        """As its base, or narrow."""
        if self._narrow is None or self._wide is None:
            return super().content(storage, typed)
        elements = self.nbytes // self._wide.itemsize
        wide = torch.empty(0, dtype=self._wide, device=self.alias.device).set_(storage, 0, (elements,), (1,))
        return wide.to(self._narrow.dtype)

    def _bring(self) -> torch.Tensor:
        if self._program is not None:
            return self._program.run()
        if self._narrow is not None:
            self._narrow.place.check(self.alias.device)
        content = super()._bring()
        return content if self._wide is None else content.to(self._wide)
