"""Loops of strangers on DDP, FSDP2 and ZeRO-2: rules act, or every rank says that they cannot.

tests/unit/grads/test_loops.py has the same loops on a plain module, and more of them.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import UsageError
from tests.support.engines import close, whole
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


def _norm(model: nn.Module) -> float:
    return float(torch.stack([whole(p.grad).double().norm() for p in model.parameters()]).norm())


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


def _twice(rank: int, engine: str) -> dict[str, bool]:
    model, optimizer = _model(engine)
    with dh.gradients(model, optimizer, rules=[dh.Scale(0.5)]) as watch:
        try:
            dh.gradients(model, optimizer, rules=[dh.Scale(0.5)])
            said = ""
        except UsageError as error:
            said = str(error)
        _loss(model, rank).backward()
        true = _norm(model)
        optimizer.step()
        return {
            "refused": "another attachment" in said,
            "once": close(_norm(model), true / 2, 1e-5),
            "1": watch.steps == 1,
        }


def _scaled(rank: int, engine: str) -> dict[str, bool]:
    """A step that is begun with a scaler has gradients in the user's units; one that is kept back leaves no loss."""
    model, optimizer = _model(engine)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    records: list[Any] = []
    norms = []
    rules = [dh.SkipSpike(least=2, window=4, norm=False), dh.ClipNorm(1e-3)]
    stats = [dh.stats.Norm()]
    with dh.gradients(model, optimizer, rules=rules, stats=stats, sinks=[records.append], every=1) as watch:
        try:
            scaler.scale(_loss(model, rank)).backward()
            watch.begin_step()
            unknown = False
        except UsageError:
            unknown = True
        optimizer.zero_grad()
        for step in range(5):
            scaler.scale(_loss(model, rank, step, math.inf if step == 3 else 1.0)).backward()
            watch.note_loss(1000.0 if step == 3 else 1.0 + 0.01 * (step % 2))
            true = _norm(model) / scaler.get_scale()
            if step % 2:
                watch.begin_step(scaler)
                norms += [] if step == 3 else [close(_norm(model), min(true, 1e-3), 1e-2)]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    losses = [record["loss"] for record in records]
    return {
        "unknown scaler": unknown,
        "norms": all(norms),
        "losses": rank > 0 or close(losses, [1.0, 1.01, 1.0, 1.0], 1e-6),
        "no spike": not any(record["spike"] for record in records),
    }


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


LOOPS = {"another optimizer": _another_optimizer, "twice": _twice, "scaled": _scaled, "skipped": _skipped}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop(ranks: Ranks, engine: str, loop: str) -> None:
    for found in ranks(LOOPS[loop], engine):
        assert all(found.values()), found


def test_a_skip_under_zero2(ranks: Ranks) -> None:
    pytest.importorskip("deepspeed")
    for found in ranks(_skipped, "zero2"):
        assert all(found.values()), found
