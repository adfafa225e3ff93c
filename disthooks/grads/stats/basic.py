"""Norms, the largest magnitude, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disthooks.grads.measures.base import Measure
from disthooks.grads.measures.finite import FirstToFail, NonFiniteCount
from disthooks.grads.measures.power import Power, norm_label
from disthooks.grads.stats.base import Found, Stat, State


@dataclass(frozen=True)
class Norm(Stat):
    """The norm of all gradients as if they were one vector: ``grad_norm`` in the log.

    Args:
        norm_type: which norm; any number above 0, or ``math.inf``. Others than 2 are logged as
            ``grad_norm_l1``, ``grad_norm_linf`` and so on.
        per_parameter: also log that of each parameter, as ``grad_norm/param/<name>``.

    Raises:
        UsageError: when ``norm_type`` is not above 0.

    >>> Norm(1.0).numbers([torch.tensor([[7.0], [3.0]])])
    {'grad_norm_l1': tensor([7., 3.])}
    """

    norm_type: float = 2.0

    def __post_init__(self) -> None:
        Power(self.norm_type)

    def measures(self) -> tuple[Measure, ...]:
        """The sum of powers."""
        return (Power(float(self.norm_type)),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The norm."""
        return {norm_label(self.norm_type): Power(float(self.norm_type)).norm(values[0], dim=1)}


@dataclass(frozen=True)
class MaxAbs(Stat):
    """The largest magnitude among all elements: ``grad_max_abs``; not a number if any element is.

    >>> from disthooks.grads.order import ordered
    >>> MaxAbs().numbers([ordered(torch.tensor([[2.0]]))])
    {'grad_max_abs': tensor([2.], dtype=torch.float64)}
    """

    def measures(self) -> tuple[Measure, ...]:
        """The infinity norm."""
        return (Power(math.inf),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The largest."""
        return {"grad_max_abs": Power(math.inf).norm(values[0], dim=1)}


@dataclass(frozen=True)
class NonFinite(Stat):
    """How many elements are infinite or not a number, in which parameters, and on which rank it began.

    Logged are ``nonfinite``, the count with each element counted once, and ``nonfinite_at``, a
    list of ``{"param": name, "count": n, "rank": r}`` for the parameters that have any. ``rank`` is the lowest
    global rank whose own gradient, before any reduction, was non-finite; None when none was, so that the
    reduction itself overflowed or the loss of digits came after it.

    >>> rows = {NonFiniteCount(): torch.tensor([[0.0], [3.0]]), FirstToFail(): torch.tensor([[0], [1]])}
    >>> NonFinite().record(Found(["w", "b"], {}, rows, [4, 5]))
    {'nonfinite': 3, 'nonfinite_at': [{'param': 'b', 'count': 3, 'rank': 5}]}
    """

    def measures(self) -> tuple[Measure, ...]:
        """The counts, and the first rank to fail."""
        return NonFiniteCount(), FirstToFail()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The count."""
        return {"nonfinite": values[0][:, 0]}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """The counts and where."""
        counts = found.rows[NonFiniteCount()][:, 0].tolist()
        marks = found.rows[FirstToFail()][:, 0].tolist()
        ranks = [found.ranks[len(found.ranks) - mark] if mark > 0 else None for mark in marks]
        at = [
            {"param": name, "count": int(count), "rank": rank}
            for name, count, rank in zip(found.names, counts, ranks, strict=True)
            if count
        ]
        return {name: int(count) for name, count in super().record(found).items()} | {"nonfinite_at": at}
