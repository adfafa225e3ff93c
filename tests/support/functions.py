"""Autograd Functions that save what they are given."""

from __future__ import annotations

from typing import Any

import torch


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
