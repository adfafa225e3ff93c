"""Norms, the largest magnitude, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disthooks.grads.measures.base import Measure
from disthooks.grads.measures.finite import FirstToFail, NonFiniteCount, OwnNonFinite, ranks_in
from disthooks.grads.measures.power import Power, norm_label
from disthooks.grads.stats.base import Found, Stat, State


@dataclass(frozen=True)
class Norm(Stat):
    """The norm of all gradients as if they were one vector: ``grad_norm`` in the log.

    Args:
        norm_type: which norm; any number above 0 and up to 16, or ``math.inf``. Others than 2 are logged as
            ``grad_norm_l1``, ``grad_norm_linf`` and so on.
        per_parameter: also log that of each parameter, as ``grad_norm/param/<name>``.

    Raises:
        UsageError: when ``norm_type`` is none of these.

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
    """How many elements are infinite or not a number, in which parameters, and on which ranks it began.

    Logged are ``nonfinite``, the count with each element counted once, ``nonfinite_at``, a list of
    ``{"param": name, "count": n, "rank": r}`` for the parameters that have any, in model order, and
    ``nonfinite_ranks``, the global ranks whose own gradients, before any reduction, were non-finite. ``rank`` is the
    lowest of them for that parameter; None when there was none, so that the reduction itself overflowed or the loss of
    digits came after it.

    A step that is not finite is logged in any case, with its own step, whatever ``every`` is: of several in a row the
    first one (:mod:`disthooks.grads.nonfinite`). That takes a look at each gradient in every backward, and one SUM in
    every step.

    >>> counts, first = torch.tensor([[0.0], [3.0]]), torch.tensor([[0], [2]])
    >>> rows = {NonFiniteCount(): counts, FirstToFail(): first, OwnNonFinite(): torch.tensor([[0.0], [3.0]])}
    >>> NonFinite().record(Found(["w", "b"], {}, rows, [4, 5]))
    {'nonfinite': 3, 'nonfinite_at': [{'param': 'b', 'count': 3, 'rank': 4}], 'nonfinite_ranks': [4, 5]}
    """

    def measures(self) -> tuple[Measure, ...]:
        """The counts, the first rank to fail, and all of them."""
        return NonFiniteCount(), FirstToFail(), OwnNonFinite()

    def always(self) -> tuple[Measure, ...]:
        """What tells a step that is not finite: the counts and the ranks, both of a SUM."""
        return NonFiniteCount(), OwnNonFinite()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The count."""
        return {"nonfinite": values[0][:, 0]}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """The counts and where."""
        counts, firsts, marks = (found.rows[measure][:, 0].tolist() for measure in self.measures())
        ranks = [found.ranks[len(found.ranks) - first] if first > 0 else None for first in firsts]
        at = [
            {"param": name, "count": int(count), "rank": rank}
            for name, count, rank in zip(found.names, counts, ranks, strict=True)
            if count
        ]
        made = {rank for rank, count in zip(ranks, counts, strict=True) if count and rank is not None}
        for mark, count in zip(marks, counts, strict=True):
            made |= set((ranks_in(mark, found.ranks) or ()) if count else ())
        numbers = {name: int(count) for name, count in super().record(found).items()}
        return numbers | {"nonfinite_at": at, "nonfinite_ranks": sorted(made)}
