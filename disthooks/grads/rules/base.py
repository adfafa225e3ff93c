"""What every rule is: what it must know over all ranks, and a rewrite of this rank's part of the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.stats.base import Measure

State = dict[str, torch.Tensor]


@dataclass(eq=False)
class Work:
    """What a rule is given in one step, and where it leaves what it decided.

    Attributes:
        shards: the parameters it is for.
        grads: for each of them the local part of its gradient, to be changed in place; None where there is none.
        values: for each of the rule's measures its numbers, merged over the ranks, on the device.
        state: what the rule keeps from step to step, the same on all ranks; tensors to be changed in place.
        step: how many steps there were before this one.
        fresh: whether no rule before it rewrote any of these gradients.
        log: numbers to be logged in this step, by name; tensors without dimensions, on the device.
        skips: whether the optimizer is to leave everything as it is in this step; bools without dimensions.
        excluded: parameters that the optimizer is not to move in this step.
        deferred_errors: numbers that may make the next step raise, and what is done with each on the host.
    """

    shards: Sequence[Shard]
    grads: Sequence[torch.Tensor | None]
    values: Sequence[torch.Tensor]
    state: State
    step: int = 0
    fresh: bool = True
    log: dict[str, torch.Tensor] = field(default_factory=dict)
    skips: list[torch.Tensor] = field(default_factory=list)
    excluded: list[Shard] = field(default_factory=list)
    deferred_errors: list[tuple[torch.Tensor, Callable[[float], None]]] = field(default_factory=list)

    def present(self) -> Iterator[tuple[Shard, torch.Tensor]]:
        """The parameters that have elements of a gradient here."""
        for shard, grad in zip(self.shards, self.grads, strict=True):
            if grad is not None and grad.numel():
                yield shard, grad

    def together(self) -> Iterator[list[torch.Tensor]]:
        """The gradients that are here, in groups that one foreach kernel can take: of one device and one dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for _, grad in self.present():
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
        yield from groups.values()


class MicroBatch(NamedTuple):
    """Which backward on which rank a local gradient is of.

    Attributes:
        step: how many steps of the optimizer there were before.
        number: how many gradients of this parameter there were before in this step.
        position: the place of this rank among the ranks.
    """

    step: int = 0
    number: int = 0
    position: int = 0


class Rule:
    """A rewrite of gradients; frozen, with its state in the attachment.

    A rank may hold any part of a gradient, so rewriting is elementwise, or depends on nothing but measured values,
    the state and which elements they are (:class:`~disthooks.engines.base.Part`). It never waits for the device.

    Attributes:
        rewrites: whether it changes gradients; what a later rule measures must then be measured anew.
        excludes: whether it may keep single parameters from the optimizer.
    """

    rewrites: ClassVar[bool] = True
    excludes: ClassVar[bool] = False

    def measures(self) -> tuple[Measure, ...]:
        """What must be known over all ranks before gradients can be rewritten."""
        return ()

    def scope(self, shards: Sequence[Shard]) -> list[int]:
        """Which of the parameters it is for."""
        return list(range(len(shards)))

    def label(self) -> str:
        """What tells its numbers in the log from those of another rule of its kind; empty for all parameters."""
        return ""

    def logs(self) -> frozenset[str]:
        """The names of what it has for the log."""
        return frozenset()

    def check(self, shards: Sequence[Shard]) -> None:
        """Raise UsageError when it cannot be right on these parameters."""

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        """The state before the first step."""
        return {}

    def rewrite(self, work: Work) -> None:
        """Change the gradients of ``work`` in place; called once in every step, on every rank."""
        raise NotImplementedError

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """What takes the place of this rank's own whole gradient of one micro-batch; a new tensor.

        Raises:
            UsageError: when the rule needs more than that gradient; :meth:`local_error` says why.
        """
        raise UsageError(self.local_error())

    def local_error(self) -> str:
        """Why it cannot be applied at "local"; empty when it can."""
        return (
            f"{self!r} depends on all gradients, which no rank has before the reduction; at='local' takes rules for "
            "one gradient at a time: ClipValue, ClipNorm(by='parameter'), Scale, Sanitize, Noise or a function"
        )


@dataclass(frozen=True)
class Function(Rule):
    """A function of a parameter's name and the local part of its gradient; made of any callable among the rules."""

    function: Callable[[str, torch.Tensor], torch.Tensor]

    def rewrite(self, work: Work) -> None:
        """Call the function for each gradient, and put what it returns in its place."""
        for shard, grad in work.present():
            result = self._called(shard.name, grad)
            if result is not grad:
                grad.copy_(result)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """What the function returns."""
        version = grad._version
        result = self._called(shard.name, grad)
        if grad._version != version:
            raise UsageError(
                f"rule {self.function!r} changed the local gradient of {shard.name!r} in place, and autograd may use "
                "the same tensor for other parameters: return a new one (grad.clamp(...) for grad.clamp_(...))"
            )
        return result

    def local_error(self) -> str:
        """It can."""
        return ""

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
    """Raise UsageError unless ``grad`` is the gradient of all of the parameter, in this process.

    A rule that knows nothing but its elements can take a part; one that measures a gradient, or must know which
    elements it has, cannot.
    """
    known = shard.part is not None and shard.part.shape == grad.shape
    if not known or hasattr(grad, "placements"):
        raise UsageError(
            f"{rule!r} at 'local' needs the whole gradient of {shard.name!r}, and a backward on this engine has a "
            f"{type(grad).__name__} of shape {tuple(grad.shape)}, a part of it; apply the rule at 'final'"
        )


def number(value: object) -> bool:
    """Whether ``value`` is a finite number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def named(shards: Iterable[Shard]) -> str:
    """The first few names, for an error message."""
    names = [shard.name for shard in shards]
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
