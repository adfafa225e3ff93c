"""Statistics of the ranks' own gradients before any reduction, with their measures.

``Spread`` compares the norms of the ranks' gradients. ``NoiseScale`` estimates how large a batch may be before more
examples help little.
"""

# [Note: a rank's norm]
# Ranks may make different numbers of micro-batches between two steps, and the user may accumulate without dividing the
# loss. So that ranks can be compared, a rank's norm is the root of the mean over its micro-batches of the squared norm,
# times the number of its micro-batches: the norm that the final gradient would have if every micro-batch were like this
# rank's. A loss scale is divided out.
# The sum over ranks of the norms of a scope does not follow from sums of the norms of its parameters, because the root
# is taken on each rank. So the measures here have numbers of their own for each scope, and for each parameter only if
# the user asks for them.

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Engine, Shard
from disthooks.errors import UsageError
from disthooks.grads.collectives import from_sortable, rank_of, to_sortable, with_rank
from disthooks.grads.stats.base import (
    MOST_RANKS,
    Fact,
    Found,
    Local,
    LocalFact,
    Measure,
    Merge,
    Per,
    Stat,
    State,
    check_own_data,
    of_ranks,
    on_this_rank,
    onto,
    take,
)
from disthooks.grads.stats.norms import Power, squares
from disthooks.grads.stats.scan import compute_facts


@dataclass(frozen=True)
class NonFiniteUnreduced(Measure):
    """How many elements are not finite in this rank's gradients that no engine reduces and that it does not own.

    Parameters whose gradients are reduced or sharded have no number.
    """

    merge: ClassVar[Merge] = "sum"

    def width(self, shard: Shard | None) -> int:
        return int(shard is not None and shard.sharding == "unreduced")

    def local(self, local: Local) -> torch.Tensor:
        counts, zero = [], torch.zeros((), dtype=torch.float64, device=local.device)
        for place, shard in enumerate(local.shards):
            if shard.sharding == "unreduced":
                grad = local.unreduced[place] if local.unreduced else None
                counts.append(zero if grad is None else onto((~torch.isfinite(grad)).sum(), zero.device, zero.dtype))
        return torch.stack(counts) if counts else zero.new_zeros(0)


@dataclass(frozen=True)
class UnreducedSquares(Measure):
    """For each parameter that no engine reduces: the sums over the ranks of its gradient's squared norm s, and of s**2.

    Copies on n ranks have ``n * sum(s**2) == sum(s)**2``, but for rounding.
    """

    merge: ClassVar[Merge] = "sum"

    def width(self, shard: Shard | None) -> int:
        return 2 * (shard is not None and shard.sharding == "unreduced")

    def local(self, local: Local) -> torch.Tensor:
        places = [place for place, shard in enumerate(local.shards) if shard.sharding == "unreduced"]
        own = [local.grads[place] if local.shards[place].is_owner else local.unreduced[place] for place in places]
        found = squares(own, local.device)
        return torch.stack([found, found.square()], dim=1).flatten()


@dataclass(frozen=True)
class _OwnGradients(Measure):
    """Numbers of this rank's own gradients. The number of a scope is no sum of the numbers of its parameters.

    Attributes:
        each: whether every parameter is a scope too.
    """

    each: bool = field(default=False, kw_only=True)

    @property
    def per(self) -> Per:  # type: ignore[override]
        return "both" if self.each else "scope"


@dataclass(frozen=True)
class _OwnNorms(_OwnGradients):
    """Numbers that are made of the norm of this rank's own gradients. See [Note: a rank's norm]."""

    facts: ClassVar[frozenset[Fact]] = frozenset({"own"})
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"norms"})


@dataclass(frozen=True)
class RankNorms(_OwnNorms):
    """For each scope five sums over the ranks.

    They are the sums of 1, of the number of micro-batches, of the norm, of its square, and of 1 if the norm is finite.
    """

    merge: ClassVar[Merge] = "sum"

    def local(self, local: Local) -> torch.Tensor:
        squares = own_squares(local, self.each)
        batches = torch.full_like(squares, micro_batches(local))
        finite = squares.isfinite().double()
        return torch.stack([torch.ones_like(squares), batches, squares.sqrt(), squares, finite], dim=1).flatten()

    def width(self, shard: Shard | None) -> int:
        return 5


@dataclass(frozen=True)
class RankExtremes(_OwnNorms):
    """For each scope four keys: of the largest norm, of the negated smallest one, and of the ranks that have them.

    The smallest norm is negated, so that the same MAX finds it. See [Note: MAX of integers keeps NaN] in
    collectives.py.
    """

    merge: ClassVar[Merge] = "max"

    def local(self, local: Local) -> torch.Tensor:
        norm = own_squares(local, self.each).sqrt()
        keys = [
            to_sortable(norm),
            to_sortable(-norm),
            with_rank(norm, local.position),
            with_rank(-norm, local.position),
        ]
        return torch.stack(keys, dim=1).flatten()

    def width(self, shard: Shard | None) -> int:
        return 4


