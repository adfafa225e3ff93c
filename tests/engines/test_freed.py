"""Hooks on gradients keep no model: DDP's reducer and FSDP hold parameters where the garbage collector cannot look."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.engines import loss_of, make
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


def _train(rank: int, name: str, how: str) -> dict[str, Any]:
    """What is left of a model and of what was attached to it, once the script has dropped both."""
    count, left = _trained(rank, name, how)
    gc.collect()
    return {"calls": count, "left": [one() is not None for one in left]}


def _trained(rank: int, name: str, how: str) -> tuple[int, list[weakref.ref[Any]]]:
    model = make(name)
    optimizer = torch.optim.Adam(model.parameters())
    calls = []

    def seen(grad: torch.Tensor) -> None:
        calls.append(model.training)  # a closure over the model, as a user writes it

    if how == "rule":
        hook: Any = dh.gradients(model, optimizer, rules=[dh.only("*", dh.ClipValue(-1.0, 1.0), at="local")])
    else:
        hook = dh.on_gradient(model, "*", seen, at="local")
    left = [weakref.ref(hook), weakref.ref(model)]
    del hook
    for step in range(2):
        gc.collect()  # what nobody holds but the model must go on
        loss_of(model, step, name, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(calls), left


CASES = [("plain", "function"), *((name, how) for name in ("ddp", "fsdp1", "fsdp2") for how in ("function", "rule"))]


@pytest.mark.full_tier(name=("fsdp1",))
@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_dropped_model_is_freed_with_its_local_hooks(ranks: Ranks, name: str, how: str) -> None:
    for each in ranks(_train, name, how):
        assert each["calls"] == (0 if how == "rule" else 16)  # eight parameters, two steps, and nobody kept the hook
        assert each["left"] == [False, False]


def test_a_hook_on_a_part_that_was_made_for_it_goes_on() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    dh.on_gradient(nn.ModuleList([net[0]]), "*", torch.zeros_like, at="local")
    gc.collect()
    net(torch.ones(2, 4)).sum().backward()
    assert not net[0].weight.grad.any()
    assert net[1].weight.grad.any()
