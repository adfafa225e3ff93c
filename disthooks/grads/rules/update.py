"""``ClipUpdate``: scale the optimizer's update down, or undo the step, if it is far larger than updates were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.rules.base import Rule, State, Work, check_count, check_positive
from disthooks.grads.rules.history import History
from disthooks.grads.stats.base import Measure, onto, wide
from disthooks.grads.stats.updates import UpdatePower, WeightPower

_NAME = "update_norm"


@register("rule")
@dataclass(frozen=True)
class ClipUpdate(Rule):
    """Scale the optimizer's update down, if it is far larger than the updates before it, or than the weights allow.

    An update is the difference between the parameters after and before a step. In runs of large models it doubles some
    steps before the loss rises (Marin, marin-community/marin#1368, 2025), while the gradient looks as it did: the
    moments of the optimizer make it. Its norm is compared with a limit, and an update above is multiplied by
    ``limit / norm``. The limit is the smaller of these two, if both are given:

    - ``mean + sigmas * std`` of the norms of the last ``window`` updates, and at least ``tolerance`` times their mean.
      A clipped norm enters as the limit. ``std`` is divided by n - 1. Before there are ``least`` of them there is no
      limit;
    - ``ratio * max(norm of the parameters before the step, eps)``.

    The optimizer's own state, its moments, goes on from its own step. With ``undo=True`` a step above the limit is
    undone as a whole: parameters and state of the optimizer are put back, bit for bit, as if the step had been left
    out. An update that is not finite is taken back in any case.

    This rule acts when the optimizer has stepped, after all other rules. It keeps a copy of the parameters from before
    each step; with ``undo=True`` one of the optimizer's state too, and the host then reads one bool in every step. A
    step takes one more all-reduce. The log gets ``update_norm``, ``update_limit`` (the smallest one),
    ``update_clipped`` (the share of norms above their limit) and ``update_clip_ratio`` (the smallest factor). A step in
    which a norm is above its limit is in the log in any case. The history is in ``state_dict()`` of the attachment.

    Args:
        sigmas: how many standard deviations above the mean of its history the limit is; None for no such limit.
        ratio: the largest ratio of the update's norm to that of the parameters; None for no such limit.
        by: "all" for one norm of all parameters together; "parameter" for a norm of each.
        window: how many norms the history has; an int of at least 2.
        least: how many there must be before the history gives a limit.
        tolerance: an update up to so many times the mean is never above the limit of its history; at least 1.
        eps: parameters with a smaller norm count as having this norm, so that weights of 0 can be trained; positive.
        undo: whether a step above the limit is undone as a whole.

    Raises:
        UsageError: when an argument is out of its range; when two such rules are for the same parameter.
        AttachError: when the engine's optimizer updates copies of the parameters (DeepSpeed).

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.constant_(model.weight, 10.0)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> with gradients(model, optimizer, rules=[ClipUpdate(ratio=0.1, sigmas=None)], every=1) as watch:
    ...     model.weight.grad = torch.full((1, 1), 5.0)
    ...     optimizer.step()
    >>> model.weight.item(), watch.latest["update_norm"]
    (9.0, 5.0)
    """

    after: ClassVar[bool] = True
    sigmas: float | None = 6.0
    ratio: float | None = None
    by: Literal["all", "parameter"] = "all"
    window: int = 128
    least: int = 32
    tolerance: float = 2.0
    eps: float = 1e-3
    undo: bool = False

    def __post_init__(self) -> None:
        for name in ("sigmas", "ratio"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        if self.sigmas is None and self.ratio is None:
            raise UsageError("ClipUpdate(sigmas=None, ratio=None) has no limit: give one of them")
        if self.by not in ("all", "parameter"):
            raise UsageError(f"ClipUpdate(by={self.by!r}): 'all' for one norm, or 'parameter' for one each")
        check_count(self, "window", 2)
        check_count(self, "least", 2)
        check_positive(self, "tolerance")
        check_positive(self, "eps")
        if self.least > self.window or self.tolerance < 1 or not isinstance(self.undo, bool):
            raise UsageError(f"{self!r}: least is at most window, tolerance at least 1, undo True or False")

    @property
    def by_parameter(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({f"{_NAME}_history", f"{_NAME}_count"} if self.by == "parameter" else ())

    def measures(self) -> tuple[Measure, ...]:
        return UpdatePower(), WeightPower(before_update=True)

    def logs(self) -> frozenset[str]:
        return frozenset({_NAME, "update_limit", "update_clipped", "update_clip_ratio"})

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        return self._history().start(_NAME, (len(shards),) if self.by == "parameter" else (), device)

    def _history(self) -> History:
        return History(self.window, self.least, self.sigmas or 0.0)

    def rewrite(self, work: Work) -> None:
        each, weights = (squares.sqrt() for squares in work.values)
        whole = each.square().sum().sqrt()
        norm = each if self.by == "parameter" else whole
        limit, history = torch.full_like(norm, torch.inf), self._history()
        if self.sigmas is not None:
            limit = history.limit(work.state, _NAME, least_ratio=self.tolerance)
        if self.ratio is not None:
            norm_before = weights if self.by == "parameter" else weights.square().sum().sqrt()
            limit = torch.minimum(limit, self.ratio * norm_before.clamp(min=self.eps))
        is_above = ~(norm.isfinite() & (norm <= limit))
        # A step that was left out has moved nothing, and is no part of the history.
        history.push(work.state, _NAME, torch.minimum(norm, limit), norm.isfinite() & (norm > 0))
        factors = torch.where(is_above, torch.where(norm.isfinite(), limit / norm, 0.0), 1.0)
        if self.undo:
            work.undo.append(is_above.any())
        else:
            _scale_updates(work, factors.expand(len(work.shards)))
        log = {"update_limit": limit.amin(), "update_clipped": is_above.double().mean()}
        work.log.update({_NAME: whole, **log, "update_clip_ratio": factors.amin()})
        work.events.append((is_above.any(), dict(work.log)))

    def local_error(self) -> str:
        return f"{self!r} acts when the optimizer has stepped; leave at='local' out"


def _scale_updates(work: Work, factors: torch.Tensor) -> None:
    """Multiply the change of each parameter by its factor; a factor of 1 leaves its bits, one of 0 takes it back."""
    if factors.is_cpu and bool((factors == 1).all()):
        return
    for now, before, factor in zip(work.parameters, work.before, factors.unbind(), strict=True):
        if before is not None and now.numel():
            own = onto(factor, now.device, wide(now.dtype))
            scaled = torch.lerp(before, now, own.to(now.dtype)) if now.dtype == own.dtype else _scaled(before, now, own)
            now.copy_(torch.where(own == 1, now, torch.where(own > 0, scaled, before)))


def _scaled(before: torch.Tensor, now: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The same in float32 or wider, because half precision has too few digits for the difference."""
    kind = torch.promote_types(now.dtype, factor.dtype)
    return torch.lerp(before.to(kind), now.to(kind), factor.to(kind)).to(now.dtype)
