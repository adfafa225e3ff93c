"""Whether a rank's own gradient points where the final one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks._match import match
from disthooks.engines.shard import Shard
from disthooks.grads.measures.base import Fact, Local, Look, Measure, Merge, Per, take
from disthooks.grads.measures.scan import known
from disthooks.grads.order import NONE, held, ordered


@dataclass(frozen=True)
class _Cosine(Measure):
    """The cosine between this rank's own gradient and the final one, for each scope.

    Attributes:
        patterns: of the parameters it is of.
        each: whether every parameter is a scope too.
    """

    patterns: tuple[str, ...]
    each: bool = False
    facts: ClassVar[frozenset[Fact]] = frozenset({"dot", "kept", "final"})
    looks: ClassVar[frozenset[Look]] = frozenset({"kept"})

    @property
    def per(self) -> Per:  # type: ignore[override]
        """For each scope: a rank's cosines cannot be added."""
        return "both" if self.each else "scope"

    def width(self, shard: Shard | None) -> int:
        """Two."""
        return 2

    def keeps(self, shards: Sequence[Shard]) -> Sequence[int]:
        """The parameters that the patterns match."""
        names = {name for name, _ in match([(s.name, s.parameter) for s in shards], self.patterns, "parameter")}
        return [i for i, shard in enumerate(shards) if shard.name in names]


@dataclass(frozen=True)
class CosineSums(_Cosine):
    """For each scope the number of ranks that have a cosine, and their sum."""

    merge: ClassVar[Merge] = "sum"

    def local(self, local: Local) -> torch.Tensor:
        """Both for each scope."""
        cosine, there = _cosines(self, local)
        return torch.stack([there.double(), torch.where(there, cosine, 0.0)], dim=1).flatten()


@dataclass(frozen=True)
class CosineLowest(_Cosine):
    """For each scope the smallest cosine, negated, and which rank has it, as keys."""

    merge: ClassVar[Merge] = "max"

    def local(self, local: Local) -> torch.Tensor:
        """Both for each scope."""
        cosine, there = _cosines(self, local)
        keys = torch.stack([ordered(-cosine), held(-cosine, local.position)], dim=1)
        return torch.where(there[:, None], keys, NONE).flatten()


def _cosines(measure: _Cosine, local: Local) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosine of each scope, and whether there is one: not where either gradient is zero."""
    found = known(local, measure.facts)
    table = torch.stack([found["dot"], found["kept"], found["final"]])
    mine = set(measure.keeps(local.shards))
    rows = torch.stack([take(table, [i for i in places if i in mine]).sum(-1) for places in local.scopes], dim=1)
    dot, kept, final = torch.cat([rows, table], dim=1) if measure.each else rows
    there = (kept != 0) & (final != 0)
    return dot / (kept.sqrt() * final.sqrt()), there
