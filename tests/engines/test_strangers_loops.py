"""Loops of strangers on DDP, FSDP2 and ZeRO-2: rules act, or every rank says that they cannot.

tests/unit/grads/test_loops.py has the same loops on a plain module, and more of them.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.ranks.harness import Ranks
from tests.support.ranks.truth import make

pytestmark = [pytest.mark.dist, pytest.mark.first_tier]
ENGINES = ["ddp", "fsdp2"]


def _model(engine: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(engine, "step", 2, torch.float32)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def _loss(model: nn.Module, rank: int, step: int = 0, factor: float = 1.0) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return factor * model(x, True).square().mean()


def _another_optimizer(rank: int, engine: str) -> dict[str, bool]:
    """A second stage of the training makes an optimizer of its own over the same parameters."""
    model, optimizer = _model(engine)
    second = torch.optim.AdamW(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(0.1)]) as watch:
        _loss(model, rank).backward()
        optimizer.step()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(2):
                optimizer.zero_grad()
                _loss(model, rank, step).backward()
                second.step()
            lacks = watch.report().lacks_step
    once = ["AdamW has stepped" in str(each.message) for each in told] == [True]
    return {"said once": once, "steps": watch.steps == 1, "lacks": lacks}


def _skipped(rank: int, engine: str) -> dict[str, bool]:
    """A NaN on one rank: all ranks see that the step was left out."""
    from tests.support.zero import engine_of, loss_of

    if engine == "zero2":
        model, optimizer = engine_of(2, accumulate=1), None
    else:
        model, optimizer = _model(engine)
    found = []
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]) as watch:
        for step in range(3):
            factor = math.nan if (step, rank) == (1, 1) else 1.0
            if optimizer is None:
                model.backward(loss_of(model, step, rank).float() * factor)
                model.step()
            else:
                _loss(model, rank, step, factor).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((watch.was_skipped, bool(watch.skipped)))
    return {"seen": found == [(False, False), (True, True), (False, False)]}


LOOPS = {"another optimizer": _another_optimizer, "skipped": _skipped}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop(ranks: Ranks, engine: str, loop: str) -> None:
    for found in ranks(LOOPS[loop], engine):
        assert all(found.values()), found


def test_a_skip_under_zero2(ranks: Ranks) -> None:
    pytest.importorskip("deepspeed")
    for found in ranks(_skipped, "zero2"):
        assert all(found.values()), found
