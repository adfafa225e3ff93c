"""Clip every gradient of a model to a range: hooks on the parameters, and a rule before the optimizer's step."""

from __future__ import annotations

import torch
from _resnet import ResNet18
from torch import nn

LOW, HIGH = -0.1, 0.1


def clip(model: nn.Module) -> nn.Module:
    """By hand: what a hook returns takes the gradient's place. It must not change the one it is given."""
    for weight in model.parameters():
        weight.register_hook(lambda grad: grad.clamp(LOW, HIGH))
    return model


def largest(model: nn.Module) -> float:
    return max(float(weight.grad.abs().max()) for weight in model.parameters() if weight.grad is not None)


torch.manual_seed(20)
mlp = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 5))
x = torch.randn(4, 100)
mlp(x).sum().backward()
assert largest(mlp) > HIGH
mlp.zero_grad()
clip(mlp)(x).sum().backward()
assert largest(mlp) == torch.tensor(HIGH)

images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
resnet = clip(ResNet18(classes=10))
nn.functional.cross_entropy(resnet(images), labels).backward()
assert largest(resnet) == torch.tensor(HIGH)
print("by hand:", largest(mlp), largest(resnet))

# A hook on a parameter is called for every backward, so of two micro-batches each is clipped, and not the sum.
clip(mlp)(x).sum().backward()
assert largest(mlp) > HIGH
