"""Zero the gradient of one bias, and let no negative gradient through behind an activation."""

from __future__ import annotations

import torch
from torch import nn

import disthooks as dh


class Net(nn.Module):
    """8x8 images to five numbers; with ``clamp`` on, the convolution is given no negative gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 2, stride=2)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(160, 5)
        self.clamp = False
        self.sizes: list[torch.Size] = []
        self.smallest: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv(x))
        if self.clamp:
            x.register_hook(lambda grad: grad.clamp(min=0))
            x.register_hook(self.look)  # after the clamp: hooks of one tensor run in their order
        return self.fc(torch.flatten(x, 1))

    def look(self, grad: torch.Tensor) -> None:
        print("gradient behind the relu:", tuple(grad.shape), "smallest", float(grad.min()))
        self.sizes.append(grad.shape)
        self.smallest.append(float(grad.min()))


torch.manual_seed(2)
net, images = Net(), torch.randn(1, 3, 8, 8)


def step() -> dict[str, torch.Tensor]:
    """Gradients by name."""
    net.zero_grad()
    (1 - net(images)).mean().backward()
    return {name: weight.grad.clone() for name, weight in net.named_parameters() if weight.grad is not None}


plain = step()
assert torch.allclose(plain["fc.bias"], torch.full((5,), -1 / 5))

# Plain torch, for the bias: a hook on the parameter, put on from outside.
handle = net.fc.bias.register_hook(torch.zeros_like)
by_hand = step()
assert not by_hand["fc.bias"].any()
handle.remove()

# And for the activation: a hook on a value inside forward, put on anew in each.
net.clamp = True
clamped = step()
assert net.sizes == [torch.Size([1, 10, 4, 4])]
assert net.smallest[0] >= 0
assert torch.equal(clamped["fc.weight"], plain["fc.weight"])  # it lies before the hook on the way back
assert not torch.equal(clamped["conv.weight"], plain["conv.weight"])
net.clamp = False

# With disthooks, for the bias: by name, an error if no parameter has it, gone with the block, the same under DDP.
with dh.on_gradient(net, "fc.bias", torch.zeros_like, at="local") as zeroed:
    assert not step()["fc.bias"].any()
assert zeroed.report() == {"fc.bias": 1}
assert torch.equal(step()["fc.bias"], plain["fc.bias"])
