"""Look at the gradient of a value in the middle of a computation, of which torch keeps no ``.grad``."""

from __future__ import annotations

import torch

seen: list[torch.Tensor] = []


def forward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    weight = torch.randn(5, requires_grad=True)
    middle = torch.ones(3, 5) @ weight
    return weight, middle, middle.square().sum()


def show(grad: torch.Tensor) -> None:
    """A hook that returns nothing leaves the gradient as it is."""
    print("gradient of the value in the middle:", grad)
    seen.append(grad)


# One way: ask torch to keep it. The gradient then lives as long as the tensor does.
weight, middle, loss = forward()
middle.retain_grad()
loss.backward()
kept = middle.grad
assert kept is not None
assert torch.equal(kept, 2 * middle)

# The other: a hook is handed the gradient while backward passes by, and nothing need be kept.
weight_again, middle, loss = forward()
middle.register_hook(show)
loss.backward()
assert torch.equal(seen[0], kept)
assert weight.grad is not None
assert weight_again.grad is not None
assert torch.equal(weight_again.grad, weight.grad)  # looking changed nothing
