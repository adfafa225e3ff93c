"""What autograd holds for a tensor that the user's own functions pack."""

from __future__ import annotations

import time
from typing import Any

import torch

from disthooks._torch import uncompiled
from disthooks.saved.ledger import Ledger


class Called:
    """What autograd holds for a tensor that the user's own ``pack`` took."""

    __slots__ = ("ledger", "nbytes", "packed", "store", "where")

    def __init__(self, packed: Any, store: Any, ledger: Ledger, nbytes: int, where: str) -> None:
        self.packed, self.store, self.ledger, self.nbytes, self.where = packed, store, ledger, nbytes, where
        ledger.change_held(nbytes)

    @uncompiled()
    def __del__(self) -> None:
        self.ledger.change_held(-self.nbytes)

    def unpack(self) -> torch.Tensor:
        """What the user's ``unpack`` makes of it."""
        begin = time.perf_counter()
        tensor: torch.Tensor = self.store.get(self.packed)
        self.ledger.count_got(self.nbytes, time.perf_counter() - begin, self.where)
        return tensor
