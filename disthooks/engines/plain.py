"""A module in one process: its gradients are whole and nothing reduces them."""

from __future__ import annotations

from torch import nn

from disthooks.engines.base import Engine
from disthooks.engines.refused import this_rank


class Plain(Engine):
    """A module that no engine has taken; among several processes each has one that it trains by itself."""

    alone = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, (this_rank(),))
