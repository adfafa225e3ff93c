"""The norms of the ranks' own gradients, before any reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks.engines.shard import Shard
from disthooks.grads.measures.base import Fact, Local, Look, Measure, Merge, Per, take
from disthooks.grads.measures.scan import known
from disthooks.grads.order import held, ordered


@dataclass(frozen=True)
class RankNorms(Measure):
    """For each scope the sums over ranks of 1, of the number of micro-batches, of the norm and of its square.

    A rank's norm is the root of the mean over its micro-batches of the squared norm of the scope's gradient, times
    the number of micro-batches: the norm that the final gradient would have if all of them were like this rank's.

    Attributes:
        each: whether every parameter is a scope too.
    """

    each: bool = False
    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"own"})
    looks: ClassVar[frozenset[Look]] = frozenset({"norms"})

    @property
    def per(self) -> Per:  # type: ignore[override]
        """For each scope: a rank's norms cannot be added."""
        return "both" if self.each else "scope"

    def width(self, shard: Shard | None) -> int:
        """Four."""
        return 4

    def local(self, local: Local) -> torch.Tensor:
        """The four numbers of each scope."""
        squares = own_squares(local, self.each)
        batches = torch.full_like(squares, micro_batches(local))
        return torch.stack([torch.ones_like(squares), batches, squares.sqrt(), squares], dim=1).flatten()


@dataclass(frozen=True)
class RankExtremes(Measure):
    """For each scope the largest norm and the smallest, negated; then which ranks have them, as keys.

    Attributes:
        each: whether every parameter is a scope too.
    """

    each: bool = False
    merge: ClassVar[Merge] = "max"
    facts: ClassVar[frozenset[Fact]] = frozenset({"own"})
    looks: ClassVar[frozenset[Look]] = frozenset({"norms"})

    @property
    def per(self) -> Per:  # type: ignore[override]
        """For each scope: a rank's norms cannot be added."""
        return "both" if self.each else "scope"

    def width(self, shard: Shard | None) -> int:
        """Four."""
        return 4

    def local(self, local: Local) -> torch.Tensor:
        """The four keys of each scope."""
        norm = own_squares(local, self.each).sqrt()
        keys = [ordered(norm), ordered(-norm), held(norm, local.position), held(-norm, local.position)]
        return torch.stack(keys, dim=1).flatten()


def own_squares(local: Local, each: bool) -> torch.Tensor:
    """This rank's squared norm of each scope, in the units of the final gradient."""
    own = known(local, frozenset({"own"}))["own"] * micro_batches(local)
    if local.scale is not None:
        own = own / local.scale.double().square()
    scopes = torch.stack([take(own, places).sum() for places in local.scopes])
    return torch.cat([scopes, own]) if each else scopes


def micro_batches(local: Local) -> int:
    """How many backward passes this rank made since the last step."""
    return max((len(seen.norms) for seen in local.seen), default=0)
