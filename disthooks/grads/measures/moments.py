"""Sums that give mean and variance, largest and smallest elements, zeros; each merges over parameters and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks.engines.shard import Shard
from disthooks.grads.measures.base import Fact, Local, Measure, Merge
from disthooks.grads.measures.scan import known
from disthooks.grads.order import ordered, unordered


@dataclass(frozen=True)
class MomentSums(Measure):
    """Number n, n mean, sum of squared distances to the mean, n mean²: all of them merge by adding.

    >>> sums = torch.tensor([[2.0, 2.0, 0.0, 2.0], [2.0, 6.0, 0.0, 18.0]])  # of 1, 1 and of 3, 3
    >>> MomentSums().mean_std(sums.sum(0))
    (tensor(2.), tensor(1.))
    """

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"count", "sum", "m2"})

    def width(self, shard: Shard | None) -> int:
        """Four."""
        return 4

    def local(self, local: Local) -> torch.Tensor:
        """The four numbers of each parameter."""
        found = known(local, self.facts)
        count, total = found["count"], found["sum"]
        return torch.stack([count, total, found["m2"], total.square() / count.clamp(min=1)], dim=1).flatten()

    def mean_std(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation (divided by n) from merged numbers; NaN of nothing.

        The variance is that inside the parts plus that of the parts' means (Chan, Golub and LeVeque 1979). Only the
        second is a difference, of float64 numbers as large as the means are, not as the elements' squares.
        """
        count, total, inside, means = values.unbind(-1)
        between = (means - total.square() / count).clamp(min=0)
        return total / count, ((inside + between) / count).sqrt()


@dataclass(frozen=True)
class ExtremeValues(Measure):
    """The largest element, and the largest of the negatives; NaN if any element is."""

    merge: ClassVar[Merge] = "max"
    facts: ClassVar[frozenset[Fact]] = frozenset({"high", "low"})

    def width(self, shard: Shard | None) -> int:
        """Two."""
        return 2

    def local(self, local: Local) -> torch.Tensor:
        """Both for each parameter; minus infinity where it has no elements here."""
        found = known(local, self.facts)
        return ordered(torch.stack([found["high"], found["low"]], dim=1).flatten())

    def low_high(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest from merged numbers; NaN of nothing."""
        high, low = unordered(values).unbind(-1)
        nothing = (high == -torch.inf) & (low == -torch.inf)
        return torch.where(nothing, torch.nan, -low), torch.where(nothing, torch.nan, high)


@dataclass(frozen=True)
class ZeroCount(Measure):
    """How many elements are exactly zero, and of how many."""

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"count", "zeros"})

    def width(self, shard: Shard | None) -> int:
        """Two."""
        return 2

    def local(self, local: Local) -> torch.Tensor:
        """Both for each parameter."""
        found = known(local, self.facts)
        return torch.stack([found["zeros"], found["count"]], dim=1).flatten()
