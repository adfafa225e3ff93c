"""``NonFinite``, with its measures: which elements are infinite or NaN, on which ranks that began, who leads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.grads.stats.base import (
    Fact,
    Found,
    Local,
    LocalFact,
    Measure,
    Merge,
    Per,
    Stat,
    State,
    moved,
    onto,
    stack,
    take,
    wide,
)
from disthooks.grads.stats.norms import Power
from disthooks.grads.stats.scan import compute_facts

# [Note: ranks as bits]
# Every step tells which ranks had an own gradient that was not finite (decision 92). Each rank adds a bit of its own to
# one float64 for each parameter, and the SUM over the ranks loses none of these bits, because they are all different.
# The mantissa of a float64 holds 52 bits and one that is not stored. With more than 52 ranks the number has instead,
# above a shift, how many ranks there are, and below it the sum of their places. So it tells the rank if there is one,
# and that it was all ranks, but not which ones if there are several. The bytes do not grow with the world size.

#: The largest world in which each rank has a bit of its own. See [Note: ranks as bits].
_BITS = 52


@dataclass(frozen=True)
class NonFiniteCount(Measure):
    """How many elements of each parameter's final gradient are infinite or NaN."""

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"nonfinite"})

    def local(self, local: Local) -> torch.Tensor:
        found = compute_facts(local, self.facts)["nonfinite"]
        if all(other is None for other in local.unreduced):
            return found
        # Gradients that no engine reduces are counted on each rank that has them.
        return found + stack(local.unreduced, lambda grads: [(~torch.isfinite(g)).sum() for g in grads], local.device)


@dataclass(frozen=True)
class FirstToFail(Measure):
    """The first rank whose own gradient of a parameter was not finite: world size minus its place; 0 if there is none.

    The first place gives the largest number, so a MAX over the ranks finds it.
    """

    merge: ClassVar[Merge] = "max"
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        return own_nonfinite(local).long() * (local.world - local.position)


@dataclass(frozen=True)
class OwnNonFinite(Measure):
    """Which ranks had an own gradient that was not finite, in one number for each parameter.

    :func:`ranks_in` reads the ranks from the merged number. See [Note: ranks as bits].
    """

    merge: ClassVar[Merge] = "sum"
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        return own_nonfinite(local).double() * _mark(local.position, local.world)


# [Note: the rank that leads]
# A step that is not logged makes one SUM and no MAX (decision 92), so it has no key that tells the largest rank. Three
# sums tell it if it is the largest by far: of each rank's squared norm n and its place p, the sums of n, n·p and n·p².
# They give the mean and the variance of the place, weighted by squared norms. By Chebyshev's inequality at most 0.4 of
# the weight is further than 0.5 from the mean if the variance is below 0.1. Then more than half of the weight is at one
# place, the integer next to the mean. If several ranks have similar norms, no rank leads.

_LEADS = 0.1


@dataclass(frozen=True)
class OwnLead(Measure):
    """Three sums that tell which rank's own gradients are the largest by far. See [Note: the rank that leads].

    :func:`leader` reads the rank from the merged sums.
    """

    merge: ClassVar[Merge] = "sum"
    per: ClassVar[Per] = "scope"
    facts: ClassVar[frozenset[Fact]] = frozenset({"own"})
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"lead"})

    def width(self, shard: Shard | None) -> int:
        return 3

    def local(self, local: Local) -> torch.Tensor:
        if local.world == 1:
            return torch.zeros(3 * len(local.scopes), dtype=torch.float64, device=local.device)
        own = compute_facts(local, self.facts)["own"]
        total = torch.stack([take(own, places).sum() for places in local.scopes])
        return torch.stack([total, total * local.position, total * local.position**2], dim=1).flatten()


def leader(sums: Sequence[float], ranks: Sequence[int]) -> int | None:
    """The global rank that leads by the three sums of one scope, merged over ``ranks``; None if no rank does.

    >>> leader([1 + 400, 1 * 0 + 400 * 3, 1 * 0 + 400 * 9], range(10, 14)), leader([2, 1, 1], range(2))
    (13, None)
    """
    total, first, second = sums
    if not 0 < total < float("inf"):
        return None
    mean = first / total
    return ranks[round(mean)] if second / total - mean**2 < _LEADS else None


