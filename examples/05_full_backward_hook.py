"""Replace the gradient that a module hands to whatever came before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def all_42(module: nn.Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> tuple[Any, ...]:
    """``grad_input`` is what the module computed for its inputs, ``grad_output`` what it was given."""
    print(f"{type(module).__name__}: got {grad_output[0].tolist()}, would give {grad_input[0].tolist()}")
    return tuple(torch.full_like(grad, 42.0) for grad in grad_input)


def gradients(layer: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    layer.zero_grad()
    x.grad = None
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return x.grad, layer.weight.grad


torch.manual_seed(1)
layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
plain_input, plain_weight = gradients(layer, x)

handle = layer.register_full_backward_hook(all_42)
given, weight = gradients(layer, x)
assert torch.equal(given, torch.full_like(x, 42.0))
assert torch.equal(weight, plain_weight)  # the module's own parameters are not in grad_input

handle.remove()
assert torch.equal(gradients(layer, x)[0], plain_input)

# Before that, a full backward pre-hook may replace grad_output, and that does reach the parameters.
with layer.register_full_backward_pre_hook(lambda module, grad_output: (2 * grad_output[0],)):
    given, weight = gradients(layer, x)
assert torch.equal(weight, 2 * plain_weight)
assert torch.equal(given, 2 * plain_input)

# torch passes inputs and outputs through views for these hooks, and refuses to change those in place.
inplace = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
inplace[0].register_full_backward_hook(all_42)
try:
    inplace(x)
except RuntimeError as error:
    print("in place after a full backward hook:", str(error)[:76], "...")
else:
    raise AssertionError("torch let it pass")
