"""What chosen layers of a ResNet returned: by hand, and with ``dh.features``."""

from __future__ import annotations

import torch
from _resnet import ResNet18
from torch import nn

import disthooks as dh
from disthooks.errors import MatchError, MutationError


class FeatureExtractor(nn.Module):
    """By hand: a wrapper that returns the outputs of ``layers`` in place of the model's."""

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        super().__init__()
        self.model, self.found = model, dict[str, torch.Tensor]()
        for layer in layers:
            self.model.get_submodule(layer).register_forward_hook(self.keep(layer))

    def keep(self, layer: str):
        def hook(module: nn.Module, args: object, output: torch.Tensor) -> None:
            self.found[layer] = output

        return hook

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.model(x)
        return self.found


torch.manual_seed(0)
model, images = ResNet18(), torch.randn(2, 3, 64, 64)
with dh.features(model, "layer4", "avgpool") as seen:
    scores = model(images)
for name, value in seen.items():
    print(name, tuple(value.shape))
assert seen["layer4"].shape == (2, 512, 2, 2)
assert seen["avgpool"].shape == (2, 512, 1, 1)
assert scores.shape == (2, 1000)  # the model still returns what it returns
assert not seen["layer4"].requires_grad

by_hand = FeatureExtractor(model, ["layer4", "avgpool"])(images)
assert torch.equal(by_hand["layer4"], seen["layer4"])

# Patterns: globs, classes, predicates. One that matches nothing is an error that names what is near.
with dh.features(model, "layer?", nn.Linear) as seen:
    model(images)
assert list(seen) == ["layer1", "layer2", "layer3", "layer4", "fc"]
try:
    dh.features(model, "layer5")
except MatchError as error:
    print(error)

# bn1's output is overwritten by the ReLU after it. By hand one reads the ReLU's output and never knows.
with dh.features(model, "bn1") as alias, dh.features(model, "bn1", copy=True) as copied:
    model(images)
assert copied["bn1"].min() < 0
try:
    alias["bn1"]
except MutationError as error:
    print(error)
else:
    raise AssertionError("a changed output was passed off as bn1's")
