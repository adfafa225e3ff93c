"""A plan for a budget: the step with its YAML is within the budget, and more room costs no more time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.predict.answers.advice import Speeds
from disthooks.predict.answers.fits import fits
from disthooks.predict.answers.within import plan_within
from disthooks.predict.explain import as_entries, explain_built
from disthooks.predict.fake.builder import Builder
from disthooks.predict.run import Situation

ROWS, WIDE, DEEP = 1 << 20, 64, 12
SAVED = ROWS * WIDE * 4  # the largest saved tensor: 256 MiB


class Deep(nn.Module):
    """Layers of which ``Recompute`` drops the GELUs' inputs only with their linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(DEEP)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out.mean()


def test_the_plan_keeps_the_budget_and_more_room_costs_no_more() -> None:
    builder = Builder(Deep, (torch.empty(1, WIDE).expand(ROWS, WIDE),))
    said = explain_built(builder, Situation(batch=ROWS))
    assert plan_within(builder, said, said.peak_bytes) is None
    seconds = []
    for share in (0.3, 0.5, 0.7, 0.9):
        budget = int(share * said.peak_bytes)
        found = plan_within(builder, said, budget)
        assert found.nbytes <= budget, share
        assert budget - 2 * SAVED < found.nbytes or "go out" not in found.text, share
        again = dh.explain(builder, plan=yaml.safe_load(found.yaml), batch=ROWS)
        assert again.needed_bytes == found.nbytes
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]
    assert "again" in found.title, "to compute again takes less time than the link"


def test_the_first_step_is_within_the_budget_too() -> None:
    """In it a store does not know what will be saved. On the CPU, and without an optimizer's state, it needs most."""
    layers = [each for _ in range(12) for each in (nn.Linear(1024, 1024), nn.GELU())]
    builder, situation = Builder(nn.Sequential(*layers), (torch.empty(2048, 1024),)), Situation(device="cpu")
    said = explain_built(builder, situation)
    budget = int(0.7 * said.peak_bytes)
    tiers = dh.Tiered(dh.OnDevice("51 MiB"), dh.OnDisk("/tmp"))
    late = explain_built(builder, replace(situation, plan=[("*", tiers)]))
    assert late.peak_bytes <= budget < late.first_bytes
    assert not fits(builder, late.situation, budget, sizes=(), explanation=late).does_fit
    found = plan_within(builder, said, budget)
    again = explain_built(builder, replace(situation, plan=as_entries(yaml.safe_load(found.yaml))))
    assert again.needed_bytes == found.nbytes <= budget


def test_the_speed_of_a_disk_is_said_to_be_unknown() -> None:
    builder = Builder(Deep, (torch.empty(1, WIDE).expand(ROWS, WIDE),))
    said = explain_built(builder, Situation(device="cpu", batch=ROWS))
    found = plan_within(builder, said, int(0.9 * said.peak_bytes))
    assert "if the disk moves 1 GB/s (its speed is unknown; disthooks env measures it)" in found.text
    assert "memory)" not in found.text


def test_a_link_that_was_measured_counts_in_place_of_the_one_in_the_table() -> None:
    builder = Builder(Deep, (torch.empty(1, WIDE).expand(ROWS, WIDE),))
    said = explain_built(builder, Situation(batch=ROWS))
    fast = {"link": {"pinned_to_host": 1e15, "pinned_to_device": 1e15}, "directories": []}
    found = plan_within(builder, said, int(0.7 * said.peak_bytes), speeds=Speeds.of(fast))
    assert found is not None
    assert found.title.startswith("move saved tensors to the host"), "which costs nothing now"
    assert "on the link (as measured)" in found.text


def test_the_way_that_is_chosen_depends_on_what_was_measured() -> None:
    """On a fast disk tensors move; on a slow one more of them are computed again."""
    builder = Builder(Deep, (torch.empty(1, WIDE).expand(ROWS, WIDE),))
    said = explain_built(builder, Situation(device="cpu", batch=ROWS))
    texts, titles = [], []
    for speed in (1e13, 1e8):
        disk = {"in_memory": False, "write_bytes_per_s": speed, "read_bytes_per_s": speed}
        slower = disk | {"write_bytes_per_s": speed / 10, "read_bytes_per_s": None}
        speeds = Speeds.of({"link": None, "directories": [slower, disk, disk | {"in_memory": True}]})
        assert speeds == Speeds(None, pytest.approx(2 / speed))
        found = plan_within(builder, said, int(0.7 * said.peak_bytes), speeds=speeds)
        assert found is not None
        texts.append(found.text)
        titles.append(found.title)
    assert "on the disk, as measured" in texts[0]
    assert titles[0].startswith("move saved tensors to a disk")
    assert titles[1].startswith("compute cheap tensors and outputs of linear layers again")


def test_a_budget_that_no_plan_keeps_says_what_is_missing() -> None:
    builder = Builder(Deep, (torch.empty(1, WIDE).expand(ROWS, WIDE),))
    said = explain_built(builder, Situation(batch=ROWS))
    with pytest.raises(UsageError, match=r"no plan keeps 1\.0 MiB: with all saved tensors moved .* needs 1\.0 GiB, "):
        plan_within(builder, said, 1 << 20)
