"""Rules: what may be done to a final gradient, given at most one number measured over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disthooks._match import Pattern, match
from disthooks.errors import UsageError
from disthooks.grads.measures import Measure, Power, wide
from disthooks.grads.stats import norm_label

Named = Sequence[tuple[str, torch.Tensor]]


class Rule:
    """What every rule is: an optional measure, and a rewrite of local gradients by it.

    Rewriting must be elementwise, or depend on nothing but the measured value: a rank may hold any part of a
    gradient. It changes the gradients in place and never waits for the device.
    """

    def measure(self) -> Measure | None:
        """What must be known over all ranks before gradients can be rewritten."""
        return None

    def scope(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> list[int]:
        """Which of the parameters it is for."""
        return list(range(len(parameters)))

    def label(self) -> str:
        """What tells its numbers in the log from those of another rule of its kind; empty for all parameters."""
        return ""

    def check(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise UsageError when it cannot be right on these parameters."""

    def rewrite(self, grads: Named, values: torch.Tensor | None) -> None:
        """Change the local gradients in place.

        Args:
            grads: names and local parts of the gradients that are in scope and exist on this rank.
            values: for each parameter in scope its measured number, merged over the ranks, on the device; None
                for a rule that measures nothing.
        """
        raise NotImplementedError

    def finish(self, values: torch.Tensor, fresh: bool) -> dict[str, float]:
        """What goes into the log of ``values``, which are on the CPU; ``fresh``: no rule rewrote them before."""
        return {}


@dataclass(frozen=True)
class ClipValue(Rule):
    """Clamp every element to between ``low`` and ``high``; one number stands for minus and plus that number.

    Equal to ``torch.nn.utils.clip_grad_value_``. It measures nothing and costs no collective. NaN stays NaN.

    Raises:
        UsageError: when the bounds are not finite numbers, ``low`` is above ``high``, a single bound is not
            positive, or a gradient is complex.

    >>> weight = torch.tensor([-3.0, 0.05])
    >>> ClipValue(0.1).rewrite([("w", weight)], None)
    >>> weight
    tensor([-0.1000,  0.0500])
    """

    low: float
    high: float | None = None

    def __post_init__(self) -> None:
        low, high = self.bounds()
        if not (_number(self.low) and (self.high is None or _number(self.high))):
            raise UsageError(f"ClipValue({self.low!r}, {self.high!r}): bounds are finite numbers")
        if low > high:
            hint = "a single bound is positive" if self.high is None else "the lower bound comes first"
            raise UsageError(f"ClipValue: low={low} is above high={high}; {hint}")

    def bounds(self) -> tuple[float, float]:
        """Both bounds."""
        return (self.low, self.high) if self.high is not None else (-self.low, self.low)

    def check(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Complex numbers have no order to clamp by."""
        for name, parameter in parameters:
            if parameter.is_complex():
                raise UsageError(f"ClipValue: {name!r} is complex, and complex numbers are not ordered; use ClipNorm")

    def rewrite(self, grads: Named, values: torch.Tensor | None) -> None:
        """Clamp in place, a whole device's gradients at a time."""
        low, high = self.bounds()
        for group in _groups(grads):
            torch._foreach_clamp_min_(group, low)
            torch._foreach_clamp_max_(group, high)


@dataclass(frozen=True)
class ClipNorm(Rule):
    """Scale all gradients down together, so that their norm over all ranks is at most ``max_norm``.

    By the formula of ``torch.nn.utils.clip_grad_norm_``: every gradient is multiplied by
    ``min(1, max_norm / (norm + 1e-6))``, on the device, with nothing waiting for it. A norm that is not a number
    makes all gradients so. Logged are ``grad_norm`` (before), ``grad_norm_clipped`` (after this rule) and
    ``clip_ratio`` (the factor).

    Args:
        max_norm: positive and finite.
        norm_type: any number above 0, or ``math.inf``.

    Raises:
        UsageError: when an argument is none of what it may be.

    >>> weight = torch.tensor([3.0, 4.0])
    >>> ClipNorm(1.0).rewrite([("w", weight)], torch.tensor([25.0]))
    >>> weight
    tensor([0.6000, 0.8000])
    """

    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if not _number(self.max_norm) or self.max_norm <= 0:
            raise UsageError(f"ClipNorm(max_norm={self.max_norm!r}): a positive, finite number is needed")
        Power(self.norm_type)

    def measure(self) -> Power:
        """The sum of powers of every parameter."""
        return Power(float(self.norm_type))

    def rewrite(self, grads: Named, values: torch.Tensor | None) -> None:
        """Multiply in place; always, since asking whether to would wait for the device."""
        assert values is not None
        factor = self._factor(self.measure().norm(values))
        for group in _groups(grads):
            # Wide: in float16 a small factor would be 0. A tensor without dimensions does not widen the gradients.
            torch._foreach_mul_(group, factor.to(group[0].device, wide(group[0].dtype), non_blocking=True))

    def finish(self, values: torch.Tensor, fresh: bool) -> dict[str, float]:
        """The norm before (if that is what backward left) and after, and the factor."""
        norm, name = self.measure().norm(values), norm_label(self.norm_type)
        factor = self._factor(norm)
        before = {name: float(norm)} if fresh else {}
        return {**before, f"{name}_clipped": float(norm * factor), "clip_ratio": float(factor)}

    def _factor(self, norm: torch.Tensor) -> torch.Tensor:
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)


