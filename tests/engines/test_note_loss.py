"""``note_loss`` without a ``watch`` at hand, and the losses that DeepSpeed's own backward is called with."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import UsageError
from tests.support.engines import FIRST, loss_of, make
from tests.support.ranks.harness import Ranks
from tests.support.zero import engine_of
from tests.support.zero import loss_of as zero_loss

LOSS = {"watch": {"every": 1, "stats": [{"kind": "Loss"}, {"kind": "Norm"}]}}


def _losses(rank: int, engine: str) -> list[tuple[float, float]]:
    """Of each step the loss in the log, and the mean of what was handed in."""
    model, found = make(engine), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attached = dh.prepare(model, optimizer, LOSS)
    for step in range(3):
        for _ in range(2):
            loss = loss_of(model, step, engine, rank)
            dh.note_loss(loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        attached.gradients.flush()
        found.append((attached.gradients.latest["loss"], float(loss.detach())))
    attached.remove()
    return found


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.parametrize("engine", ["plain", "ddp"])
def test_a_script_needs_no_watch(ranks: Ranks, engine: str) -> None:
    of_ranks = [_losses(0, engine)] if engine == "plain" else ranks(_losses, engine)
    for steps in zip(*of_ranks, strict=True):
        assert [logged for logged, _ in steps] == pytest.approx(
            [sum(loss for _, loss in steps) / len(steps)] * len(steps)
        )


def _attached(model: nn.Module, *others: Any) -> Any:
    return dh.gradients(model, torch.optim.SGD(model.parameters(), lr=0.1), stats=[*others, stats.Norm()], every=1)


def test_whose_loss_it_is() -> None:
    """That of the one model whose attachment asks for a loss; of two models nobody knows."""
    gc.collect()
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="nothing is attached"):
        dh.note_loss(1.0)
    with _attached(one, stats.Loss()) as first, _attached(one, stats.Loss()), _attached(other):
        dh.note_loss(0.25)
        one(torch.ones(1, 1)).sum().backward()
        first.optimizer.step()
        with _attached(other, stats.Loss()), pytest.raises(UsageError, match="nothing tells whose loss it is"):
            dh.note_loss(0.5)
    assert first.latest["loss"] == 0.25


def _zero(rank: int, stage: int, is_given: bool) -> Any:
    engine, found = engine_of(stage), []
    assert "backward" not in engine.__dict__
    with dh.gradients(engine, stats=[stats.Loss(), stats.Norm()], every=1) as watch:
        for _ in range(2):
            for batch in (0, 1):
                loss = zero_loss(engine, batch, rank).float()
                found.append(float(loss.detach()))
                if is_given:
                    dh.note_loss(10 * loss)
                engine.backward(loss)
                engine.step()
    assert "backward" not in engine.__dict__
    return watch.latest["loss"], sum(found[-2:]) / 2 * (10 if is_given else 1)


@pytest.mark.dist
@pytest.mark.parametrize("is_given", [False, True])
def test_deepspeed_knows_its_loss(ranks: Ranks, is_given: bool) -> None:
    """Unless the script hands it in: then it is not counted twice."""
    pytest.importorskip("deepspeed")
    of_ranks = ranks(_zero, 2, is_given)
    mean = sum(loss for _, loss in of_ranks) / 2
    assert [logged for logged, _ in of_ranks] == pytest.approx([mean, mean])
