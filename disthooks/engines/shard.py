"""One parameter as this rank sees it: its name, and which part of its gradient is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from disthooks._tensors import local_part
from disthooks.errors import UsageError

Layout = Literal["whole", "replica", "sharded", "apart"]


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of one parameter that is on this rank.

    Attributes:
        name: the parameter's name in the user's own model, without what engines put into it.
        parameter: the parameter that the optimizer holds.
        owned: whether this rank counts its elements; over all ranks every element is counted once.
        layout: "whole" when no other rank has any of it, "replica" when every rank has all of it, "sharded"
            when this rank has a part, "apart" when every rank has all of it and nothing reduces its gradient.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> Shard("weight", layer.weight, owned=True, layout="whole").gradient()
    tensor([[1., 1.]])
    """

    name: str
    parameter: nn.Parameter
    owned: bool
    layout: Layout

    def gradient(self) -> torch.Tensor | None:
        """The local part of ``parameter.grad``, sharing its memory; None while there is none.

        Raises:
            UsageError: when it is sparse, or does not lie as its parameter does.
        """
        grad = self.parameter.grad
        if grad is None:
            return None
        mine, theirs = getattr(grad, "placements", None), getattr(self.parameter, "placements", None)
        if mine is not theirs and mine != theirs:
            raise UsageError(
                f"the gradient of {self.name!r} has placements {mine} and the parameter has {theirs}; give it those "
                "of its parameter before optimizer.step(): p.grad = p.grad.redistribute(placements=p.placements)"
            )
        local = local_part(grad)
        if local.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self.name!r} is {local.layout}: rules and statistics need dense gradients; build "
                "the layer with sparse=False, or give this parameter an optimizer that is not watched"
            )
        return local
