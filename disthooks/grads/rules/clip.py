"""Clipping by value and by norm: ``ClipValue`` and ``ClipNorm``, and the functions that other clipping rules share."""

# [Note: clipping multiplies in any case]
# Only the device knows whether a norm is too large, and the host would have to wait to ask. So gradients are always
# multiplied, by a factor of at most 1. On the CPU the host may ask, and multiplies by no factor of 1. The factor is
# in float32 or wider, because a small factor would be 0 in float16.
# If the norm is infinite, the factor is 0: finite elements become 0 and infinite elements become NaN, as in torch.

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.rules.base import MicroBatch, Rule, Work, check_whole, number
from disthooks.grads.stats.base import Measure, onto, wide
from disthooks.grads.stats.norms import Power, norm_label, norms, scaled_norm


@register("rule")
@dataclass(frozen=True)
class ClipValue(Rule):
    """Clamp every element to between ``low`` and ``high``; one number stands for minus and plus that number.

    The result is that of ``torch.nn.utils.clip_grad_value_``. It measures nothing and costs no collective. NaN stays
    NaN.

    Args:
        low: the lower bound; if ``high`` is None, a positive number that stands for ``-low`` and ``low``.
        high: the upper bound, at least ``low``; or None.

    Raises:
        UsageError: when the bounds are not finite numbers, ``low`` is above ``high``, a single bound is not
            positive, or a gradient is complex.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, rules=[ClipValue(0.1)]):
    ...     model(torch.tensor([[-3.0, 0.05]])).sum().backward()
    ...     optimizer.step()
    >>> model.weight.grad
    tensor([[-0.1000,  0.0500]])
    """

    can_be_local: ClassVar[bool] = True
    low: float
    high: float | None = None

    def __post_init__(self) -> None:
        if not (number(self.low) and (self.high is None or number(self.high))):
            raise UsageError(f"ClipValue({self.low!r}, {self.high!r}): bounds are finite numbers")
        low, high = self.bounds()
        if low > high:
            hint = "a single bound is positive" if self.high is None else "the lower bound comes first"
            raise UsageError(f"ClipValue: low={low} is above high={high}; {hint}")

    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound, also if only one number was given."""
        return (self.low, self.high) if self.high is not None else (-self.low, self.low)

    def check(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.parameter.is_complex():
                raise UsageError(
                    f"ClipValue: {shard.name!r} is complex, and complex numbers are not ordered; use ClipNorm"
                )

    def rewrite(self, work: Work) -> None:
        # Two kernels for each group of gradients; torch has no foreach kernel with both bounds.
        low, high = self.bounds()
        for group in work.together():
            torch._foreach_clamp_min_(group, low)
            torch._foreach_clamp_max_(group, high)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        low, high = self.bounds()
        return grad.clamp(low, high)


@register("rule")
@dataclass(frozen=True)
class ClipNorm(Rule):
    """Scale gradients down, so that their norm over all ranks is at most ``max_norm``.

    The formula is that of ``torch.nn.utils.clip_grad_norm_``: every gradient is multiplied by
    ``min(1, max_norm / (norm + 1e-6))``. This happens on the device, and the host does not wait for it. If the norm is
    NaN, all gradients become NaN.

    The log gets ``grad_norm`` (before this rule), ``grad_norm_clipped`` (after this rule) and ``clip_ratio`` (the
    factor; with ``by="parameter"`` the smallest factor). To clip groups of parameters, give one :func:`~disthooks.only`
    for each group: they share a round of collectives.

    Args:
        max_norm: the largest norm; positive and finite. A dict of steps and norms is a schedule:
            ``{0: 5.0, 1000: 1.0}`` goes from 5 to 1 in the first thousand steps in equal parts, and stays at 1. A
            function of the step must return the same on every rank. Steps are those that the attachment has counted.
        norm_type: the order of the norm: any number above 0 and up to 6, or ``math.inf``.
        by: "all" for one norm of all gradients together; "parameter" for a norm of each parameter.

    Raises:
        UsageError: when an argument is out of its range.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, rules=[ClipNorm(1.0)]):
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...     optimizer.step()
    >>> model.weight.grad
    tensor([[0.6000, 0.8000]])
    """

    max_norm: float | Mapping[int, float] | Callable[[int], float]
    norm_type: float = 2.0
    by: Literal["all", "parameter"] = "all"

    def __post_init__(self) -> None:
        if not callable(self.max_norm):
            norms = [*self.max_norm.values()] if isinstance(self.max_norm, Mapping) else [self.max_norm]
            steps = [*self.max_norm] if isinstance(self.max_norm, Mapping) else [0]
            are_steps = all(type(step) is int and step >= 0 for step in steps)
            if not norms or not all(number(norm) and norm > 0 for norm in norms) or not are_steps:
                raise UsageError(
                    f"ClipNorm(max_norm={self.max_norm!r}): a positive, finite number is needed, or a dict of steps "
                    "from 0 on and such numbers, {0: 5.0, 1000: 1.0}"
                )
        if self.by not in ("all", "parameter"):
            raise UsageError(f"ClipNorm(by={self.by!r}): 'all' for one norm, or 'parameter' for one each")
        Power(self.norm_type)

    @property
    def needs_each(self) -> bool:  # type: ignore[override]
        return self.by == "parameter"

    def measures(self) -> tuple[Measure, ...]:
        return (self._power(),)

    def logs(self) -> frozenset[str]:
        name = norm_label(self.norm_type)
        return frozenset({name, f"{name}_clipped", "clip_ratio"})

    def rewrite(self, work: Work) -> None:
        # See [Note: clipping multiplies in any case].
        power, (values,), max_norm = self._power(), work.values, at_step(self.max_norm, work.step)
        whole = power.norm(values, dim=0)
        if self.by == "all":
            clip_to(work, self.norm_type, whole, max_norm)
            return
        each = power.each(values)
        factors = factor_to(max_norm, each)
        scale_each(work, factors)
        # The norm after clipping follows from the norms of the parameters, so nothing is measured again.
        after = scaled_norm(each * factors, float(self.norm_type))
        log_clipped(work, self.norm_type, whole, after, factors.amin())

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        check_whole(self, shard, grad)
        (norm,) = norms([grad], self.norm_type)
        return grad * factor_to(at_step(self.max_norm, batch.step), norm.to(wide(grad.dtype)))

    def local_error(self) -> str:
        # A local rule sees one gradient at a time, so it knows the norm of one parameter, but not that of all of them.
        return "" if self.by == "parameter" else super().local_error()

    def _power(self) -> Power:
        return Power(float(self.norm_type))


def at_step(schedule: float | Mapping[int, float] | Callable[[int], float], step: int) -> float:
    """The number of a schedule at ``step``; between two steps of a dict it changes in equal parts.

    Raises:
        UsageError: when a function returns no positive, finite number.

    >>> [at_step({10: 4.0, 20: 2.0}, step) for step in (0, 15, 30)]
    [4.0, 3.0, 2.0]
    """
    if callable(schedule):
        found = schedule(step)
        if not number(found) or found <= 0:
            raise UsageError(f"max_norm: {schedule!r} gave {found!r} at step {step}: a positive number is needed")
        return float(found)
    if not isinstance(schedule, Mapping):
        return schedule
    steps = sorted(schedule)
    place = bisect.bisect(steps, step)
    first, last = steps[max(place - 1, 0)], steps[min(place, len(steps) - 1)]
    share = (step - first) / (last - first) if first < step and last > first else 0.0
    return schedule[first] + share * (schedule[last] - schedule[first])


def factor_to(limit: float | torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The factor that scales gradients with this norm down to at most ``limit``, by the formula of torch."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    # A limit that is learned may be infinite or NaN itself when the norm is infinite. The formula would give NaN then.
    return torch.where(norm == torch.inf, 0.0, factor)


def clip_to(work: Work, norm_type: float, norm: torch.Tensor, limit: float | torch.Tensor) -> None:
    """Scale all gradients, whose norm together is ``norm``, to at most ``limit``; log the norms and the factor."""
    factor = factor_to(limit, norm)
    scale(work, factor)
    log_clipped(work, norm_type, norm, norm * factor, factor)


def log_clipped(work: Work, norm_type: float, before: torch.Tensor, after: torch.Tensor, ratio: torch.Tensor) -> None:
    """Log the norm of all gradients before and after a rule, and the factor or the smallest factor."""
    # If an earlier rule changed the gradients, `before` is not the norm that the engine gave, so it is not logged.
    name = norm_label(norm_type)
    work.log.update(({name: before} if work.fresh else {}) | {f"{name}_clipped": after, "clip_ratio": ratio})


def scale(work: Work, factor: torch.Tensor) -> None:
    if factor.is_cpu and float(factor) == 1.0:
        return
    for group in work.together():
        # See [Note: clipping multiplies in any case]. A scalar tensor does not widen the gradients' dtype.
        torch._foreach_mul_(group, onto(factor, group[0].device, wide(group[0].dtype)))


def scale_each(work: Work, factors: torch.Tensor) -> None:
    """Multiply each gradient in place by its own number; ``factors`` is a vector with one number for each parameter."""
    own: dict[int, int] = {id(grad): place for place, grad in enumerate(work.grads) if grad is not None}
    for group in work.together():
        there = onto(factors, group[0].device, wide(group[0].dtype)).unbind()
        torch._foreach_mul_(group, [there[own[id(grad)]] for grad in group])
