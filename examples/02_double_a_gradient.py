"""What a tensor hook returns takes the gradient's place, for everything that backward still has to do."""

from __future__ import annotations

from collections.abc import Callable

import torch


def run(change: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The weight's gradient after ``change`` had its way with the value in the middle."""
    torch.manual_seed(2)
    weight = torch.randn(5, requires_grad=True)
    middle = torch.ones(3, 5) @ weight
    middle.retain_grad()
    change(middle)
    middle.square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def twice(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


plain = run(lambda middle: None)

# A hook doubles it before the product with the inputs is taken, so the weight's gradient is doubled too.
doubled = run(lambda middle: middle.register_hook(twice) and None)
assert torch.equal(doubled, 2 * plain)

# Hooks on one tensor run in the order they were put on, each on what the one before it returned.
sizes: list[float] = []


def twice_then_look(middle: torch.Tensor) -> None:
    middle.register_hook(twice)
    middle.register_hook(lambda grad: sizes.append(float(grad.abs().sum())))


run(twice_then_look)
run(lambda middle: middle.register_hook(lambda grad: sizes.append(float(grad.abs().sum()))) and None)
assert sizes[0] == 2 * sizes[1]

# Changing .grad once backward is over reaches nobody: it was a copy for us to look at.
torch.manual_seed(2)
weight = torch.randn(5, requires_grad=True)
middle = torch.ones(3, 5) @ weight
middle.retain_grad()
middle.square().sum().backward()
assert middle.grad is not None
middle.grad *= 2
assert weight.grad is not None
assert torch.equal(weight.grad, plain)
print("plain  ", plain)
print("doubled", doubled)
