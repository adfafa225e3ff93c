"""One verdict from all evidence: what the statistics saw and what the comparison of copies found are one event."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.report.log import read
from disthooks.report.timeline import timeline
from tests.support.ranks.harness import Ranks

BROKEN = 30


def _train(rank: int, file: str, checks: int | None, every: int = 1, steps: int = 45, broken: int = BROKEN) -> None:
    """A weight of one layer changes on rank 1."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "watch": {"every": every, "stats": "full", "sinks": [{"kind": "Jsonl", "path": file}]},
        **({} if checks is None else {"check_replicas": checks}),
    }
    generator = torch.Generator().manual_seed(rank)
    with dh.prepare(ddp, optimizer, config) as prepared:
        assert prepared.gradients is not None
        for step in range(steps):
            if step == broken and rank == 1:
                with torch.no_grad():
                    model[4].weight[3, 5] = 300.0
            loss = (ddp(torch.randn(8, 16, generator=generator)) - 1).square().mean()
            prepared.gradients.note_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("checks", "kind", "said"),
    [
        (None, "forward", ""),
        (1, "replicas", "the comparison after it"),
        (10, "replicas", "the comparison after step 39"),
        (100, "replicas", "the comparison after step 31"),  # after 1, 2, 4, 8, 16 and 32 steps
    ],
)
def test_a_weight_that_changes_on_one_of_two_ranks(
    ranks: Ranks, checks: int | None, kind: str, said: str, tmp_path: pathlib.Path
) -> None:
    """The outputs tell the step and the rank, and the copies tell that it is the weight."""
    file = tmp_path / "run.jsonl"
    ranks(_train, str(file), checks)
    (run,) = read(file).runs
    found, *others = timeline(run).culprits
    assert (found.kind, found.first, found.step, found.rank) == (kind, BROKEN, BROKEN, 1), found
    assert found.text.startswith("Step 30 on rank 1: the output of 4 jumped to ")
    assert said in found.text
    if checks is not None:
        assert found.where == "4.weight"
        assert "4.weight differs from the copies on other ranks" in found.text
        assert others == []


@pytest.mark.dist
def test_steps_that_are_not_logged_are_a_range(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.jsonl"
    ranks(_train, str(file), 100, 5, 200, 183)  # of few records a jump must be larger
    (run,) = read(file).runs
    found = timeline(run)
    assert [(each.kind, each.first, each.step, each.rank) for each in found.culprits] == [("replicas", 181, 185, 1)]
    assert found.culprits[0].text.startswith("Steps 181 to 185 on rank 1: the output of 4 jumped to ")
    assert "the comparison after step 199 showed that 4.weight differs" in found.culprits[0].text  # written at the end
    assert found.unseen[-1].startswith("Every 5th step is logged: ")