@dataclass(frozen=True)
class NormOfRanks(Measure):
    """The norm of each rank's own gradients. See [Note: a rank's norm]."""

    merge: ClassVar[Merge] = "sum"
    per: ClassVar[Per] = "step"
    facts: ClassVar[frozenset[Fact]] = frozenset({"own"})
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"norms"})

    def local(self, local: Local) -> torch.Tensor:
        return on_this_rank(own_squares(local, each=False)[:1].sqrt(), local)

    def width(self, shard: Shard | None) -> int:
        return MOST_RANKS


@dataclass(frozen=True)
class OwnLargest(_OwnGradients):
    """For each scope two keys: of the largest magnitude in this rank's own gradients, and of the rank that has it."""

    merge: ClassVar[Merge] = "max"
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"largest"})

    def local(self, local: Local) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=local.device)
        each = [[onto(found, local.device).double() for found in stats.largest] for stats in local.local_stats]
        own = torch.stack([torch.stack(found).amax() if found else zero for found in each])
        if local.scale is not None:
            own = own / local.scale.double()
        scopes = torch.stack([take(own, places).amax() if places else zero for places in local.scopes])
        numbers = torch.cat([scopes, own]) if self.each else scopes
        return torch.stack([to_sortable(numbers), with_rank(numbers, local.position)], dim=1).flatten()

    def width(self, shard: Shard | None) -> int:
        return 2


def own_squares(local: Local, each: bool) -> torch.Tensor:
    """This rank's squared norm of each scope, in the units of the final gradient: a float64 vector.

    If ``each``, the squared norm of each parameter follows. See [Note: a rank's norm].
    """
    # The mean of the squared norms times the squared count is their sum times the count.
    own = compute_facts(local, frozenset({"own"}))["own"] * micro_batches(local)
    if local.scale is not None:
        own = own / local.scale.double().square()
    scopes = torch.stack([take(own, places).sum() for places in local.scopes])
    return torch.cat([scopes, own]) if each else scopes


def micro_batches(local: Local) -> int:
    """How many backward passes this rank has made since the last step."""
    # A parameter that a backward did not use has fewer norms, so the largest number counts.
    return max((len(stats.norms) for stats in local.local_stats), default=0)


_WHICH = ("grad_norm/argmin_rank", "grad_norm/argmax_rank", "grad_norm/outlier_rank")
# The deviation of the other ranks counts as at least this share of their mean. Otherwise ranks that are nearly alike
# would make an outlier of a rank that differs by little.
_LEAST_DEVIATION = 0.1


