"""Watching on real ranks: DDP, FSDP1 and FSDP2 train bit for bit as without, under the model's own names."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import disthooks as dh
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


def _model(engine: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.LayerNorm(16), nn.ReLU(inplace=True)), nn.Linear(16, 4))
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if engine == "fsdp1":
        model[1] = FullyShardedDataParallel(model[1], use_orig_params=True, device_id=torch.device("cpu"))
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _train(rank: int, engine: str, watched: bool) -> dict[str, Any]:
    model = _model(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank + 1)
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(dh.features(model, "*", copy=True)) if watched else None
        traced = stack.enter_context(dh.trace(model, print=None)) if watched else None
        for _ in range(3):
            model(torch.randn(6, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = [getattr(w, "to_local", lambda w=w: w)().detach().clone() for w in model.parameters()]
    return {
        "weights": weights,
        "seen": {name: tuple(value.shape) for name, value in seen.items()} if seen is not None else None,
        "calls": {row.name: row.calls for row in traced.report().rows} if traced is not None else None,
    }


def _both(rank: int, engine: str) -> tuple[bool, dict[str, Any]]:
    plain, watched = _train(rank, engine, False), _train(rank, engine, True)
    pairs = zip(plain["weights"], watched["weights"], strict=True)
    return all(torch.equal(a, b) for a, b in pairs), {k: v for k, v in watched.items() if k != "weights"}


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_training_is_bit_identical_and_names_are_the_models(ranks: Ranks, engine: str) -> None:
    shapes = {"": (6, 4), "0": (6, 16), "1": (6, 16), "1.0": (6, 16), "1.1": (6, 16), "2": (6, 4)}
    for same, found in ranks(_both, engine):
        assert same
        assert found["seen"] == shapes
        assert set(found["calls"].values()) == {3}
