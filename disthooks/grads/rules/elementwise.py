"""Rules for single elements, which measure nothing and cost no collective: ``Scale`` and ``Sanitize``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.rules.base import MicroBatch, Rule, Work, number


@register("rule")
@dataclass(frozen=True)
class Scale(Rule):
    """Multiply every element by ``factor``. It measures nothing and costs no collective; NaN stays NaN.

    Args:
        factor: any finite number.

    Raises:
        UsageError: when ``factor`` is not a finite number.

    >>> from disthooks import gradients, only
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, rules=[only("bias", Scale(0.5))]):
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     optimizer.step()
    >>> model.weight.grad, model.bias.grad
    (tensor([[1.]]), tensor([0.5000]))
    """

    can_be_local: ClassVar[bool] = True
    factor: float

    def __post_init__(self) -> None:
        if not number(self.factor):
            raise UsageError(f"Scale({self.factor!r}): a finite number is needed")

    def rewrite(self, work: Work) -> None:
        for group in work.together():
            torch._foreach_mul_(group, self.factor)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return grad * self.factor


@register("rule")
@dataclass(frozen=True)
class Sanitize(Rule):
    """Replace NaN and infinite elements by numbers, as ``torch.nan_to_num``; it costs no collective.

    It measures nothing. It hides errors of the training: log :class:`~disthooks.stats.NonFinite` beside it, or leave
    the step out with :class:`~disthooks.SkipNonFinite` instead.

    Args:
        nan: the number in place of NaN.
        posinf: the number in place of infinity; None for the largest number of the gradient's dtype. If gradients are
            multiplied by a loss scale (DeepSpeed's fp16; ``scaler`` at "local"), rules see them divided by it, and the
            largest number would become infinite again: give a smaller number then.
        neginf: the number in place of minus infinity; None for the lowest number of the dtype.

    Raises:
        UsageError: when an argument is not a finite number.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model.weight.grad = torch.tensor([[1.0, float("nan"), float("inf")]])
    >>> with gradients(model, optimizer, rules=[Sanitize(posinf=10.0)]):
    ...     optimizer.step()
    >>> model.weight.grad
    tensor([[ 1.,  0., 10.]])
    """

    can_be_local: ClassVar[bool] = True
    nan: float = 0.0
    posinf: float | None = None
    neginf: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("nan", self.nan), ("posinf", self.posinf), ("neginf", self.neginf)):
            if not number(value) and (name == "nan" or value is not None):
                raise UsageError(f"Sanitize({name}={value!r}): a finite number is needed")

    def rewrite(self, work: Work) -> None:
        for _, grad in work.present():  # torch has no foreach kernel for nan_to_num
            grad.nan_to_num_(self.nan, self.posinf, self.neginf)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return grad.nan_to_num(self.nan, self.posinf, self.neginf)
