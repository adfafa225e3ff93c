"""One rule on a few tensors, in one process: what it makes of them, and what it logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import disthooks as dh


def tensors(shapes: Sequence[Any], seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def stepped(rule: Any, weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> tuple[list, dict[str, Any]]:
    """What a rule makes of the gradients in one process, and what it logs."""
    model = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter, grad in zip(model, grads, strict=True):
        parameter.grad = grad.clone()
    with dh.gradients(model, optimizer, rules=[rule]) as watch:
        optimizer.step()
    return [parameter.grad for parameter in model], watch.latest


def normed(rule: Any, norms: Sequence[float]) -> list[tuple[float, dict[str, Any]]]:
    """For each of several steps, whose gradients have these norms, the norm after the rule, and the log."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    found = []
    with dh.gradients(nn.ParameterList([weight]), optimizer, rules=[rule], every=1) as watch:
        for norm in norms:
            weight.grad = torch.tensor([0.6 * norm, -0.8 * norm], dtype=torch.float64)
            optimizer.step()
            watch.flush()
            found.append((float(weight.grad.norm()), dict(watch.latest)))
    return found
