"""Skipping: in one step an optimizer leaves its parameters and its own state as they are.

``optimizer_step`` asks :func:`should_skip` before a step, and calls :func:`end_step` when the step is over.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch

# [Note: a skipped step changes nothing]
# A step that is skipped is not made: the function that makes it is not called (see [Note: the step itself] in
# optimizer_step.py). It is not enough to hide the gradients and make the step all the same. Of 129 optimizers (torch,
# pytorch-optimizer, schedulefree, prodigyopt, muon) 103 then change state of their own (group["step"], schedulefree's
# k), four raise, and one takes a missing gradient for zeros and moves the weights.
# The host must know whether to call the function, so it waits until the device has decided. The fused optimizers of
# torch need no such wait: they take the decision as a tensor (`found_inf`, as from a GradScaler), and their kernels
# leave weights and states as they are. That holds only once the states exist, because the first step makes them,
# whatever the tensor says. An optimizer that makes the host wait in every step costs more than the rule itself, so
# this is said once for each class.
#
# [Note: the witness of an optimizer]
# A step with a closure can be skipped only if the optimizer has changed nothing before it called the closure. Most
# changes count up a tensor's version. A write through `.data` does not, so the smallest parameter of each group is also
# compared with a copy: an optimizer that moves weights before its closure moves those of each group.

# The fused kernels of these optimizers leave weights and states as they are if `found_inf` is 1.
FUSED: tuple[type[Any], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def should_skip(decision: torch.Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that begins now must not be made; see [Note: a skipped step changes nothing].

    For one of torch's fused optimizers this is False: the optimizer gets the decision as a tensor, its step is made
    and changes nothing, and nothing waits for the device. For any other optimizer the host reads the decision.
    """
    told: Any = optimizer
    is_fused = (
        # torch sets this mark if one group is fused, but the groups that are not raise when they find `found_inf`.
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused", True) for group in optimizer.param_groups)
        # A subclass with a step of its own around torch's may do more than the kernels.
        and any(type(optimizer).step is kind.step for kind in FUSED)
    )
    if not is_fused and not decision.is_cpu:
        _warn_of_wait(type(told).__name__, any(type(told).step is kind.step for kind in FUSED))
    if not is_fused or _lacks_state(optimizer):
        return bool(decision)
    ours = decision.to(torch.float32)
    theirs: torch.Tensor | None = getattr(told, "found_inf", None)
    if theirs is None:
        told.found_inf = ours
        _decided.add(optimizer)
    else:  # it is a GradScaler's, which takes it off itself
        # At most 1, because the kernels skip the update if the number is 1, and make it if the number is 2.
        told.found_inf = (theirs + ours.to(theirs.device, non_blocking=True)).clamp(max=1.0)
    return False


def tell_accelerate(decision: torch.Tensor) -> None:
    """Let accelerate's ``optimizer_step_was_skipped`` tell of the step that its wrapper makes now.

    The wrapper is found on the stack, as in [Note: looking up the stack] of _torch.py.
    """
    module: Any = sys.modules.get("accelerate.optimizer")
    code = None if module is None else module.AcceleratedOptimizer.step.__code__
    frame: FrameType | None = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return
    wrapper = frame.f_locals["self"]
    if wrapper.scaler is None:
        wrapper._is_overflow = (
            bool(decision) if decision.is_cpu else decision
        )  # it waits for the device when it is read
    elif decision.is_cpu and bool(decision):
        wrapper._accelerate_step_called = False  # from this the wrapper concludes that the step was skipped


@functools.cache
def _warn_of_wait(name: str, could_be_fused: bool) -> None:
    """Say once for each class that the host waits for the device in every step, and how to avoid it."""
    if could_be_fused:
        remedy = f"give {name} fused=True in each of its groups; then its kernels take the decision"
    else:
        remedy = "torch's Adam, AdamW, SGD and Adagrad take the decision on the device if they are given fused=True"
    warnings.warn(
        f"{name} cannot leave a step out by itself, so the host reads in every step whether to skip it, and "
        f"waits for the device each time: {remedy}. Or leave out the rule that skips steps (SkipNonFinite)",
        stacklevel=2,
    )


def _lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step would make a state, which would then exist after a step that was skipped.

    A fused SGD that skips its first step also leaves the memory of its momentum buffer uninitialised, and the next step
    uses what was in that memory (torch 2.13).
    """
    return any(
        (group["momentum"] and optimizer.state.get(parameter, {}).get("momentum_buffer") is None)
        if isinstance(optimizer, torch.optim.SGD)
        else isinstance(optimizer, torch.optim.Adam) and not optimizer.state.get(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def end_step(optimizer: Any) -> None:
    """Take the decision off the optimizer, if :func:`should_skip` has given it one."""
    if optimizer in _decided:
        _decided.discard(optimizer)
        optimizer.__dict__.pop("found_inf", None)


class Witness:
    """Tells whether an optimizer changed anything before it called the closure of its step.

    See [Note: the witness of an optimizer].
    """

    def __init__(self, optimizer: Any) -> None:
        self._before = list(self._marks(optimizer))
        smallest = (min(group["params"], key=torch.Tensor.numel, default=None) for group in optimizer.param_groups)
        self._copies = [(p, p.detach().clone()) for p in smallest if p is not None]

    def is_untouched(self, optimizer: Any) -> bool:
        """Whether everything is as it was; this waits for the device."""
        if list(self._marks(optimizer)) != self._before:
            return False
        with torch.no_grad():  # a NaN equals a NaN in the same place
            return all(bool(((p == c) | ((p != p) & (c != c))).all()) for p, c in self._copies)

    @staticmethod
    def _marks(optimizer: Any) -> Iterator[object]:
        for group in optimizer.param_groups:
            yield from ((name, _mark(value)) for name, value in group.items() if name != "params")
            yield from (parameter._version for parameter in group["params"])
        for state in list(optimizer.state.values()):
            if isinstance(state, dict):
                yield from ((name, _mark(value)) for name, value in state.items())


_decided: WeakSet[Any] = WeakSet()  # the optimizers that have a decision of ours


def _mark(value: object) -> object:
    return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)