@register("stat")
@dataclass(frozen=True)
class Spread(Stat):
    """The norms of the ranks' own gradients, before any reduction: the smallest, the largest, and whose they are.

    A rank's norm is the root of the mean over its micro-batches of the squared norm, times the number of its
    micro-batches: the norm that the final gradient would have if every micro-batch were like this rank's. Loss scales
    are divided out.

    The log gets ``grad_norm/min_rank``, ``max_rank``, ``mean_rank`` and ``std_rank`` (over the ranks),
    ``grad_norm/argmin_rank`` and ``argmax_rank``, which are global ranks, and ``grad_norm/outlier_rank``, which is a
    global rank or None. With at most 16 ranks it gets the norm of each, ``grad_norm/of_ranks``.

    The rank with the largest norm is an outlier if its norm is further from the mean of the other ranks than
    ``outlier`` times their standard deviation; or else the rank with the smallest norm, by the same test. The deviation
    counts as at least a tenth of the mean. The rank itself is left out of mean and deviation, because otherwise one of
    n ranks could never be further than (n - 1) / sqrt(n) deviations away. With two ranks there is no outlier, because
    nothing tells which one is unlike the other. If the norm of one rank alone is not finite, this rank is the outlier;
    if those of several are not finite, there is no outlier.

    Hooks compute the norms in backward, in steps that are logged.

    Args:
        outlier: how many deviations away from the other ranks a rank is an outlier; above 0.
        per_parameter: log all of each parameter too, as ``grad_norm/max_rank/param/<name>`` and so on.

    Raises:
        UsageError: when ``outlier`` is not above 0; when attached, if ranks share their data (tensor parallelism).

    >>> from disthooks.grads.collectives import with_rank, to_sortable
    >>> norms = torch.tensor([1.0, 1.1, 0.9, 5.0], dtype=torch.float64)
    >>> sums = torch.tensor([[4.0, 4.0, float(norms.sum()), float(norms.square().sum()), 4.0]])
    >>> keys = torch.stack([to_sortable(norms), to_sortable(-norms), norms.long(), norms.long()], dim=1)
    >>> for rank, norm in enumerate(norms):
    ...     keys[rank, 2:] = torch.stack([with_rank(norm, rank), with_rank(-norm, rank)])
    >>> found = Spread().numbers([sums, keys.amax(0)[None]])
    >>> [int(found[f"grad_norm/{name}_rank"]) for name in ("argmin", "argmax", "outlier")]
    [2, 3, 3]
    """

    outlier: float = 5.0

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not _number(self.outlier) or not self.outlier > 0:
            raise UsageError(f"Spread(outlier={self.outlier!r}): a number of deviations above 0 is needed")

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        check_own_data(self, engine)

    def measures(self) -> tuple[Measure, ...]:
        return RankNorms(each=self.per_parameter), RankExtremes(each=self.per_parameter), NormOfRanks()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        # A rank is told by its place among the ranks here, -1 for none; `record` makes global ranks of places.
        ranks, _, total, squares, finite = values[0].unbind(-1)
        high, low = from_sortable(values[1][:, 0]), -from_sortable(values[1][:, 1])
        high_rank, low_rank = rank_of(values[1][:, 2]), rank_of(values[1][:, 3])
        mean = total / ranks
        std = (squares / ranks - mean.square()).clamp(min=0).sqrt()
        is_outlier = []
        for norm in (high, low):
            # Mean and deviation of the other ranks: with the rank itself among them it could never be far enough away.
            others = ranks - 1
            mean_of_others = (total - norm) / others
            std_of_others = ((squares - norm.square()) / others - mean_of_others.square()).clamp(min=0).sqrt()
            distance, least = (norm - mean_of_others).abs(), _LEAST_DEVIATION * mean_of_others
            is_far = distance > self.outlier * torch.maximum(std_of_others, least)
            # With two ranks nothing tells which one is unlike the other, unless one norm alone is not finite.
            is_outlier.append(torch.where(norm.isfinite(), is_far & (ranks > 2), (finite == others) & (others > 0)))
        outlier = torch.where(is_outlier[0], high_rank, torch.where(is_outlier[1], low_rank, -1))
        found = {"min": low, "max": high, "mean": mean, "std": std}
        which = dict(zip(_WHICH, (low_rank, high_rank, outlier), strict=True))
        return {f"grad_norm/{name}_rank": column for name, column in found.items()} | which

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {}
        *scoped, each = self.measures()
        for name, column in self.numbers([self.scoped(found, measure) for measure in scoped]).items():
            values = column.tolist()
            columns[name] = [found.global_rank(place) for place in values] if name in _WHICH else values
        norms = of_ranks("grad_norm", found.rows[each].flatten().tolist(), found.ranks)
        return self.named(found, columns) | norms


