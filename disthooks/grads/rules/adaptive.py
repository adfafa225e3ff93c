"""Clipping by the ratio of a gradient's norm to that of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disthooks.engines.shard import Shard
from disthooks.errors import UsageError
from disthooks.grads.measures.base import Measure, onto, wide
from disthooks.grads.measures.units import UnitSquares, pieces
from disthooks.grads.rules.base import Rule, Work, number


@dataclass(frozen=True)
class ClipAdaptive(Rule):
    """Scale the gradient of each output unit down, so that its norm is at most ``clipping`` times its weights' norm.

    Adaptive gradient clipping (AGC) of Brock et al., "High-Performance Large-Scale Image Recognition Without
    Normalization" (2021, eq. 3): where ``norm(G_i) / max(norm(W_i), eps) > clipping``, G_i is multiplied by
    ``clipping * max(norm(W_i), eps) / norm(G_i)``. A unit is what timm's ``unitwise_norm`` takes for one: a row along
    dimension 0 of a weight with two or more dimensions, or all of a parameter with fewer. The paper leaves the last
    linear layer out: ``only(lambda name, p: not name.startswith("head."), ClipAdaptive())``.

    A unit with a NaN in its gradient or weights becomes NaN as a whole, other units do not; an infinite norm makes
    its finite elements 0 and the infinite ones NaN. Put :class:`~disthooks.SkipNonFinite` before it. Logged are
    ``units_clipped`` (the share of units) and ``unit_clip_ratio`` (the smallest factor).

    Each rank gives 16 bytes to the SUM for every unit, so for a vocabulary of 100,000 rows 1.6 MB: the number grows
    with the rows, not with the elements.

    Args:
        clipping: the largest ratio; positive.
        eps: the least norm that weights are taken to have, so that zeros can be trained; positive.

    Raises:
        UsageError: when an argument is not positive and finite, or the engine cannot tell which elements of a
            parameter a rank has.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(2, 2, bias=False)
    >>> _ = torch.nn.init.constant_(model.weight, 3.0)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model.weight.grad = torch.tensor([[3.0, 4.0], [0.01, 0.01]])
    >>> with gradients(model, optimizer, rules=[ClipAdaptive(0.01)]):
    ...     optimizer.step()
    >>> model.weight.grad  # row 0 to 0.01 * norm([3, 3])
    tensor([[0.0255, 0.0339],
            [0.0100, 0.0100]])
    """

    clipping: float = 0.01
    eps: float = 1e-3

    def __post_init__(self) -> None:
        for name, value in (("clipping", self.clipping), ("eps", self.eps)):
            if not number(value) or value <= 0:
                raise UsageError(f"ClipAdaptive({name}={value!r}): a positive, finite number is needed")

    def measures(self) -> tuple[Measure, ...]:
        """The sums of squares of every unit."""
        return UnitSquares("gradient"), UnitSquares("parameter")

    def logs(self) -> frozenset[str]:
        """How much was clipped."""
        return frozenset({"units_clipped", "unit_clip_ratio"})

    def check(self, shards: Sequence[Shard]) -> None:
        """Which rows are here must be known."""
        for shard in shards:
            if shard.part is None:
                raise UsageError(
                    f"ClipAdaptive: which elements of {shard.name!r} are on this rank cannot be told, so neither can "
                    "its units; use ClipNorm(by='parameter')"
                )

    def rewrite(self, work: Work) -> None:
        """Multiply what is here of each unit by the unit's factor."""
        norms, weights = (squares.sqrt() for squares in work.values)
        limits = self.clipping * weights.clamp(min=self.eps)
        below = norms < limits
        factors = torch.where(below, 1.0, limits / norms.clamp(min=1e-6))  # 1e-6 as in timm
        if factors.numel():
            work.log.update(units_clipped=(~below).double().mean(), unit_clip_ratio=factors.amin())
        measure = UnitSquares("gradient")
        split = torch.split(factors, [measure.width(shard) for shard in work.shards])
        for shard, grad, own in zip(work.shards, work.grads, split, strict=True):
            if grad is not None and shard.part is not None:
                own = onto(own, grad.device, wide(grad.dtype))
                for first, piece in pieces(grad, shard.part):
                    piece.mul_(own[first : first + len(piece)].view(-1, *[1] * (piece.ndim - 1)))

    def local_error(self) -> str:
        """It compares with the weights, which may be anywhere."""
        return (
            f"{self!r} compares whole units of the final gradient with their weights, and no rank has all of them "
            "before the reduction; leave at='local' out, or use ClipNorm(by='parameter')"
        )
