"""Having an optimizer leave all, or some, of its parameters as they are for one step, its own state included."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# What is to be put back when the step is over, by optimizer.
_after: WeakKeyDictionary[Any, Callable[[bool], None]] = WeakKeyDictionary()


def skip_if(decision: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Where ``decision`` is true, have the step that begins now change nothing.

    A fused optimizer takes the decision as a tensor, as it does from a ``GradScaler``, and nothing waits for the
    device. Any other one is asked what a ``GradScaler`` asks, which waits for it, and is shown no gradients.

    A fused SGD that has no momentum yet is not fused in this: told to leave a step out, it would keep the memory that
    it took for its buffer as it found it, and go on with what was there (torch 2.13).

    Args:
        decision: a bool tensor without dimensions.
        optimizer: the one that steps, called from its pre-hook.
    """
    if _takes_tensors(optimizer) and not _lacks_momentum(optimizer):
        _tell(decision, optimizer)
    elif bool(decision):
        withhold(optimizer, [p for group in optimizer.param_groups for p in group["params"]])


def withhold(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Take the gradients of ``parameters`` away for the step that begins now; they are back when it is over.

    Every optimizer of torch leaves a parameter without gradient as it is: no momentum, no weight decay.
    """
    taken = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in taken:
        parameter.grad = None

    def back(restore: bool) -> None:
        for parameter, grad in taken:
            if restore and parameter.grad is None:
                parameter.grad = grad

    _when_over(optimizer, back)


def _takes_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of it is fused: one group that is makes torch say so of the optimizer, and the others raise then."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return fused and all(group.get("fused", True) for group in optimizer.param_groups)


def _lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _tell(decision: torch.Tensor, optimizer: Any) -> None:
    theirs: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    ours = decision.to(torch.float32)
    if theirs is not None:  # a GradScaler's, which takes it away itself
        optimizer.found_inf = theirs + ours.to(theirs.device, non_blocking=True)
        return
    optimizer.found_inf = ours
    alive = weakref.ref(optimizer)  # what is kept by optimizer must not keep it

    def take_off(restore: bool) -> None:
        if (found := alive()) is not None:
            found.__dict__.pop("found_inf", None)

    _when_over(optimizer, take_off)


def _when_over(optimizer: Any, undo: Callable[[bool], None]) -> None:
    """Have ``undo`` called when this step is over; before the next one, if this one raises."""
    before = _after.pop(optimizer, None)

    def both(restore: bool) -> None:
        undo(restore)
        if before is not None:
            before(restore)

    _after[optimizer] = both


def over(optimizer: Any, restore: bool = True) -> None:
    """End what was begun for a step of ``optimizer``.

    Args:
        optimizer: the one that stepped.
        restore: whether gradients that were taken away come back; not those of an earlier step that raised.
    """
    undo = _after.pop(optimizer, None)
    if undo is not None:
        undo(restore)
