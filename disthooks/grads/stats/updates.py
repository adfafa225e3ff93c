"""How long the parameters are, and how far a step moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disthooks.grads.measures.base import Measure
from disthooks.grads.measures.weights import UpdatePower, WeightPower
from disthooks.grads.stats.base import Stat


@dataclass(frozen=True)
class Weights(Stat):
    """The 2-norm of the parameters before the update: ``param_norm``.

    Args:
        per_parameter: also of each parameter, as ``param_norm/param/<name>``.

    >>> Weights().numbers([torch.tensor([[25.0]])])
    {'param_norm': tensor([5.])}
    """

    def measures(self) -> tuple[Measure, ...]:
        """The sum of squares."""
        return (WeightPower(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The norm."""
        return {"param_norm": values[0][:, 0].sqrt()}


@dataclass(frozen=True)
class Updates(Stat):
    """How far the optimizer moved the parameters: ``update_norm``, and its ratio to their norm, ``update_ratio``.

    The 2-norm of parameters after the step minus before; the ratio is to the norm before. Around 1e-3 is common for a
    healthy layer. In a step that is logged the parameters of this rank are copied before the update, and measuring
    afterwards is one more all-reduce: ``report()`` counts it.

    Args:
        per_parameter: also of each parameter, as ``update_ratio/param/<name>`` and so on.

    >>> Updates().numbers([torch.tensor([[4.0]]), torch.tensor([[25.0]])])
    {'update_norm': tensor([2.]), 'update_ratio': tensor([0.4000])}
    """

    def measures(self) -> tuple[Measure, ...]:
        """The sums of squares of the differences, and before."""
        return UpdatePower(), WeightPower()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The norm, and the ratio."""
        moved, before = (squares[:, 0].sqrt() for squares in values)
        return {"update_norm": moved, "update_ratio": moved / before}
