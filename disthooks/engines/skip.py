"""Having an optimizer leave all, or some, of its parameters as they are for one step, its own state included."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# [Note: what leaves an optimizer as it is]
# A step that is to be left out is not made: the function that makes it is not called (see optimizer_step.py). To
# hide the gradients and make the step all the same is not enough. Of 129 optimizers (torch, pytorch-optimizer,
# schedulefree, prodigyopt, muon) 103 then change state of their own (group["step"], schedulefree's k), four raise, and
# one takes a missing gradient for zeros and moves the weights.
# Whether to call an optimizer must be known on the host. The fused optimizers of torch are told on the device, as by a
# GradScaler: their kernels leave weights and states as they are. That is so only once the states exist: the first step
# makes them, whatever it is told.
# Single parameters that are to rest (Freeze) are taken out of the parameter groups for the step, so the optimizer has
# nothing to fill in for; their gradients are taken away too, for an optimizer that works on lists of its own.

# The optimizers whose kernels leave everything as it is when they are told to.
FUSED: tuple[type[Any], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def should_skip(decision: torch.Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that begins now must not be made.

    One of torch's fused optimizers takes the decision as a tensor, as it does from a ``GradScaler``, and nothing waits
    for the device: its step is made, and changes nothing. For any other one the host reads the decision. See
    [Note: what leaves an optimizer as it is].

    Args:
        decision: a bool tensor without dimensions.
        optimizer: the one that steps, called from its pre-hook.
    """
    if _takes_tensors(optimizer) and not _lacks_state(optimizer):
        _tell(decision, optimizer)
        return False
    return bool(decision)


def exclude_from_step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Have the step that comes next leave ``parameters`` as they are; until it is over they have no gradients."""
    resting = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in resting:
        parameter.grad = None
    _undone(optimizer).resting += resting


def remove_excluded(optimizer: torch.optim.Optimizer) -> None:
    """Take what was withheld out of the parameter groups; :func:`end_step` puts it back."""
    undone = _after.get(optimizer)
    if undone is None or not undone.resting:
        return
    ids = {id(parameter) for parameter, _ in undone.resting}
    for group in optimizer.param_groups:
        if not ids.isdisjoint(map(id, group["params"])):
            undone.groups.append((group, group["params"]))
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]


def end_step(optimizer: Any, restore: bool = True) -> None:
    """End what was begun for a step of ``optimizer``.

    Args:
        optimizer: the one that stepped.
        restore: whether gradients that were taken away come back; not those of an earlier step that was never made.
    """
    undone = _after.pop(optimizer, None)
    if undone is not None:
        undone.undo(restore)


class Witness:
    """Whether an optimizer has changed anything before it called the closure of its step.

    Versions do not tell of what is written through ``.data``: the smallest parameter of each group is compared.
    """

    def __init__(self, optimizer: Any) -> None:
        self._before = list(self._seen(optimizer))
        smallest = (min(group["params"], key=torch.Tensor.numel, default=None) for group in optimizer.param_groups)
        self._copies = [(p, p.detach().clone()) for p in smallest if p is not None]

    def untouched(self, optimizer: Any) -> bool:
        """Whether all is as it was; it waits for the device."""
        return list(self._seen(optimizer)) == self._before and all(_same(p, c) for p, c in self._copies)

    @staticmethod
    def _seen(optimizer: Any) -> Iterator[object]:
        for group in optimizer.param_groups:
            yield from ((name, _mark(value)) for name, value in group.items() if name != "params")
            yield from (parameter._version for parameter in group["params"])
        for state in list(optimizer.state.values()):
            if isinstance(state, dict):
                yield from ((name, _mark(value)) for name, value in state.items())


class _Undone:
    """The changes that are undone when a step is over."""

    def __init__(self) -> None:
        self.resting: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self.groups: list[tuple[dict[str, Any], list[Any]]] = []
        self.told: Callable[[], None] | None = None

    def undo(self, restore: bool) -> None:
        for group, parameters in reversed(self.groups):
            group["params"] = parameters
        for parameter, grad in self.resting:
            if restore and grad is not None and parameter.grad is None:
                parameter.grad = grad
        if self.told is not None:
            self.told()


_after: WeakKeyDictionary[Any, _Undone] = WeakKeyDictionary()


def _undone(optimizer: Any) -> _Undone:
    return _after.setdefault(optimizer, _Undone())


def _same(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether all elements are equal; a NaN is equal to a NaN in the same place."""
    with torch.no_grad():
        return bool(((parameter == copy) | ((parameter != parameter) & (copy != copy))).all())


def _mark(value: object) -> object:
    return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)


def _takes_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of it is fused: one group that is makes torch say so of the optimizer, and the others raise then."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    known = any(type(optimizer).step is kind.step for kind in FUSED)  # not a class with a step of its own around it
    return known and fused and all(group.get("fused", True) for group in optimizer.param_groups)


def _lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step would make a state, which is then there after a step that was left out.

    A fused SGD keeps the memory that it took for its buffer as it found it, too, and goes on with what was there
    (torch 2.13).
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
    if theirs is not None:  # a GradScaler's, which takes it away itself
        # One at most: the kernels make no update where the number is 1, and make one where it is 2.
        optimizer.found_inf = (theirs + ours.to(theirs.device, non_blocking=True)).clamp(max=1.0)
        return
    optimizer.found_inf = ours
    alive = weakref.ref(optimizer)  # what is kept by optimizer must not keep it

    def take_off() -> None:
        if (found := alive()) is not None:
            found.__dict__.pop("found_inf", None)

    _undone(optimizer).told = take_off
