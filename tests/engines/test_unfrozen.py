"""A parameter that is unfrozen, frozen or added after attaching: local hooks see it, or there is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import AttachError
from tests.support.engines import ENGINES, grads_of, loss_of, make
from tests.support.ranks.harness import Ranks
from tests.support.zero import engine_of
from tests.support.zero import loss_of as zero_loss

BOUND = 0.001
LOCAL = [dh.only("*", dh.ClipValue(BOUND), at="local")]


def _of(model: nn.Module, engine: str) -> list[nn.Parameter]:
    """The parameters of embed and head, or the flat one that holds them."""
    named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
    return [p for name, p in named if name.removeprefix("module.").startswith(("embed", "head", "_flat_param"))]


def _train(rank: int, engine: str, thaw_at: int) -> dict[str, Any]:
    model = make(engine)
    parts = _of(model, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in parts:
        parameter.requires_grad_(False)
    watched = [stats.Spread(per_parameter=True), stats.NonFinite()]
    with (
        dh.on_gradient(model, "*", lambda grad: None, at="local") as hook,
        dh.gradients(model, optimizer, rules=LOCAL, stats=watched, every=1) as watch,
    ):
        for step in range(2):
            if step == thaw_at:
                for parameter in parts:
                    parameter.requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, step, engine, rank).backward()
            optimizer.step()
    largest = {name: float(grad.abs().max()) for name, grad in grads_of(model).items()}
    own = {name: watch.latest[f"grad_norm/min_rank/param/{name}"] for name in largest}
    return {"largest": largest, "own": own, "calls": hook.report()}


CASES = [(engine, thaw_at) for engine in ["plain", *ENGINES] for thaw_at in (0, 1) if (engine, thaw_at) != ("ddp", 1)]


@pytest.mark.dist
@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"))
@pytest.mark.parametrize(("engine", "thaw_at"), CASES)
def test_an_unfrozen_parameter_is_seen(ranks: Ranks, engine: str, thaw_at: int) -> None:
    for found in ranks(_train, engine, thaw_at):
        assert len(found["largest"]) == 8
        assert all(0 < value <= BOUND * 1.001 for value in found["largest"].values()), found["largest"]
        assert all(norm > 0 for norm in found["own"].values()), found["own"]
        thawed = {name: calls for name, calls in found["calls"].items() if name.startswith(("embed", "head"))}
        assert set(thawed.values()) == {2 - thaw_at}


def _later(rank: int) -> list[str]:
    """DDP took the model when a part of it was frozen, and never reduces that part."""
    found = []
    for before in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if before:
            model[0].requires_grad_(True)
        try:
            with dh.gradients(wrapped, optimizer, rules=LOCAL):
                model[0].requires_grad_(True)
                wrapped(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        except AttachError as error:
            found.append(str(error))
    return found


@pytest.mark.dist
def test_what_ddp_never_reduces_is_an_error(ranks: Ranks) -> None:
    for when_attaching, in_the_step in ranks(_later):
        assert when_attaching.startswith("2 of the parameters were frozen when DDP took the model")
        assert in_the_step.startswith("'0.weight' was frozen when DDP took the model")


def _zero(rank: int, stage: int) -> dict[str, int]:
    engine = engine_of(stage)
    engine.module.embed.weight.requires_grad_(False)
    with dh.on_gradient(engine, "embed.*", lambda grad: None, at="local") as hook:
        engine.module.embed.weight.requires_grad_(True)
        engine.backward(zero_loss(engine, 0, rank).float())
        engine.step()
    return hook.report()


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_deepspeed(ranks: Ranks, stage: int) -> None:
    pytest.importorskip("deepspeed")
    assert ranks(_zero, stage) == [{"embed.weight": 1, "embed.bias": 1}] * 2


def test_a_parameter_that_is_frozen_later() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=LOCAL):
        model.weight.requires_grad_(False)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert model.weight.grad is None
    assert model.bias.grad.tolist() == pytest.approx([BOUND] * 2)


def test_what_can_never_need_a_gradient_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    with dh.on_gradient(model, "*", lambda grad: grad * 2, at="local") as hook:
        model(torch.ones(1, 2)).sum().backward()
    assert hook.report() == {"weight": 1, "bias": 1, "count": 0}
    assert not model.count.requires_grad