@dataclass(frozen=True)
class Only(Rule):
    """A rule for some parameters; made by :func:`only`."""

    patterns: tuple[Pattern, ...]
    rule: Rule

    def measure(self) -> Measure | None:
        """That of the rule inside."""
        return self.rule.measure()

    def scope(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> list[int]:
        """Those that match, among those that the rule inside is for."""
        inner = self.rule.scope(parameters)
        wanted = {name for name, _ in match(parameters, self.patterns, "parameter")}
        return [i for i in inner if parameters[i][0] in wanted]

    def label(self) -> str:
        """The patterns."""
        shown = ",".join(p if isinstance(p, str) else getattr(p, "__name__", repr(p)) for p in self.patterns)
        return "&".join(part for part in (shown, self.rule.label()) if part)

    def check(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """That of the rule inside."""
        self.rule.check(parameters)

    def rewrite(self, grads: Named, values: torch.Tensor | None) -> None:
        """That of the rule inside."""
        self.rule.rewrite(grads, values)

    def finish(self, values: torch.Tensor, fresh: bool) -> dict[str, float]:
        """That of the rule inside."""
        return self.rule.finish(values, fresh)


def only(pattern: Pattern | Iterable[Pattern], rule: Rule | Callable[[str, torch.Tensor], torch.Tensor]) -> Rule:
    """``rule`` for the parameters that match, which it then measures alone.

    Args:
        pattern: one or several of: a glob over the parameter's name (``*`` crosses dots), a type, a predicate of
            name and parameter.
        rule: any rule, or a function of name and gradient.

    Raises:
        UsageError: when ``rule`` is neither.
        MatchError: from :func:`~disthooks.gradients`, when a pattern matches no parameter.

    >>> only("*.bias", ClipValue(0.1)).label()
    '*.bias'
    """
    one = isinstance(pattern, (str, type)) or callable(pattern)
    patterns: Any = (pattern,) if one else tuple(pattern)  # type: ignore[arg-type]
    if not patterns:
        raise UsageError("only() needs at least one pattern")
    return Only(patterns, as_rule(rule))


@dataclass(frozen=True)
class Function(Rule):
    """A function of a parameter's name and the local part of its gradient; made of any callable among the rules."""

    function: Callable[[str, torch.Tensor], torch.Tensor]

    def rewrite(self, grads: Named, values: torch.Tensor | None) -> None:
        """Call the function for each gradient, and put what it returns in its place."""
        for name, grad in grads:
            result = self.function(name, grad)
            if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (grad.shape, grad.dtype):
                got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
                raise UsageError(
                    f"rule {self.function!r} must return {grad.dtype} {tuple(grad.shape)} for {name!r}, got {got}"
                )
            if result is not grad:
                grad.copy_(result)


def as_rule(rule: object) -> Rule:
    """``rule`` itself, or a function made into one.

    Raises:
        UsageError: when it is neither.
    """
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, type) or not callable(rule):
        raise UsageError(f"{rule!r} is no rule: give ClipNorm, ClipValue, only, or a function of name and gradient")
    return Function(rule)


def _groups(grads: Named) -> Iterator[list[torch.Tensor]]:
    """Gradients that one foreach kernel can take: of one device and one dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for _, grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    yield from groups.values()


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
