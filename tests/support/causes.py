"""Small models whose step is not finite, each for a cause of its own; the capture of each is replayed by its name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

Function = Callable[[torch.Tensor], torch.Tensor]
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32


class Cause(NamedTuple):
    """A cause: the function, its input, the operator that is to be named, and whether float64 is finite.

    ``node`` is the node of autograd, in backward; "" says that the forward is not finite.
    """

    function: Function
    value: float
    dtype: torch.dtype
    operator: str
    is_precision: bool
    node: str = ""


CAUSES: dict[str, Cause] = {
    "exp_in_half": Cause(lambda x: (20 * x).exp(), 1.0, HALF, "aten.exp", True),
    "log_of_zero": Cause(lambda x: x.log(), 0.0, SINGLE, "aten.log", False),
    "norm_of_zero": Cause(lambda x: x / x.square().sum(-1, keepdim=True).sqrt(), 0.0, SINGLE, "aten.div", False),
    "all_masked": Cause(lambda x: x * x.masked_fill(x > 0, -math.inf).softmax(-1), 1.0, SINGLE, "aten._softmax", False),
    "fourth_power": Cause(lambda x: x * x * x * x, 1e10, BF16, "aten.mul", True),
    "square_in_half": Cause(lambda x: x.square(), 300.0, HALF, "aten.pow", True),
    "inf_minus_inf": Cause(lambda x: x.exp() - x.exp(), 100.0, SINGLE, "aten.exp", True),
    "sqrt_of_negative": Cause(lambda x: x.sqrt(), -1.0, SINGLE, "aten.sqrt", False),
    "product_in_half": Cause(lambda x: x @ x.t(), 200.0, HALF, "aten.mm", True),
    "deviation_of_one": Cause(lambda x: x[:, :1].std(-1, keepdim=True) * x, 1.0, SINGLE, "aten.std", False),
    "acos_above_one": Cause(lambda x: x.acos(), 1.5, BF16, "aten.acos", False),
    "underflow": Cause(lambda x: (x * x).reciprocal(), 1e-4, HALF, "aten.reciprocal", True),
    "cast_to_half": Cause(lambda x: x.half().float(), 70_000.0, SINGLE, "aten._to_copy", True),
    "root_of_negative": Cause(lambda x: x**0.5, -2.0, SINGLE, "aten.pow", False),
    "mean_of_nothing": Cause(lambda x: x * x[:0].mean(), 1.0, SINGLE, "aten.mean", False),
    "with_a_constant": Cause(lambda x: (x @ torch.eye(4) * 1e30).square(), 1.0, SINGLE, "aten.pow", True),
    "masked_overflow": Cause(
        lambda x: (x + torch.finfo(HALF).min).masked_fill(x > 0, -math.inf).softmax(-1), -1000.0, HALF, "aten.add", True
    ),
    "sqrt_at_zero": Cause(lambda x: x.sqrt(), 0.0, SINGLE, "aten.div", False, "SqrtBackward0"),
    "root_at_zero": Cause(lambda x: x**0.5, 0.0, BF16, "aten.pow", False, "PowBackward0"),
    "where_does_not_help": Cause(
        lambda x: torch.where(x > 0, x.log(), 0.0), 0.0, SINGLE, "aten.div", False, "LogBackward0"
    ),
    "acos_at_one": Cause(lambda x: x.acos(), 1.0, SINGLE, "aten.rsqrt", False, "AcosBackward0"),
    "large_gradient_in_half": Cause(lambda x: 3000 * x, 1.0, HALF, "aten.mul", True, "MulBackward0"),
}


class Part(nn.Module):
    """A function of the weighted input."""

    def __init__(self, cause: Cause) -> None:
        super().__init__()
        self.function = cause.function
        self.weight = nn.Parameter(torch.ones(4, dtype=cause.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight * x)


def build(name: str) -> nn.Module:
    cause = CAUSES[name]
    return nn.Sequential(nn.Identity(), Part(cause), nn.Dropout(0.5))


globals().update({name: functools.partial(build, name) for name in CAUSES})


def batch(name: str) -> torch.Tensor:
    cause = CAUSES[name]
    return torch.full((3, 4), cause.value, dtype=cause.dtype)
