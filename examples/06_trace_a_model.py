"""The shape after every layer of a ResNet: by hand, and with ``dh.trace``, which also sees time and memory."""

from __future__ import annotations

import contextlib
import io

import torch
from _resnet import ResNet18
from torch import nn

import disthooks as dh


class VerboseNet(nn.Module):
    """By hand: a wrapper whose hooks print the output shape of each child of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for name, child in model.named_children():
            # The name is bound as a default: a lambda over the loop's variable would print the last one.
            child.register_forward_hook(lambda m, args, out, name=name: print(name, tuple(out.shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


torch.manual_seed(0)
images = torch.ones(2, 3, 28, 28)
by_hand = io.StringIO()
with contextlib.redirect_stdout(by_hand):
    VerboseNet(ResNet18())(images)

# With disthooks: no wrapper, so names and state_dict stay, and the hooks leave with the block.
model = ResNet18()
with dh.trace(model, depth=1) as traced:
    model(images).sum().backward()

rows = traced.report().rows
names = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
assert [row.name for row in rows] == [*names, ""]  # the last one is the model itself
assert [f"{row.name} {row.shape}" for row in rows[:-1]] == by_hand.getvalue().splitlines()
assert rows[-1].nbytes == sum(row.nbytes for row in rows[:-1])  # bytes that backward will need, once each
assert not any(part._forward_hooks for part in model.modules())
