"""``nn.DataParallel``: replicas in threads of one process, whose gradients are summed into one module."""

from __future__ import annotations

from torch import nn

from disthooks._match import inside
from disthooks.engines.base import Engine, is_a
from disthooks.engines.refused import this_rank


class DataParallel(Engine):
    """The module inside: backward of the broadcast sums the replicas' gradients before any hook sees them."""

    label = "DataParallel"
    alone = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(inside(model), (this_rank(),))

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """An ``nn.DataParallel``."""
        return is_a(model, "DataParallel")
