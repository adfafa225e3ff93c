"""Buffers of a skipped step on a device, where the host does not wait to learn whether the step is skipped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from disthooks.grads.buffers import BuffersBefore


def test_they_are_put_back_where_the_device_decides(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    truth = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    truth.load_state_dict(model.state_dict())
    buffers = BuffersBefore([model], [model])
    handles = buffers.attach()
    for step in range(4):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        x[0, 0] = math.nan if step in (0, 2) else x[0, 0]
        model(x.to(device))
        if step not in (0, 2):
            truth(x.to(device))
        decision = torch.tensor(step in (0, 2)).to(device)
        assert not decision.is_cpu
        assert buffers.treat(step, decision) == []
    for handle in handles:
        handle.remove()
    for (name, mine), (_, theirs) in zip(model.named_buffers(), truth.named_buffers(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu()), name


def test_that_they_stay_is_said_when_the_number_has_arrived(device: torch.device) -> None:
    model = nn.BatchNorm1d(3).to(device)
    buffers = BuffersBefore([model], [model], puts_back=False)
    assert buffers.attach() == []
    ((number, say),) = buffers.treat(7, torch.tensor(True).to(device))
    with pytest.warns(UserWarning, match="step 7 was left out"):
        say(float(number))
