"""Skipping: for one step, an optimizer leaves all or some of its parameters as they are, and its own state too.

``optimizer_step`` asks :func:`should_skip` before a step, calls :func:`remove_excluded` when the step begins, and
calls :func:`end_step` when the step is over.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

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
# Single parameters that are excluded from a step (Freeze) are taken out of the parameter groups while the step is made,
# because some optimizers treat a parameter without a gradient as one with a gradient of zeros. Their gradients are
# taken away too, because some optimizers have their own lists of parameters.
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
        _changes.setdefault(optimizer, _Changes()).has_decision = True
    else:  # it is a GradScaler's, which takes it off itself
        # At most 1, because the kernels skip the update if the number is 1, and make it if the number is 2.
        told.found_inf = (theirs + ours.to(theirs.device, non_blocking=True)).clamp(max=1.0)
    return False


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


def exclude_from_step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Make the next step of ``optimizer`` leave ``parameters`` as they are.

    Their gradients are taken away until that step is over.
    """
    excluded = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in excluded:
        parameter.grad = None
    _changes.setdefault(optimizer, _Changes()).excluded += excluded


def remove_excluded(optimizer: torch.optim.Optimizer) -> None:
    """Take excluded parameters out of the parameter groups; :func:`end_step` puts them back."""
    changes = _changes.get(optimizer)
    if changes is None or not changes.excluded:
        return
    ids = {id(parameter) for parameter, _ in changes.excluded}
    for group in optimizer.param_groups:
        if not ids.isdisjoint(map(id, group["params"])):
            changes.groups.append((group, group["params"]))
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]


def end_step(optimizer: Any, restore: bool = True) -> None:
    changes = _changes.pop(optimizer, None)
    if changes is None:
        return
    for group, parameters in reversed(changes.groups):
        group["params"] = parameters
    for parameter, grad in changes.excluded:
        if restore and grad is not None and parameter.grad is None:
            parameter.grad = grad
    if changes.has_decision:
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


@dataclass
class _Changes:
    """The changes that were made to an optimizer for one step; :func:`end_step` undoes them.

    Attributes:
        excluded: parameters that have no gradient in this step, with the gradients that were taken away.
        groups: parameter groups, with the lists of parameters that they had.
        has_decision: whether ``found_inf`` was put on the optimizer.
    """

    excluded: list[tuple[nn.Parameter, torch.Tensor | None]] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[Any]]] = field(default_factory=list)
    has_decision: bool = False


_changes: WeakKeyDictionary[Any, _Changes] = WeakKeyDictionary()


def _mark(value: object) -> object:
    return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)
