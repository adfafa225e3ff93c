"""Skipping: an optimizer leaves all, or some, of its parameters as they are for one step, its own state included.

``optimizer_step`` asks :func:`should_skip` before a step, calls :func:`remove_excluded` when the step begins, and
:func:`end_step` when it is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# [Note: what leaves an optimizer as it is]
# A step that is skipped is not made: the function that makes it is not called (see [Note: the step itself] in
# optimizer_step.py). It is not enough to hide the gradients and make the step all the same. Of 129 optimizers (torch,
# pytorch-optimizer, schedulefree, prodigyopt, muon) 103 then change state of their own (group["step"], schedulefree's
# k), four raise, and one takes a missing gradient for zeros and moves the weights.
# Whether to call the function must be known on the host, which waits for the device to decide. The fused optimizers of
# torch need no such wait: they take the decision as a tensor (`found_inf`, as from a GradScaler), and their kernels
# leave weights and states as they are. That holds only once the states exist, because the first step makes them,
# whatever the tensor says.
# Single parameters that are excluded from a step (Freeze) are taken out of the parameter groups while it is made, so
# that the optimizer has no parameter without a gradient to fill in for. Their gradients are taken away too, for an
# optimizer that works on lists of its own.
#
# [Note: the witness of an optimizer]
# A step with a closure can be skipped only if the optimizer has changed nothing before it called the closure. Most
# changes count up a tensor's version. What is written through `.data` does not, so the smallest parameter of each group
# is compared with a copy: an optimizer that moves weights before its closure moves those of each group.

# The optimizers whose fused kernels leave everything as it is if `found_inf` says so.
FUSED: tuple[type[Any], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def should_skip(decision: torch.Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that begins now must not be made; see [Note: what leaves an optimizer as it is].

    For one of torch's fused optimizers this is always False: it is told the decision as a tensor, its step is made and
    changes nothing, and nothing waits for the device. For any other optimizer the host reads the decision.

    Args:
        decision: a bool tensor without dimensions.
        optimizer: the optimizer that steps; this is called from its pre-hook.
    """
    if _is_fused(optimizer) and not _lacks_state(optimizer):
        _tell(decision, optimizer)
        return False
    return bool(decision)


def exclude_from_step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Make the next step of ``optimizer`` leave ``parameters`` as they are; until it is over they have no gradients."""
    excluded = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in excluded:
        parameter.grad = None
    _changes_of(optimizer).excluded += excluded


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
    """Undo what was changed in ``optimizer`` for one step.

    Args:
        optimizer: the optimizer that stepped.
        restore: whether gradients that were taken away come back. They do not if an earlier step was never made.
    """
    changes = _changes.pop(optimizer, None)
    if changes is not None:
        changes.undo(restore)


class Witness:
    """Sees whether an optimizer changes anything before it calls the closure of its step.

    See [Note: the witness of an optimizer].
    """

    def __init__(self, optimizer: Any) -> None:
        self._before = list(self._marks(optimizer))
        smallest = (min(group["params"], key=torch.Tensor.numel, default=None) for group in optimizer.param_groups)
        self._copies = [(p, p.detach().clone()) for p in smallest if p is not None]

    def is_untouched(self, optimizer: Any) -> bool:
        """Whether everything is as it was; this waits for the device."""
        return list(self._marks(optimizer)) == self._before and all(_same(p, c) for p, c in self._copies)

    @staticmethod
    def _marks(optimizer: Any) -> Iterator[object]:
        for group in optimizer.param_groups:
            yield from ((name, _mark(value)) for name, value in group.items() if name != "params")
            yield from (parameter._version for parameter in group["params"])
        for state in list(optimizer.state.values()):
            if isinstance(state, dict):
                yield from ((name, _mark(value)) for name, value in state.items())


class _Changes:
    """What was changed in an optimizer for one step, and is undone when the step is over.

    Attributes:
        excluded: parameters that have no gradient in this step, with the gradients that were taken away.
        groups: parameter groups, with the lists of parameters that they had.
        take_off_decision: takes ``found_inf`` off the optimizer, if it was put on.
    """

    def __init__(self) -> None:
        self.excluded: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self.groups: list[tuple[dict[str, Any], list[Any]]] = []
        self.take_off_decision: Callable[[], None] | None = None

    def undo(self, restore: bool) -> None:
        for group, parameters in reversed(self.groups):
            group["params"] = parameters
        for parameter, grad in self.excluded:
            if restore and grad is not None and parameter.grad is None:
                parameter.grad = grad
        if self.take_off_decision is not None:
            self.take_off_decision()


_changes: WeakKeyDictionary[Any, _Changes] = WeakKeyDictionary()


def _changes_of(optimizer: Any) -> _Changes:
    return _changes.setdefault(optimizer, _Changes())


def _same(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether all elements are equal; a NaN equals a NaN in the same place."""
    with torch.no_grad():
        return bool(((parameter == copy) | ((parameter != parameter) & (copy != copy))).all())


def _mark(value: object) -> object:
    return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every group is fused. torch marks the optimizer if one group is, and the others raise when told."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    # A subclass with a step of its own around torch's may do more than the kernels.
    known = any(type(optimizer).step is kind.step for kind in FUSED)
    return known and fused and all(group.get("fused", True) for group in optimizer.param_groups)


def _lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step would make a state, which would then exist after a step that was skipped.

    A fused SGD that is told to skip also leaves the memory for its momentum buffer uninitialised, and goes on with
    what was in it (torch 2.13).
    """
    return any(
        (group["momentum"] and optimizer.state.get(parameter, {}).get("momentum_buffer") is None)
        if isinstance(optimizer, torch.optim.SGD)
        else isinstance(optimizer, torch.optim.Adam) and not optimizer.state.get(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _tell(decision: torch.Tensor, optimizer: Any) -> None:
    theirs: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    ours = decision.to(torch.float32)
    if theirs is not None:  # it is a GradScaler's, which takes it off itself
        # At most one, because the kernels skip the update if the number is 1, and make it if the number is 2.
        optimizer.found_inf = (theirs + ours.to(theirs.device, non_blocking=True)).clamp(max=1.0)
        return
    optimizer.found_inf = ours
    alive = weakref.ref(optimizer)  # _changes has the optimizer as a weak key, so its value must not keep it

    def take_off() -> None:
        if (found := alive()) is not None:
            found.__dict__.pop("found_inf", None)

    _changes_of(optimizer).take_off_decision = take_off