@register("stat")
@dataclass(frozen=True)
class RankMaxAbs(Stat):
    """The largest magnitude in the ranks' own gradients, before any reduction, and whose it is.

    The log gets ``grad_max_abs/max_rank`` and ``grad_max_abs/argmax_rank``, a global rank. A single element that is
    wrong shows here, while it moves the norm of a large gradient by little. With several micro-batches it is the
    largest of all of them. Loss scales are divided out. Hooks look at the gradients in backward, in steps that are
    logged.

    Args:
        per_parameter: log both of each parameter too, as ``grad_max_abs/max_rank/param/<name>`` and so on.

    >>> from disthooks.grads.collectives import with_rank, to_sortable
    >>> keys = [[int(to_sortable(x)), int(with_rank(x, rank))] for rank, x in enumerate(torch.tensor([0.5, 2.0]))]
    >>> RankMaxAbs().numbers([torch.tensor(keys).amax(0)[None]])["grad_max_abs/max_rank"]
    tensor([2.], dtype=torch.float64)
    """

    alone: ClassVar[bool] = True

    def measures(self) -> tuple[Measure, ...]:
        return (OwnLargest(each=self.per_parameter),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        # A rank is told by its place among the ranks here; `record` makes global ranks of places.
        keys = values[0]
        return {"grad_max_abs/max_rank": from_sortable(keys[:, 0]), "grad_max_abs/argmax_rank": rank_of(keys[:, 1])}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        largest, places = self.numbers([self.scoped(found, measure) for measure in self.measures()]).values()
        ranks = [found.global_rank(place) for place in places.tolist()]
        return self.named(found, {"grad_max_abs/max_rank": largest.tolist(), "grad_max_abs/argmax_rank": ranks})


@register("stat")
@dataclass(frozen=True)
class NoiseScale(Stat):
    """The simple noise scale of McCandlish et al. (2018, arXiv:1812.06162, appendix A.1): ``noise_scale``, in examples.

    It is ``tr(Σ) / |G|²``: the variance of one example's gradient, divided by the squared norm of the true gradient. A
    batch that is much smaller than the noise scale wastes steps, and one that is much larger wastes examples; the paper
    finds that the critical batch size is about the noise scale. The estimates compare gradients of two batch sizes,
    b < B: b is a micro-batch of one rank, and B is all micro-batches of all ranks together. Unbiased estimates are::

        |G|² = (B |G_B|² - b |G_b|²) / (B - b)        tr(Σ) = (|G_b|² - |G_B|²) / (1 / b - 1 / B)

    Both are averaged over logged steps by moving averages with ``decay``, and ``noise_scale`` is the ratio of the
    averages. It is None while the average of ``|G|²`` is not positive. The averages are logged too, as
    ``noise_scale_trace`` and ``noise_scale_norm2``. Choose a small ``every``, because the estimates of one step are
    mostly noise. A step whose gradients are not finite, or are all 0, does not enter the averages. The averages are
    part of ``state_dict()``.

    The estimates are right if the final gradient is the mean over ranks of the sum over micro-batches, as DDP and FSDP
    compute it. It makes no difference whether you divide the loss by the number of micro-batches. Loss scales are
    divided out.

    Args:
        batch_size: the number of examples (or tokens, or any other unit) in one micro-batch of one rank; above 0.
        decay: of the averages, from 0 (only the last step counts) to below 1.
        per_parameter: log all of each parameter too, as ``noise_scale/param/<name>`` and so on.

    Raises:
        UsageError: when an argument is out of its range; when attached, if ranks share their data (tensor
            parallelism).

    >>> NoiseScale.estimates(small=5.0, large=2.0, b=1.0, B=4.0)  # |G|² = 1, trace 4: 1 + 4 / 1 and 1 + 4 / 4
    (1.0, 4.0)
    """

    batch_size: float = 1
    decay: float = 0.95

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not _number(self.batch_size) or not self.batch_size > 0:
            raise UsageError(f"NoiseScale(batch_size={self.batch_size!r}): a number of examples above 0 is needed")
        if not _number(self.decay) or not 0 <= self.decay < 1:
            raise UsageError(f"NoiseScale(decay={self.decay!r}): a number from 0 to below 1 is needed")

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        check_own_data(self, engine)

    def start(self, scopes: int) -> State:
        # The averages start at 0, so they are divided by their weight, which starts at 0 and grows to 1.
        zeros = torch.zeros(scopes, dtype=torch.float64)
        return {"norm2": zeros, "trace": zeros.clone(), "weight": zeros.clone(), "warned": torch.zeros(())}

    def measures(self) -> tuple[Measure, ...]:
        return RankNorms(each=self.per_parameter), Power(2.0)

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        state = self.start(len(found.groups) + 1 + len(found.names) * self.per_parameter) if state is None else state
        own, final = (self.scoped(found, measure) for measure in self.measures())
        ranks, batches, _, squares = own[:, :4].unbind(-1)
        if not bool((batches > 1).any()):  # one micro-batch on one rank: both batch sizes are the same
            if not state["warned"]:
                state["warned"].fill_(1)
                warnings.warn(
                    "NoiseScale compares gradients of two batch sizes, and one rank with one micro-batch a step has "
                    "one only: nothing is logged of it until there are several ranks, or several backward passes "
                    "before a step",
                    stacklevel=2,
                )
            return {}
        small, large = squares / ranks, final[:, 0]
        norm2, trace = self.estimates(small, large, float(self.batch_size), self.batch_size * batches)
        # A step with a gradient that is not finite, or exactly 0, leaves the averages as they are.
        good = norm2.isfinite() & trace.isfinite() & (small > 0)
        for name, value in (("norm2", norm2), ("trace", trace), ("weight", torch.ones_like(norm2))):
            moved = self.decay * state[name] + (1 - self.decay) * value
            state[name].copy_(torch.where(good, moved, state[name]))
        norms2, traces = ((state[name] / state["weight"]).tolist() for name in ("norm2", "trace"))
        ratios = [trace / norm2 if norm2 > 0 else None for norm2, trace in zip(norms2, traces, strict=True)]
        columns = {"noise_scale": ratios, "noise_scale_trace": traces, "noise_scale_norm2": norms2}
        return self.named(found, columns)

    @staticmethod
    def estimates(small: Any, large: Any, b: Any, B: Any) -> tuple[Any, Any]:
        """Estimate ``|G|²`` and ``tr(Σ)`` from squared norms of gradients of two batch sizes: numbers or tensors.

        Args:
            small: the squared norm of a gradient of ``b`` examples, or the mean of several.
            large: the squared norm of a gradient of ``B`` examples.
            b: the smaller number of examples.
            B: the larger number of examples.

        Returns:
            The estimate of ``|G|²`` and that of ``tr(Σ)``; both may be negative.
        """
        return (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
