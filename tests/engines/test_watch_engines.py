"""Watching on real ranks: DDP, FSDP1 and FSDP2 train bit for bit as without, under the model's own names."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import disthooks as dh
from tests.support.engines import loss_of, make
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


def _train(rank: int, engine: str, watched: bool) -> tuple[list[torch.Tensor], Any, Any]:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, calls = None, None
    with contextlib.ExitStack() as stack:
        features = stack.enter_context(dh.features(model, "*", copy=True)) if watched else None
        traced = stack.enter_context(dh.trace(model, print=None)) if watched else None
        for step in range(3):
            loss_of(model, step, engine, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        if features is not None and traced is not None:
            seen = {name: tuple(value.shape) for name, value in features.items()}
            calls = {row.name: row.calls for row in traced.report().rows}
    return [getattr(w, "_local_tensor", w).detach().clone() for w in model.parameters()], seen, calls


def _both(rank: int, engine: str) -> tuple[bool, Any, Any]:
    (plain, _, _), (watched, seen, calls) = _train(rank, engine, False), _train(rank, engine, True)
    return all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)), seen, calls


@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_training_is_bit_identical_and_names_are_the_models(ranks: Ranks, engine: str) -> None:
    widths = {"": 3, "embed": 7, "mid": 5, "mid.0": 7, "mid.1": 5, "mid.2": 5}
    for same, seen, calls in ranks(_both, engine):
        assert same
        assert seen == {name: (4, width) for name, width in widths.items()}
        assert calls == dict.fromkeys(widths, 3)
