"""``fit`` on the CPU, where what a store has in memory while it writes and reads depends on the speed of the disk."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import memory

pytestmark = pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
EXTRA = 64 << 20


def test_the_most_that_four_rounds_needed_counts(tmp_path: pathlib.Path) -> None:
    """One round has a tensor beside it, which stands for writes that wait; the store keeps no idle memory by itself."""
    memory.release_promptly()
    model, store = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), dh.OnDisk(tmp_path)
    x, known = torch.ones(2048, 64), []
    with dh.fit(model, memory.resident() + (1 << 30), store) as fitted:
        assert not store.open().worker.keeps_idle
        for step in range(8):
            loss = model(x).sum()
            beside = torch.ones((EXTRA if step == 2 else 4) // 4)
            loss.backward()
            del beside
            known.append(fitted._needed(fitted._round))  # type: ignore[arg-type]
    assert [needed > 0.9 * EXTRA for needed in known] == [step == 0 or 3 <= step <= 6 for step in range(8)], known


def test_the_first_round_is_not_remembered_for_good(tmp_path: pathlib.Path) -> None:
    """What it made, as the optimizer's state, lies there when the later ones start."""
    memory.release_promptly()
    model, budget = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), memory.resident() + (256 << 20)
    with dh.fit(model, budget, dh.OnDisk(tmp_path)) as fitted:
        for step in range(2):
            loss = model(torch.ones(2048, 64)).sum()
            beside = torch.ones((int(0.98 * budget) - memory.resident()) // 4 if step == 0 else 1)
            loss.backward()
            del beside
    assert 0.95 * budget < fitted.report().peak < budget
    assert fitted.state_dict()["least"] == {}
