"""Change what goes into a module and what comes out of it, and take the hooks off again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def add_one(module: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    """Before forward: positional inputs come as a tuple; one tensor may be returned as it is."""
    return args[0] + 1


def add_input(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """After forward: sees the inputs that the pre-hooks made; a way around the layer, as in a ResNet."""
    return output + args[0]


torch.manual_seed(1)
layer, x = nn.Linear(3, 3), torch.randn(2, 3)
plain = layer(x)

before = layer.register_forward_pre_hook(add_one)
assert torch.equal(layer(x), nn.functional.linear(x + 1, layer.weight, layer.bias))

after = layer.register_forward_hook(add_input)
assert torch.equal(layer(x), nn.functional.linear(x + 1, layer.weight, layer.bias) + (x + 1))
print("with both hooks:\n", layer(x))

before.remove()
assert torch.equal(layer(x), plain + x)
after.remove()
assert torch.equal(layer(x), plain)
assert not layer._forward_hooks
assert not layer._forward_pre_hooks

# Hooks belong to module(x). Calling forward itself goes past them.
with layer.register_forward_hook(add_input):
    assert torch.equal(layer.forward(x), plain)
    assert not torch.equal(layer(x), plain)
print("without:\n", layer(x))
