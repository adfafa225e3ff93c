"""The largest norm between two logged steps is in the log, with its step and the rank whose gradients caused it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from tests.support.engines import ENGINES, loss_of, make
from tests.support.ranks.harness import Ranks
from tests.support.zero import engine_of
from tests.support.zero import loss_of as zero_loss

EVERY, SPIKE, STEPS = 10, 7, 12
#: The ranks whose loss is a thousand times as large at SPIKE, and the rank that the log names.
CASES = [((0,), 0), ((1,), 1), ((0, 1), None)]


def _logs(rank: int, engine: str, faulty: tuple[int, ...], options: dict[str, Any]) -> list[Any]:
    """The records of the same training, logged every 10 steps and every step."""
    found = []
    for every in (EVERY, 1):
        model, log = make(engine), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with dh.gradients(model, optimizer, sinks=[log.append], every=every, **options):
            for step in range(STEPS):
                optimizer.zero_grad()
                (loss_of(model, step, engine, rank) * (1000.0 if step == SPIKE and rank in faulty else 1.0)).backward()
                optimizer.step()
        found.append(log)
    return found


def _proven(few: list[dict[str, Any]], every_step: list[dict[str, Any]], leads: int | None) -> None:
    assert [record["step"] for record in few] == [0, EVERY, STEPS - 1]  # the last one is written at the end
    assert few[2].keys() >= {"grad_norm/peak", "grad_norm/peak_step"}
    assert not any("grad_norm/peak" in record for record in (few[0], *every_step))
    norms = {record["step"]: record["grad_norm"] for record in every_step if record["step"] <= EVERY}
    assert few[1]["grad_norm/peak_step"] == max(norms, key=lambda step: norms[step]) == SPIKE
    # A step that is not logged sums small gradients together, in float32.
    assert few[1]["grad_norm/peak"] == pytest.approx(norms[SPIKE], rel=1e-6)
    assert few[1]["grad_norm"] == pytest.approx(norms[EVERY], rel=1e-6)
    assert norms[SPIKE] > 10 * norms[EVERY]
    assert few[1].get("grad_norm/peak_rank") == leads


@pytest.mark.dist
@pytest.mark.parametrize(("faulty", "leads"), CASES)
@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"))
@pytest.mark.parametrize("engine", ENGINES)
def test_the_peak_its_step_and_the_rank_that_leads(
    engine: str, faulty: tuple[int, ...], leads: int | None, ranks: Ranks
) -> None:
    (few, every_step), nothing = ranks(_logs, engine, faulty, {"stats": [stats.Norm(), stats.NonFinite()]})
    assert nothing == [[], []]
    _proven(few, every_step, leads)


@pytest.mark.dist
def test_a_rule_that_measures_every_step_is_enough(ranks: Ranks) -> None:
    """The rank is not known then, because no hook looks at gradients before their reduction."""
    (few, every_step), _ = ranks(_logs, "ddp", (1,), {"rules": [dh.ClipValue(1.0), dh.ClipNorm(1.0)]})
    assert "grad_norm/peak" not in few[1]  # the first round does not measure norms
    (few, every_step), _ = ranks(_logs, "ddp", (1,), {"rules": [dh.ClipNorm(1.0)]})
    _proven(few, every_step, None)


def _zero(rank: int, stage: int) -> Any:
    engine, log = engine_of(stage), []
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    with dh.gradients(engine, stats=[stats.Norm(), stats.NonFinite()], sinks=[log.append], every=4):
        for step in range(5):
            for batch in (0, 1):
                loss = zero_loss(engine, batch, rank).float()
                engine.backward(loss * 1000 if (rank, step) == (1, 2) else loss)
                engine.step()
    return log


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(ranks: Ranks, stage: int) -> None:
    pytest.importorskip("deepspeed")
    log, _ = ranks(_zero, stage)
    assert [record["step"] for record in log] == [0, 4]
    assert (log[1]["grad_norm/peak_step"], log[1]["grad_norm/peak_rank"]) == (2, 1)
    assert log[1]["grad_norm/peak"] > 10 * log[0]["grad_norm"]


def test_norms_that_are_not_finite_are_left_out() -> None:
    model, log = nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[stats.NonFinite()], sinks=[log.append], every=EVERY):
        for step in range(STEPS):
            optimizer.zero_grad()
            (model(torch.ones(1, 3)).sum() * {4: math.nan, 5: math.inf, SPIKE: 2.0}.get(step, 1.0)).backward()
            optimizer.step()
    assert [record["step"] for record in log] == [0, 4, EVERY, STEPS - 1]
    assert log[2]["grad_norm/peak"] == pytest.approx(4.0)  # four gradients of 2
    assert log[2]["grad_norm/peak_step"] == SPIKE
    assert "grad_norm/peak_rank" not in log[2]  # of one rank
