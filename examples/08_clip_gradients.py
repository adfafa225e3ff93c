"""Clip every gradient of a model to a range: hooks on the parameters, and a rule before the optimizer's step."""

from __future__ import annotations

import torch
from _resnet import ResNet18
from torch import nn

import disthooks as dh

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

# A hook on a parameter is called in every backward: of two micro-batches each is clipped, and not the sum.
clip(mlp)(x).sum().backward()
assert largest(mlp) > HIGH

# With disthooks: a rule sees the gradient that the optimizer will use, accumulated, and averaged over ranks.
resnet = ResNet18(classes=10)
optimizer = torch.optim.SGD(resnet.parameters(), lr=1.0)
records: list[dict[str, object]] = []
rules, stats = [dh.ClipValue(LOW, HIGH)], [dh.stats.MaxAbs(), dh.stats.Norm()]
before = resnet.fc.bias.detach().clone()
with dh.gradients(resnet, optimizer, rules=rules, stats=stats, sinks=[records.append], every=1):
    for _ in range(2):
        nn.functional.cross_entropy(resnet(images), labels).backward()
    accumulated = resnet.fc.bias.grad.clone()
    assert largest(resnet) > HIGH
    optimizer.step()
assert largest(resnet) == torch.tensor(HIGH)
assert torch.equal(resnet.fc.bias, before - accumulated.clamp(LOW, HIGH))
print("by rule:", largest(resnet), records[0])

# Only some parameters: the same patterns as everywhere.
optimizer.zero_grad()
with dh.gradients(resnet, optimizer, rules=[dh.only("fc.*", dh.ClipValue(LOW, HIGH))]):
    nn.functional.cross_entropy(resnet(images), labels).backward()
    optimizer.step()
assert largest(resnet.fc) <= torch.tensor(HIGH) < largest(resnet)
