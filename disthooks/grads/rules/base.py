"""``Rule``: a rewrite of this rank's part of the gradients, by numbers that are measured over all ranks.

To add a rule, write a frozen dataclass that derives from :class:`Rule`, and decorate it with ``@register("rule")``:

- ``rewrite(work)`` changes the gradients in ``work.grads`` in place. A rule for single elements needs nothing else.
- ``measures()`` names the numbers that the rewrite needs, such as ``Power(2.0)`` for a norm. ``work.values`` has the
  results in the same order: the numbers of each of the rule's parameters, merged over the ranks.
- ``start()`` makes the tensors that the rule keeps from step to step. They are ``work.state``, to be changed in place,
  and ``state_dict()`` of the attachment has them.
- ``logs()`` names the numbers that ``rewrite`` puts into ``work.log``.
- ``rewrite_local()`` and ``can_be_local = True`` let the rule work at "local", where it has one gradient of one rank.

    @register("rule")
    @dataclass(frozen=True)
    class Halve(Rule):
        def rewrite(self, work: Work) -> None:
            for group in work.together():
                torch._foreach_mul_(group, 0.5)

See [Note: what a rule may do]. ``only()`` applies a rule to some parameters, or to the gradients at "local".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from disthooks._match import Pattern, as_patterns, match
from disthooks._registry import register
from disthooks._torch import groups_for_foreach
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.stats.base import ForwardNeeds, Measure

# [Note: what a rule may do]
# - A rank may hold any part of a gradient. So a rewrite is elementwise, or depends on nothing but merged values, the
#   state, and which elements a rank has (`Shard.part`); it then gives the same on every engine.
# - All ranks must decide alike. Merged values are the same bits on every rank, and so is a state that is made of them.
#   The value of a single element, a random number of torch's generator or the clock is not.
# - Nothing waits for the device. In place of `if norm > limit` write `torch.where`, and multiply in any case. A number
#   that the host must read goes into `work.deferred_errors`, and is read one step later.
# - A rule is frozen, since one object may be attached several times. All that changes is in the state.


#: The tensors that a rule keeps from step to step, the same on every rank.
State = dict[str, torch.Tensor]


@dataclass(eq=False)
class Work:
    """The input of a rule in one step, and the lists for its decisions.

    Attributes:
        shards: the parameters that the rule is for.
        grads: for each of them this rank's part of its gradient, to be changed in place; None where there is none.
        values: for each of the rule's measures its numbers, merged over the ranks, on the device.
        state: the tensors that the rule keeps from step to step, to be changed in place.
        step: how many steps there were before this one.
        fresh: whether no rule before this one rewrote any of these gradients.
        log: numbers to be logged in this step, by name; tensors without dimensions, on the device.
        skips: decisions to leave the step out; bools without dimensions, on the device.
        deferred_errors: numbers that may make the next step raise, and for each the function that raises.
        events: bools without dimensions, and for each the numbers that are recorded if it is true, logged step or not.
    """

    shards: Sequence[Shard]
    grads: Sequence[torch.Tensor | None]
    values: Sequence[torch.Tensor]
    state: State
    step: int = 0
    fresh: bool = True
    log: dict[str, torch.Tensor] = field(default_factory=dict)
    skips: list[torch.Tensor] = field(default_factory=list)
    deferred_errors: list[tuple[torch.Tensor, Callable[[float], None]]] = field(default_factory=list)
    events: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = field(default_factory=list)

    def present(self) -> Iterator[tuple[Shard, torch.Tensor]]:
        """The parameters of which this rank has elements, and their gradients."""
        for shard, grad in zip(self.shards, self.grads, strict=True):
            if grad is not None and grad.numel():
                yield shard, grad

    def together(self) -> Iterator[list[torch.Tensor]]:
        """This rank's gradients in groups of one device and one dtype, each for one foreach kernel."""
        there = [grad for grad in self.grads if grad is not None and grad.numel()]
        if there:
            yield from (group for (group,), _ in groups_for_foreach([there]).values())


class MicroBatch(NamedTuple):
    """The micro-batch and the rank that a gradient at "local" is of.

    Attributes:
        step: how many steps of the optimizer there were before.
        number: how many gradients of this parameter there were before in this step.
        position: the place of this rank among the ranks.
    """

    step: int = 0
    number: int = 0
    position: int = 0


