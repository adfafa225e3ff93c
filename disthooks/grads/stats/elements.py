"""What the elements are like: mean and deviation, extremes, zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disthooks.engines.base import Engine
from disthooks.engines.shard import Shard
from disthooks.grads.measures.base import Measure
from disthooks.grads.measures.moments import ExtremeValues, MomentSums, ZeroCount
from disthooks.grads.stats.base import Stat, check_real


@dataclass(frozen=True)
class Moments(Stat):
    """Mean and standard deviation over all elements: ``grad_mean``, ``grad_std``.

    The deviation is that of the elements there are (divided by n, not n - 1). An element that is not finite makes both
    not finite; ``NonFinite`` says which. Parts are merged by the formula of Chan, Golub and LeVeque (1979), so that a
    mean ten thousand times the deviation costs no digits.

    Args:
        per_parameter: also of each parameter, as ``grad_mean/param/<name>`` and so on.

    Raises:
        UsageError: when attached, if a parameter is complex.

    >>> sums = torch.tensor([[2.0, 4.0, 2.0, 8.0]])  # of 1 and 3: n, n mean, squared distances, n mean²
    >>> Moments().numbers([sums])
    {'grad_mean': tensor([2.]), 'grad_std': tensor([1.])}
    """

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Complex numbers have no signed mean here."""
        check_real(self, shards)

    def measures(self) -> tuple[Measure, ...]:
        """Sums that merge."""
        return (MomentSums(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Mean and deviation."""
        mean, std = MomentSums().mean_std(values[0])
        return {"grad_mean": mean, "grad_std": std}


@dataclass(frozen=True)
class Extremes(Stat):
    """The smallest and the largest element: ``grad_min``, ``grad_max``; not numbers if any element is not.

    Args:
        per_parameter: also of each parameter, as ``grad_min/param/<name>`` and so on.

    Raises:
        UsageError: when attached, if a parameter is complex.

    >>> from disthooks.grads.order import ordered
    >>> found = Extremes().numbers([ordered(torch.tensor([[3.0, 4.0]]))])  # the largest, and of the negatives
    >>> {name: column.tolist() for name, column in found.items()}
    {'grad_min': [-4.0], 'grad_max': [3.0]}
    """

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Complex numbers have no order."""
        check_real(self, shards)

    def measures(self) -> tuple[Measure, ...]:
        """Both as maxima."""
        return (ExtremeValues(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Smallest and largest."""
        low, high = ExtremeValues().low_high(values[0])
        return {"grad_min": low, "grad_max": high}


@dataclass(frozen=True)
class Zeros(Stat):
    """The share of elements that are exactly zero, from 0 to 1: ``grad_zeros``; of gradients that there are.

    A parameter without a gradient has no elements. Many zeros in half precision tell of underflow, in an embedding of
    rows that the batch did not use.

    Args:
        per_parameter: also of each parameter, as ``grad_zeros/param/<name>``.

    >>> Zeros().numbers([torch.tensor([[1.0, 4.0]])])
    {'grad_zeros': tensor([0.2500])}
    """

    def measures(self) -> tuple[Measure, ...]:
        """Zeros, and elements."""
        return (ZeroCount(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The share."""
        return {"grad_zeros": values[0][:, 0] / values[0][:, 1]}
