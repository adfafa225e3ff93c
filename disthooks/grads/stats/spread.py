"""How the ranks' own gradients differ, and which rank is unlike the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks.engines.base import Engine
from disthooks.engines.shard import Shard
from disthooks.errors import UsageError
from disthooks.grads.measures.base import Measure
from disthooks.grads.measures.ranks import RankExtremes, RankNorms
from disthooks.grads.order import holder, unordered
from disthooks.grads.stats.base import Found, Stat, State, check_own_data

_WHICH = ("grad_norm/argmin_rank", "grad_norm/argmax_rank", "grad_norm/outlier_rank")
_LEAST = 0.1  # of the mean of the others: what their deviation is taken for at least


@dataclass(frozen=True)
class Spread(Stat):
    """The norms of the ranks' own gradients, before any reduction: the smallest, the largest, and whose they are.

    A rank's norm is the root of the mean over its micro-batches of the squared norm, times their number: the norm that
    the final gradient would have if every micro-batch were like this rank's. Loss scales are taken out. Logged are
    ``grad_norm/min_rank``, ``max_rank``, ``mean_rank`` and ``std_rank`` (over ranks), ``grad_norm/argmin_rank`` and
    ``argmax_rank``, which are global ranks, and ``grad_norm/outlier_rank``: a global rank, or None.

    An outlier is the rank with the largest norm, or else the smallest, if that is further from the mean of the other
    ranks than ``outlier`` times their standard deviation, which is taken for a tenth of their mean if it is less. With
    all ranks counted in mean and deviation, one of n could never be further than (n - 1) / sqrt(n) deviations. With
    two ranks it cannot be told which one is unlike the other. A norm that is not finite is an outlier in any case.

    Hooks take the norms in backward, in steps that are logged.

    Args:
        outlier: how many deviations from the others make an outlier.
        per_parameter: also of each parameter, as ``grad_norm/max_rank/param/<name>`` and so on.

    Raises:
        UsageError: when ``outlier`` is not above 0; when attached, if ranks share their data (tensor parallelism).

    >>> from disthooks.grads.order import held, ordered
    >>> norms = torch.tensor([1.0, 1.1, 0.9, 5.0], dtype=torch.float64)
    >>> sums = torch.tensor([[4.0, 4.0, float(norms.sum()), float(norms.square().sum())]])
    >>> keys = [torch.stack([ordered(n), ordered(-n), held(n, i), held(-n, i)]) for i, n in enumerate(norms)]
    >>> found = Spread().numbers([sums, torch.stack(keys).amax(0)[None]])
    >>> [int(found[f"grad_norm/{name}_rank"]) for name in ("argmin", "argmax", "outlier")]
    [2, 3, 3]
    """

    outlier: float = 5.0

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.outlier, (int, float)) or isinstance(self.outlier, bool) or not self.outlier > 0:
            raise UsageError(f"Spread(outlier={self.outlier!r}): a number of deviations above 0 is needed")

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Ranks must have different data."""
        check_own_data(self, engine)

    def measures(self) -> tuple[Measure, ...]:
        """Sums, and extremes with their ranks."""
        return RankNorms(self.per_parameter), RankExtremes(self.per_parameter)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """All but the ranks are what is logged; those are places among the ranks, -1 for none."""
        ranks, _, total, squares = values[0].unbind(-1)
        high, low = unordered(values[1][:, 0]), -unordered(values[1][:, 1])
        who_high, who_low = holder(values[1][:, 2]), holder(values[1][:, 3])
        mean = total / ranks
        std = (squares / ranks - mean.square()).clamp(min=0).sqrt()
        far_high, far_low = (_far(ranks, total, squares, norm, self.outlier) for norm in (high, low))
        outlier = torch.where(far_high, who_high, torch.where(far_low, who_low, -1))
        found = {"min": low, "max": high, "mean": mean, "std": std}
        which = dict(zip(_WHICH, (who_low, who_high, outlier), strict=True))
        return {f"grad_norm/{name}_rank": column for name, column in found.items()} | which

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """The numbers, with places as global ranks."""
        columns: dict[str, list[Any]] = {}
        for name, column in self.numbers([self.scoped(found, measure) for measure in self.measures()]).items():
            places = name in _WHICH
            columns[name] = [_rank(found, int(x)) if places else x for x in column.tolist()]
        return self.named(found, columns)


def _rank(found: Found, place: int) -> int | None:
    return found.ranks[place] if place >= 0 else None


def _far(
    ranks: torch.Tensor, total: torch.Tensor, squares: torch.Tensor, norm: torch.Tensor, outlier: float
) -> torch.Tensor:
    """Whether one rank's norm is far from those of the others."""
    others = ranks - 1
    mean = (total - norm) / others
    std = ((squares - norm.square()) / others - mean.square()).clamp(min=0).sqrt()
    far = (norm - mean).abs() > outlier * torch.maximum(std, _LEAST * mean)
    return (far & (ranks > 2)) | ~norm.isfinite()
