"""Whether the ranks' own gradients point where the final one does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._match import match
from disthooks.engines.base import Engine
from disthooks.engines.shard import Shard
from disthooks.errors import UsageError
from disthooks.grads.measures.base import Measure
from disthooks.grads.measures.cosine import CosineLowest, CosineSums
from disthooks.grads.order import holder, unordered
from disthooks.grads.stats.base import Found, Stat, State, check_own_data

_WHICH = "grad_cosine/argmin_rank"


@dataclass(frozen=True)
class Agreement(Stat):
    """The cosine between each rank's own gradient, summed over its micro-batches, and the final one.

    Logged are ``grad_cosine/mean_rank``, ``grad_cosine/min_rank`` and ``grad_cosine/argmin_rank``, a global rank. With
    n ranks that agree in nothing the mean is about 1/sqrt(n), as each is a part of the final one. A rank whose gradient
    is zero has no cosine and is left out; None for the rank, and NaN, if all are.

    A copy of each matching gradient is kept from backward to the step, in steps that are logged.

    Args:
        patterns: globs over the parameters' names; one, or several.
        per_parameter: also of each matching parameter, as ``grad_cosine/min_rank/param/<name>`` and so on.

    Raises:
        UsageError: when attached, if no rank has all of the final gradient (FSDP), or ranks share their data.
        MatchError: when attached, if a pattern matches no parameter.

    >>> Agreement(["head.*", "embed.*"]).patterns
    ('head.*', 'embed.*')
    """

    patterns: str | Iterable[str] = "*"

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        patterns = (self.patterns,) if isinstance(self.patterns, str) else tuple(self.patterns)
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise UsageError(f"Agreement({self.patterns!r}): a glob over names of parameters is needed, or several")
        object.__setattr__(self, "patterns", patterns)

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Every rank must have all of the final gradient."""
        check_own_data(self, engine)
        for shard in (shards[i] for i in self._sums().keeps(shards)):
            if shard.layout not in ("whole", "replica"):
                raise UsageError(
                    f"Agreement: under {engine.label} no rank has all of the final gradient of {shard.name!r} to "
                    "compare its own with; use DDP for it, or Spread, which compares norms, on any engine"
                )

    def measures(self) -> tuple[Measure, ...]:
        """Sums, and the smallest with its rank."""
        return self._sums(), CosineLowest(self._globs(), self.per_parameter)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Mean, smallest, and the place of its rank: -1 for none."""
        count, total = values[0].unbind(-1)
        lowest, who = -unordered(values[1][:, 0]), holder(values[1][:, 1])
        return {"grad_cosine/mean_rank": total / count, "grad_cosine/min_rank": lowest, _WHICH: who}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """The numbers, with places as global ranks; of parameters that the patterns match."""
        columns = self.numbers([self.scoped(found, measure) for measure in self.measures()])
        lists: dict[str, list[Any]] = {name: column.tolist() for name, column in columns.items()}
        lists[_WHICH] = [found.ranks[int(at)] if at >= 0 else None for at in lists[_WHICH]]
        others = set(found.names) - {
            name for name, _ in match([(name, name) for name in found.names], self._globs(), "")
        }
        unmatched = {f"{name}/param/{other}" for name in lists for other in others}
        return {name: value for name, value in self.named(found, lists).items() if name not in unmatched}

    def _sums(self) -> CosineSums:
        return CosineSums(self._globs(), self.per_parameter)

    def _globs(self) -> tuple[str, ...]:
        assert isinstance(self.patterns, tuple)
        return self.patterns
