"""``NewGradients``: whether backward has added to the gradients of an optimizer since a moment."""

# [Note: the gradients that a step was begun with]
# A loop may clip, or call `begin_step`, before its last backward: then rules have run on gradients that are not those
# of the step. Only backward tells that: a loop may change gradients in place, or put others in their place, to clip
# them, and a gradient that is added lies in the same tensor. So a post-accumulate hook on each parameter counts the
# backwards that reach it. The hooks on the first and the last parameter are always there; the others come when a step
# is first begun early, or if several optimizers step together, and stay.
# A hook is not called where an engine puts the gradient there itself. FSDP1 calls none for the user's parameters, and
# under DDP another rank's backward may have reached a parameter that this rank's has not. There the engine calls `see`
# in each backward, on every rank alike (`Engine.watch_backward`).
# A loop that computes gradients by `torch.autograd.grad` calls no hook either. So a gradient that another tensor has
# replaced is a new one, if any backward has run in this process since.
# A replayed CUDA graph calls no hook and replaces no tensor: there nothing tells.

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from disthooks._tensors import needing_gradients
from disthooks._torch import backward_id, backwards_so_far


class GradientMark(NamedTuple):
    """The gradients of an optimizer at one moment.

    Attributes:
        backwards: how many backwards had reached the optimizer's parameters.
        in_process: the number of the last backward of this process.
        first: the first gradient that is there; torch's weak reference, because the tensor that Python's weak reference
            returns may be freed while it is used. None if there is none.
        is_trained: whether any parameter needed gradients.
    """

    backwards: int
    in_process: int
    first: TensorWeakRef | None
    is_trained: bool


class NewGradients:
    """Counts the backwards that reach the parameters of an optimizer.

    See [Note: the gradients that a step was begun with].

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> new = NewGradients(torch.optim.SGD([weight]))
    >>> weight.sum().backward()
    >>> mark = new.mark()
    >>> _ = weight.grad.mul_(0.5)
    >>> new.is_same(mark)
    True
    >>> weight.sum().backward()
    >>> new.is_same(mark)
    False

    Attributes:
        backwards: how many there were.
    """

    def __init__(self, optimizer: Any) -> None:
        self.backwards = 0
        self._last = -1  # the number of the backward that was seen last
        self._optimizer = weakref.ref(optimizer)
        self._hooks: dict[int, Any] = {}
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        for parameter in (*trained[:1], *trained[-1:]):
            self._watch(parameter)

    def see(self, parameter: torch.Tensor | None = None) -> None:
        """Note that the backward that runs now adds to the gradients."""
        now = backward_id()
        if now > self._last:  # a backward inside of a backward has a larger number than the one around it
            self._last = now
            self.backwards += 1

    def watch_all(self) -> None:
        """Put a hook on every parameter, not only on the first and the last one."""
        for parameter in self._parameters():
            self._watch(parameter)

    def mark(self) -> GradientMark:
        self.watch_all()
        parameters = list(self._parameters())
        first = next((p.grad for p in parameters if p.grad is not None), None)
        is_trained = any(parameter.requires_grad for parameter in parameters)
        return GradientMark(
            self.backwards, backwards_so_far(), None if first is None else TensorWeakRef(first), is_trained
        )

    def is_same(self, mark: GradientMark) -> bool:
        """Whether the gradients are those of ``mark``; a loop may have changed them since, to clip them."""
        if self.backwards != mark.backwards:
            return False
        now = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        if mark.first is None or not now:
            return mark.first is None and not now
        first = mark.first()
        return any(grad is first for grad in now) or backwards_so_far() == mark.in_process

    def remove(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _parameters(self) -> Iterator[torch.Tensor]:
        optimizer = self._optimizer()
        groups = () if optimizer is None else optimizer.param_groups
        return (parameter for group in groups for parameter in group["params"])

    def _watch(self, parameter: Any) -> None:
        if id(parameter) not in self._hooks:
            with needing_gradients(parameter) as is_able:
                if is_able:
                    self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self.see)
