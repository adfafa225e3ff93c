"""The peak of the backward is that of torch's allocator: gradients are added in place where autograd does it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from disthooks import explain
from tests.support import oracle

ROWS, WIDE = 512, 128
#: Operators take a few bytes for themselves (a scalar, the state of the random generator).
SMALL = 16 << 10


class Adds(torch.autograd.Function):
    """Adds two gradients in its own code, which torch's engine does not do in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + grad * 2


def fan(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    return sum((y * float(scale)).sum() for scale in range(1, 5))


def residual(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + (x * 2.0) * 3.0
    return x.sum()


def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x * 2.0
    return (y + y).sum() + (y * y).sum()


def tied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (((x @ weight) @ weight.t() @ weight) * 1.0).sum()  # a product copies a gradient that `sum` has expanded


def tied_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = nn.functional.linear(x, weight)
    return (x * 1.0).sum()


def views(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x * 2.0
    return (y.t() * 2.0).sum() + (y[: ROWS // 2] * 3.0).sum() + (y.reshape(-1) * 4.0).sum() + (y * 5.0).sum()


def broadcast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x * 2.0
    return y.sum() + y.mean() + (y * 3.0).sum()


def reentrant(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    made: torch.Tensor = checkpoint(residual, y, weight, use_reentrant=True)
    return made + fan(y, weight)


def held_by_a_hook(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    y = x * 1.0
    first = y * 4.0
    y.register_hook(lambda grad: kept.append(grad))
    first.register_hook(lambda grad: kept.append(grad + 1.0))
    return (first * 2.0).sum() + (y * 3.0).sum()


def own_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    return (Adds.apply(y * 2.0) * 3.0).sum() + y.sum()


NETS = (fan, residual, twice, views, broadcast, reentrant, held_by_a_hook, own_sum, tied, tied_linear)


class Net(nn.Module):
    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.ones(WIDE, WIDE)), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x, self.weight)


def build(body: Callable[..., torch.Tensor]) -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Net(body), (torch.ones(ROWS, WIDE, requires_grad=True),)


def predicted(body: Callable[..., torch.Tensor]) -> int:
    said = explain(functools.partial(build, body), device="cpu", loss=oracle.loss_of)
    return max(each.total for each in said.timeline.samples if each.phase == "backward")


@pytest.mark.parametrize("body", NETS)
def test_the_peak_of_the_backward_is_that_of_the_allocator(body: Callable[..., torch.Tensor]) -> None:
    assert abs(predicted(body) - oracle.allocated_peak(*build(body))["backward"]) < SMALL


def test_the_peak_is_the_same_after_a_compilation_that_was_refused() -> None:
    """From then on Python counts one holder more of each tensor, until the process ends."""

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    before = predicted(fan)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(breaks, fullgraph=True, backend="eager")(torch.ones(3))
    assert predicted(fan) == before