def ranks_in(mark: float, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The global ranks that a merged number of :class:`OwnNonFinite` stands for; None if it does not tell them.

    See [Note: ranks as bits].

    >>> ranks_in(float(2**0 + 2**3), range(10, 20))
    (10, 13)
    >>> alone, both = _mark(70, 100), _mark(70, 100) + _mark(80, 100)
    >>> ranks_in(alone, range(100)), ranks_in(both, range(100))
    ((70,), None)
    """
    whole, world = int(mark), len(ranks)
    if world <= _BITS:
        return tuple(rank for place, rank in enumerate(ranks) if whole >> place & 1)
    count, places = divmod(whole, 1 << _shift(world))
    if count == world:
        return tuple(ranks)
    return (ranks[places],) if count == 1 else None if count else ()


def own_nonfinite(local: Local) -> torch.Tensor:
    """For each parameter whether one of this rank's own gradients was not finite: a bool vector on ``local.device``."""
    found = [(i, probe) for i, stats in enumerate(local.local_stats) for probe in stats.norms or stats.finite_probes]
    if not found:
        return torch.zeros(len(local.local_stats), dtype=torch.bool, device=local.device)
    values = [onto(value, local.device) for _, value in found]
    if len({value.dtype for value in values}) > 1:
        values = [value.double() for value in values]
    bad, places = ~torch.isfinite(torch.stack(values)), [place for place, _ in found]
    if places == list(
        range(len(local.local_stats))
    ):  # one micro-batch, and each parameter has a gradient: the usual case
        return bad
    counts = torch.zeros(len(local.local_stats), dtype=torch.int64, device=local.device)
    return counts.index_add_(0, moved(torch.tensor(places), local.device), bad.long()) > 0


def _mark(place: int, world: int) -> float:
    """The number that the rank at ``place`` adds. See [Note: ranks as bits]."""
    return float(1 << place if world <= _BITS else (1 << _shift(world)) + place)


def _shift(world: int) -> int:
    """The number of bits for the sum of places, which is below ``2 ** _shift(world)`` even if all ranks are added."""
    return 2 * world.bit_length()


def finite_probe(grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A scalar tensor that is finite only if all elements of ``grad`` are finite; none if the host knows that they are.

    On an accelerator it is the largest magnitude. On the CPU it is the sum of the elements, which is found a hundred
    times as fast. The sum of finite elements can overflow, so on the CPU the elements are looked at if the sum is not
    finite.
    """
    if not grad.numel():
        return ()
    if not grad.is_cpu:
        return (torch.linalg.vector_norm(grad, torch.inf, dtype=wide(grad.dtype)),)
    total = grad.sum(dtype=None if grad.is_complex() else wide(grad.dtype))
    is_finite = math.isfinite(abs(total.item())) or bool(torch.isfinite(grad).all())
    return () if is_finite else (torch.full((), torch.nan),)


@register("stat")
@dataclass(frozen=True)
class NonFinite(Stat):
    """How many elements are infinite or not a number, in which parameters, and on which ranks it began.

    The log gets three values:

    - ``nonfinite``: the number of such elements; each element of a parameter counts once;
    - ``nonfinite_at``: a list of ``{"param": name, "count": n, "rank": r, "before": behind}`` for parameters that have
      such elements; a record names at most ten, the last ones in model order first. ``r`` is the lowest global rank
      whose own gradient of that parameter was not finite before any reduction. It is None if that gradient was finite
      on every rank when it was measured: it became non-finite later in backward (another hook, a communication hook),
      or in the reduction. ``behind`` is the next parameter, if that is finite: a NaN of backward begins between both;
    - ``nonfinite_ranks``: all global ranks whose own gradients were not finite before any reduction.

    A step with such elements is logged in any case, with its own step number, whatever ``every`` is. Of several such
    steps in a row the first one is logged (:mod:`disthooks.grads.records`). This costs one reading of each gradient in
    every backward, and one SUM in every step.

    The same SUM has the norm of every step. If steps are not logged, the next record has the largest finite norm since
    the record before it, ``grad_norm/peak``, and its step, ``grad_norm/peak_step``. If the own gradients of one rank
    were the largest by far in this step, it has this rank, ``grad_norm/peak_rank``.

    >>> counts, first = torch.tensor([[0.0], [3.0]]), torch.tensor([[0], [2]])
    >>> rows = {NonFiniteCount(): counts, FirstToFail(): first, OwnNonFinite(): torch.tensor([[0.0], [3.0]])}
    >>> NonFinite().record(Found(["w", "b"], {}, rows, [4, 5]))
    {'nonfinite': 3, 'nonfinite_at': [{'param': 'b', 'count': 3, 'rank': 4}], 'nonfinite_ranks': [4, 5]}
    """

    def measures(self) -> tuple[Measure, ...]:
        return NonFiniteCount(), FirstToFail(), OwnNonFinite(), Power(2.0), OwnLead()

    def always(self) -> tuple[Measure, ...]:
        # All are merged by a SUM, so a step that is not logged takes one all-reduce and not two (decision 92).
        return NonFiniteCount(), OwnNonFinite(), Power(2.0), OwnLead()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"nonfinite": values[0][:, 0]}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        counts, firsts, marks = (found.rows[measure][:, 0].tolist() for measure in self.measures()[:3])
        ranks = [found.ranks[len(found.ranks) - first] if first > 0 else None for first in firsts]
        at = [
            {"param": name, "count": int(count), "rank": rank}
            for name, count, rank in zip(found.names, counts, ranks, strict=True)
            if count
        ]
        # With more ranks than bits the marks do not name every rank, but the first one to fail is always known.
        made = {rank for rank, count in zip(ranks, counts, strict=True) if count and rank is not None}
        for mark, count in zip(marks, counts, strict=True):
            made |= set((ranks_in(mark, found.ranks) or ()) if count else ())
        columns = self.numbers([self.scoped(found, NonFiniteCount())])
        numbers = self.named(found, {name: [int(each) for each in column] for name, column in columns.items()})
        return numbers | {"nonfinite_at": at, "nonfinite_ranks": sorted(made)}
