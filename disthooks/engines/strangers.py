"""Says when an optimizer that is not watched steps parameters that are."""

# [Note: another optimizer steps the parameters]
# A second stage of a training makes a new optimizer over the same parameters, or a loop calls the step of an optimizer
# inside the one that is watched (SAM). Then rules act on nothing, and nothing would say so. So torch's global hooks
# look at each step of an optimizer that is not watched. An optimizer may be made of others (SAM, Lookahead,
# ZeroRedundancyOptimizer): if the watched one is the outer one, its step is under way; if it is an inner one, it has
# stepped before the outer one has ended.

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from disthooks.engines.optimizer_step import OptimizerHooks, optimizers_stepping


class _Strangers:
    """Looks at the steps of all optimizers while a step is watched; see [Note: another optimizer steps the parameters].

    Attributes:
        entered: how many times a watched optimizer has stepped in this process.
    """

    def __init__(self) -> None:
        self.entered = 0
        self._watched: WeakSet[Any] = WeakSet()
        self._said: WeakSet[Any] = WeakSet()
        self._handles: list[Any] = []
        self._entered_before: dict[int, int] = {}  # by the optimizer that is stepping

    def watch(self, step: Any) -> None:
        self._watched.add(step)
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._begin),
                register_optimizer_step_post_hook(self._end),
            ]

    def forget(self, step: Any) -> None:
        self._watched.discard(step)
        if not self._watched:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._entered_before.clear()

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        hooks = OptimizerHooks.find(optimizer)
        if hooks is not None and hooks.steps:
            self.entered += 1
        else:
            self._entered_before[id(optimizer)] = self.entered

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before = self._entered_before.pop(id(optimizer), None)
        if before != self.entered or optimizers_stepping():  # a watched one stepped inside of it, or it inside of one
            return
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for step in list(self._watched):
            shared = [p for group in step.param_groups for p in group["params"] if id(p) in mine]
            if shared and step not in self._said:
                self._said.add(step)
                watched = " and ".join(type(one).__name__ for one in step.optimizers)
                warnings.warn(
                    f"{type(optimizer).__name__} has stepped {len(shared)} parameters that gradients() watches for "
                    f"another optimizer, {watched}: rules and statistics see the steps of {watched} alone, and act on "
                    f"nothing here. Call gradients(model, optimizer, ...) with this {type(optimizer).__name__}; if it "
                    "is inside another one, as in SAM, with the one whose step() the loop calls; or remove() the "
                    "attachment. This is said once",
                    stacklevel=4,
                )


strangers = _Strangers()
