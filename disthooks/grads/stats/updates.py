"""``Weights`` and ``Updates``: the norm of the parameters before a step, and how far the step moved them.

Each rank reads only the elements that it owns, so every element counts once (decision 54).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.grads.stats.base import Found, Local, Measure, Merge, Stat, State, stack, wide
from disthooks.grads.stats.nonfinite import leader
from disthooks.grads.stats.norms import norms, squares

# On the CPU at most this many elements of a difference are in memory at a time. Their memory is used again for the next
# block.
_BLOCK = 2**17
_SMALL = 2**14  # parameters with at most this many elements share one kernel launch


@dataclass(frozen=True)
class WeightPower(Measure):
    """The sum of the squares of each parameter's elements before the update."""

    merge: ClassVar[Merge] = "sum"

    def local(self, local: Local) -> torch.Tensor:
        values = [shard.values() if shard.is_owner else None for shard in local.shards]
        return squares(values, local.device)


@dataclass(frozen=True)
class UpdatePower(Measure):
    """The sum over each parameter's elements of the squared change that the update made.

    Attributes:
        leads: whether two more sums tell the rank that made most of it; see [Note: the rank that leads] in scan.py.
    """

    leads: bool = False

    merge: ClassVar[Merge] = "sum"
    after: ClassVar[bool] = True
    before: ClassVar[bool] = True

    def width(self, shard: Shard | None) -> int:
        return 3 if self.leads else 1

    def local(self, local: Local) -> torch.Tensor:
        now = [shard.values() for shard in local.shards]
        pairs = [(a, b) for a, b in zip(now, local.before, strict=True) if b is not None and b.numel()]
        total = stack(local.before, lambda before: _norms_of_change(pairs), local.device).square()
        if not self.leads:
            return total
        return torch.stack([total, total * local.position, total * local.position**2], dim=1).flatten()


def _norms_of_change(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    small = [i for i, (now, _) in enumerate(pairs) if now.numel() <= _SMALL]
    if small:  # all by one kernel launch
        changes = torch._foreach_sub([_wide(pairs[i][0]) for i in small], [_like(*pairs[i]) for i in small])
        found = dict(zip(small, norms(list(changes), 2.0), strict=True))
    for i, (now, before) in enumerate(pairs):
        if i in found:
            continue
        # On the CPU one block of a large difference is in memory at a time.
        size = _BLOCK if now.is_cpu else now.numel()
        room = torch.empty(min(size, now.numel()), dtype=_wide(now[:0]).dtype, device=now.device)
        parts = []
        for one, other in zip(torch.split(now.reshape(-1), size), torch.split(before.reshape(-1), size), strict=True):
            parts += norms([torch.sub(_wide(one), _like(one, other), out=room[: len(one)])], 2.0)
        found[i] = torch.linalg.vector_norm(torch.stack(parts).double())
    return [found[i] for i in range(len(pairs))]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in float32 or wider, because half precision often cannot hold the difference of two halves."""
    return tensor.to(torch.promote_types(tensor.dtype, wide(tensor.dtype)))


def _like(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    # The copy from before the step may be on another device than the parameter is now.
    return _wide(before.to(now.device))


@register("stat")
@dataclass(frozen=True)
class Weights(Stat):
    """The 2-norm of the parameters before the update: ``param_norm``.

    Args:
        per_parameter: log the norm of each parameter too, as ``param_norm/param/<name>``.

    >>> Weights().numbers([torch.tensor([[25.0]])])
    {'param_norm': tensor([5.])}
    """

    def measures(self) -> tuple[Measure, ...]:
        return (WeightPower(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"param_norm": values[0][:, 0].sqrt()}


@register("stat")
@dataclass(frozen=True)
class Updates(Stat):
    """How far the optimizer moved the parameters: ``update_norm``, and its ratio to their norm, ``update_ratio``.

    ``update_norm`` is the 2-norm of the difference between the parameters after and before the step. ``update_ratio``
    is that norm divided by the norm of the parameters before the step; around 1e-3 is common for a healthy layer. The
    learning rate is logged beside them, as ``lr``: the largest of the optimizer's parameter groups.

    In a step that is logged each rank copies its parameters before the update. The measurement after the update takes
    one more all-reduce, which ``report()`` counts.

    Args:
        per_parameter: log both of each parameter too, as ``update_ratio/param/<name>`` and so on; and on several ranks
            ``update_norm/lead_rank/param/<name>``, the rank that made most of the change. Where ranks have copies of a
            parameter, it is the rank whose copy is measured.

    >>> Updates().numbers([torch.tensor([[4.0]]), torch.tensor([[25.0]])])
    {'update_norm': tensor([2.]), 'update_ratio': tensor([0.4000])}
    """

    settings: ClassVar[tuple[str, ...]] = ("lr",)

    def measures(self) -> tuple[Measure, ...]:
        return UpdatePower(leads=self.per_parameter), WeightPower()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        moved, before = (squares[:, 0].sqrt() for squares in values)
        # A bias that is 0 and has not moved has the ratio 0, and not NaN.
        return {"update_norm": moved, "update_ratio": torch.where(moved == 0, 0.0, moved / before)}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        recorded = super().record(found, state)
        if self.per_parameter and len(found.ranks) > 1:
            sums = self.scoped(found, self.measures()[0]).tolist()
            leads = [leader(each, found.ranks) for each in sums]
            recorded |= self.named(found, {"update_norm/lead_rank": leads})
        return recorded
