"""What accelerate does with what it does not know: the reasons why disthooks is configured and wrapped as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline

pytest.importorskip("accelerate", reason="accelerate is not installed")

NAMES = ("blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_unwrapping_leaves_the_hooks(way: str) -> None:
    """``extract_model_from_parallel`` takes off whatever has an attribute ``module``."""
    from accelerate.utils import extract_model_from_parallel

    model = Net()
    if way == "wrapped":
        saving = model.blocks[1] = dh.SaveWith(model.blocks[1], pipeline(dh.OnDisk("/tmp"), at_least=0))
    else:
        saving = dh.save_activations(model, "blocks.1", pipeline(dh.OnDisk("/tmp"), at_least=0))
    unwrapped = extract_model_from_parallel(model, recursive=True)
    assert tuple(unwrapped.state_dict()) == NAMES
    unwrapped(torch.randn(3, 4)).sum().backward()
    assert saving.report().moved > 0
