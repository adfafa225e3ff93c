"""What ``explain`` predicts of a step on the CPU beside what :mod:`tests.support.oracle` measures of a real one."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import disthooks as dh
from disthooks.predict.explanation import Explanation
from tests.support import oracle
from tests.support.oracle import MakeContext, MakeOptimizer, Measured


@dataclasses.dataclass(frozen=True)
class Beside:
    """What ``explain`` says of a step, and what the real step saved and held."""

    predicted: Explanation
    measured: Measured

    def wrong(self) -> dict[str, tuple[int, int]]:
        """The modules whose saved bytes differ: predicted and measured bytes by name, "inputs" for the inputs'."""
        predicted, of_inputs = saved(self.predicted)
        names = dict.fromkeys([*predicted, *self.measured.by_module])
        pairs = {name: (predicted[name], self.measured.by_module.get(name, 0)) for name in names}
        pairs["inputs"] = of_inputs, self.measured.saved_inputs
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def peak_off(self) -> int:
        """Bytes by which the predicted peak is above the measured one."""
        return self.predicted.peak_bytes - self.measured.peak_bytes


def saved(predicted: Explanation) -> tuple[collections.Counter[str], int]:
    """The predicted bytes that each module saves in its own forward, without the inputs, and those of the inputs."""
    record = predicted.record
    own: collections.Counter[str] = collections.Counter()
    of_inputs = 0
    for each in record.counted():
        nbytes = record.allocations[each.allocation].nbytes
        if each.kind == "input":
            of_inputs += nbytes
        else:
            own[record.modules[each.module].name] += nbytes
    return own, of_inputs


def beside(
    build: Any, autocast: MakeContext | None = None, optimizer: MakeOptimizer | None = None, peaks: bool = True
) -> Beside:
    """Predict a step of what ``build`` builds, and run it.

    ``build`` is called once in the fake run and once for real. With ``autocast``, the context of the real forward, the
    prediction takes autocast to bfloat16. The optimizer's state is there from the beginning, as in every step but the
    first.
    """
    dtype = torch.bfloat16 if autocast is not None else None
    predicted = dh.explain(build, device="cpu", autocast=dtype, optimizer=optimizer, loss=oracle.loss_of)
    model, inputs = build()
    oracle.dry_run(model, inputs)
    stepped = None if optimizer is None else functools.partial(_stepped, optimizer)
    return Beside(predicted, oracle.measure(model, inputs, autocast, stepped, peaks=peaks))


def _stepped(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that has its state."""
    parameters = list(parameters)
    made = make(parameters)
    for each in parameters:
        each.grad = torch.zeros_like(each)
    made.step()
    made.zero_grad()
    return made
