"""Autograd Functions that save what they are given, and functions as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Made(nn.Module):
    """Its forward is a function of its parts and of the inputs."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts) if parts else ()

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.parts, *inputs)


class Save(torch.autograd.Function):
    """Saves what it is given, so that a test can read it back from ``grad_fn.saved_tensors``."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (grad, *[None] * len(ctx.saved_tensors))


class Prepared(torch.autograd.Function):
    """Computes its gradient in forward, as fused losses do, and returns what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return (x.detach() * gradient).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class SavesItsOutput(torch.autograd.Function):
    """Its node holds the packed value of its own output, and its backward does not read it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2