class Rule:
    """A rewrite of gradients; frozen, with its state in the attachment. See [Note: what a rule may do].

    Attributes:
        rewrites: whether it changes gradients; a later rule then measures them anew.
        skips: whether it may leave a step out.
        can_be_local: whether it can be applied at "local", to one gradient of one rank.
        by_parameter: the names of the tensors in its state whose last dimension is that of its parameters. They are
            saved with the names of the parameters, and restored in whatever order these are then.
        needs_each: whether it looks at the measured numbers of single parameters. If not, only their sum over all of
            its parameters is right, which is measured faster.
    """

    rewrites: ClassVar[bool] = True
    skips: ClassVar[bool] = False
    can_be_local: ClassVar[bool] = False
    by_parameter: ClassVar[frozenset[str]] = frozenset()
    needs_each: ClassVar[bool] = True

    def measures(self) -> tuple[Measure, ...]:
        """The measures whose numbers it needs, merged over all ranks, before it can rewrite gradients."""
        return ()

    def forward_needs(self) -> ForwardNeeds:
        """What it needs of forwards."""
        return ForwardNeeds()

    def scope(self, shards: Sequence[Shard]) -> list[int]:
        """The parameters that it is for, as indices into ``shards``."""
        return list(range(len(shards)))

    def label(self) -> str:
        """The text that tells its numbers in the log from those of another rule; empty if it is for all parameters."""
        return ""

    def logs(self) -> frozenset[str]:
        """The names of the numbers that it logs."""
        return frozenset()

    def check(self, shards: Sequence[Shard]) -> None:
        """Raise UsageError when it cannot be right on these parameters."""

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        """The state before the first step; its tensors are on ``device``."""
        return {}

    def rewrite(self, work: Work) -> None:
        """Change the gradients of ``work`` in place; called once in every step, on every rank."""
        raise NotImplementedError

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The new tensor that takes the place of this rank's own gradient of one micro-batch.

        Raises:
            UsageError: when the rule needs more than that gradient; :meth:`local_error` says why.
        """
        raise UsageError(self.local_error())

    def local_error(self) -> str:
        """The reason why it cannot be applied at "local"; empty when it can."""
        if self.can_be_local:
            return ""
        return (
            f"{self!r} depends on all gradients, which no rank has before the reduction; at='local' takes rules for "
            "one gradient at a time: ClipValue, ClipNorm(by='parameter'), Scale, Sanitize or a function"
        )

    def takes_one(self, has_collectives: bool) -> bool:
        """Whether it needs nothing but one gradient, and with ``has_collectives`` nothing of other ranks either."""
        return not self.local_error() and not (has_collectives and self.measures())


@dataclass(frozen=True)
class Function(Rule):
    """A function of a parameter's name and the local part of its gradient; made of any callable among the rules."""

    can_be_local: ClassVar[bool] = True
    function: Callable[[str, torch.Tensor], torch.Tensor]

    def rewrite(self, work: Work) -> None:
        for shard, grad in work.present():
            result = self._called(shard.name, grad)
            if result is not grad:
                grad.copy_(result)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        version = grad._version
        result = self._called(shard.name, grad)
        if grad._version != version:
            raise UsageError(
                f"rule {self.function!r} changed the local gradient of {shard.name!r} in place, and autograd may use "
                "the same tensor for other parameters: return a new one (grad.clamp(...) for grad.clamp_(...))"
            )
        return result

    def _called(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        result = self.function(name, grad)
        if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (grad.shape, grad.dtype):
            got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
            raise UsageError(
                f"rule {self.function!r} must return {grad.dtype} {tuple(grad.shape)} for {name!r}, got {got}"
            )
        return result


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


def check_whole(rule: Rule, shard: Shard, grad: torch.Tensor) -> None:
    """Raise UsageError unless ``grad`` is the gradient of the whole parameter, in this process.

    A rule for single elements can take a part of a gradient. A rule that measures the gradient, or has to know which
    elements it is given, cannot.
    """
    is_whole = shard.part is not None and shard.part.shape == grad.shape
    if not is_whole or hasattr(grad, "placements"):
        raise UsageError(
            f"{rule!r} at 'local' needs the whole gradient of {shard.name!r}, and a backward on this engine has a "
            f"{type(grad).__name__} of shape {tuple(grad.shape)}, a part of it; apply the rule at 'final'"
        )


def number(value: object) -> bool:
    """Whether ``value`` is a finite number; True and False are not numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_positive(rule: Rule, name: str) -> None:
    """Raise UsageError unless the argument ``name`` of ``rule`` is a positive, finite number."""
    value = getattr(rule, name)
    if not number(value) or value <= 0:
        raise UsageError(f"{type(rule).__name__}({name}={value!r}): a positive, finite number is needed")


def check_count(rule: Rule, name: str, least: int) -> None:
    """Raise UsageError unless the argument ``name`` of ``rule`` is an int of at least ``least``."""
    value = getattr(rule, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{type(rule).__name__}({name}={value!r}): an int of at least {least} is needed")


def named(shards: Iterable[Shard]) -> str:
    """The first few names, for an error message."""
    names = [shard.name for shard in shards]
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True)
class Only(Rule):
    """A rule for some parameters, or at another moment; made by :func:`only`."""

    patterns: tuple[Pattern, ...]
    rule: Rule
    at: Literal["final", "local"] = "final"

    @property
    def pattern(self) -> Pattern | tuple[Pattern, ...]:
        """The pattern or patterns that :func:`only` was given."""
        return self.patterns[0] if len(self.patterns) == 1 else self.patterns

    @property
    def rewrites(self) -> bool:  # type: ignore[override]
        return self.rule.rewrites

    @property
    def skips(self) -> bool:  # type: ignore[override]
        return self.rule.skips

    @property
    def by_parameter(self) -> frozenset[str]:  # type: ignore[override]
        return self.rule.by_parameter

    @property
    def needs_each(self) -> bool:  # type: ignore[override]
        return self.rule.needs_each

    def measures(self) -> tuple[Measure, ...]:
        return self.rule.measures()

    def forward_needs(self) -> ForwardNeeds:
        return self.rule.forward_needs()

    def scope(self, shards: Sequence[Shard]) -> list[int]:
        inner = self.rule.scope(shards)
        parameters = [(shard.name, shard.as_full_parameter()) for shard in shards]
        wanted = {name for name, _ in match(parameters, self.patterns, "parameter")}
        return [i for i in inner if shards[i].name in wanted]

    def label(self) -> str:
        shown = ",".join(p if isinstance(p, str) else getattr(p, "__name__", repr(p)) for p in self.patterns)
        return "&".join(part for part in (shown, self.rule.label()) if part)

    def logs(self) -> frozenset[str]:
        return self.rule.logs()

    def check(self, shards: Sequence[Shard]) -> None:
        self.rule.check(shards)

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        return self.rule.start(shards, device)

    def rewrite(self, work: Work) -> None:
        self.rule.rewrite(work)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.rule.rewrite_local(shard, grad, batch)

    def local_error(self) -> str:
        return self.rule.local_error()


@register("rule", made=Only)
def only(
    pattern: Pattern | Iterable[Pattern],
    rule: Rule | Callable[[str, torch.Tensor], torch.Tensor],
    at: Literal["final", "local"] = "final",
) -> Rule:
    """``rule`` for the parameters that match; it measures only these.

    Args:
        pattern: one or several of: a glob over the parameter's name (``*`` crosses dots), a type, a predicate of
            name and parameter.
        rule: any rule, or a function of name and gradient.
        at: "final", or "local": on this rank's own gradient of every micro-batch, before it is accumulated or
            reduced. Rules at "local" come before all others, and take one gradient at a time.

    Raises:
        UsageError: when ``rule`` is neither, or cannot be applied at "local".
        MatchError: from :func:`~disthooks.gradients`, when a pattern matches no parameter.

    >>> from disthooks import ClipValue
    >>> only("*.bias", ClipValue(0.1)).label()
    '*.bias'
    """
    patterns: Any = as_patterns(pattern)
    if at not in ("final", "local"):
        raise UsageError(f"only(at={at!r}): 'final' (what the optimizer uses) or 'local' (before the reduction)")
    made = as_rule(rule)
    if at == "local" and made.local_error():
        raise UsageError(f"only(at='local'): {made.local_error()}")
    if isinstance(made, Only) and made.at != at:
        raise UsageError(f"only(at={at!r}) around only(at={made.at!r}): give both the same moment")
    return Only(patterns, made, at)
