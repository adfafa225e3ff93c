"""Steps on gradients that were not reduced: every rank says so, at once, whatever elements it holds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import disthooks as dh
from disthooks.errors import UsageError
from tests.support.engines import flat, unsynced
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


class Small(nn.Module):
    """Rank 1 has no element of it where one row is sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(x).square().sum()


def _batch(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)
    return torch.randn(3, 4)


def _wrapped(engine: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(Small())
    if engine.startswith("fsdp1"):
        return flat(Small(), engine, parts=())
    return fully_shard(Small(), mesh=init_device_mesh("cpu", (2,)))


def _refused(rank: int, engine: str) -> list[Any]:
    model = _wrapped(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    said: list[Any] = []
    with dh.gradients(model, optimizer, rules=[dh.ClipPercentile(window=5)], stats=[dh.stats.Norm()], every=1) as watch:
        for step in range(4):
            model.zero_grad()
            for micro in range(2):
                with unsynced(model, step == 2 or micro == 0):
                    model(_batch(rank, 2 * step + micro)).backward()
                if micro == 0 and engine == "ddp":  # FSDP1 clips by a method of its own
                    clip_grad_norm_(model.parameters(), 1e9)
            try:
                optimizer.step()
                said.append("stepped")
            except UsageError as error:
                said.append("no_sync" in str(error) or "set_requires_gradient_sync(True)" in str(error))
        return [said, watch.steps]


@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat", "fsdp1none"))
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp1flat", "fsdp1none", "fsdp2"])
def test_every_rank_raises(ranks: Ranks, engine: str) -> None:
    truth = [["stepped", "stepped", True, "stepped"], 3]
    assert ranks(_refused, engine, timeout=120) == [truth] * 2


def _local_sgd(rank: int) -> list[Any]:
    """accelerate's LocalSGD: ranks step by themselves, and average their weights now and then."""
    model = _wrapped("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    true = []
    with (
        warnings.catch_warnings(record=True) as told,
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], every=1) as watch,
    ):
        warnings.simplefilter("always")
        seen = []
        for step in range(4):
            model.zero_grad()
            if step % 2:
                model(_batch(rank, step)).backward()
                with torch.no_grad():  # an evaluation in between says nothing about reduction
                    model(_batch(rank, step))
                true.append(float(model.module.row.weight.grad.norm()))
                optimizer.step()
            else:
                with unsynced(model):
                    model(_batch(rank, step)).backward()
                    optimizer.step()
            watch.flush()
            seen.append(watch.latest.get("step"))
            if step % 2:
                true.append(watch.latest["grad_norm"])
        count = sum("no_sync" in str(each.message) for each in told)
    return [seen, count, watch.steps, true[0] == pytest.approx(true[1]), true[2] == pytest.approx(true[3])]


def test_statistics_leave_local_steps_out(ranks: Ranks) -> None:
    assert ranks(_local_sgd, timeout=120) == [[[None, 1, 1, 3], 1, 4, True, True]] * 2


def _clipped(rank: int, engine: str) -> list[Any]:
    model = _wrapped(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[dh.stats.Norm()], every=1) as watch:
        found = []
        for step in range(3):
            model.zero_grad()
            model(_batch(rank, step)).backward()
            if engine.startswith("fsdp1"):
                seen = model.clip_grad_norm_(1e-3)
            else:
                seen = clip_grad_norm_(model.parameters(), 1e-3)
            seen = seen.full_tensor() if hasattr(seen, "full_tensor") else seen
            optimizer.step()
            watch.flush()
            found.append(watch.latest["grad_norm"] == pytest.approx(float(seen), rel=1e-5) and float(seen) > 1e-2)
    return found


@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat", "fsdp1none"))
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp1flat", "fsdp2"])
def test_a_loop_that_clips_is_measured_before(ranks: Ranks, engine: str) -> None:
    assert ranks(_clipped, engine, timeout=120) == [[True] * 3] * 2


def _replicated(rank: int) -> list[Any]:
    """Two replicas of two shards; a row of one element leaves a rank of each replica without any."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(Small(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    said: list[Any] = []
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1e9)], stats=[dh.stats.Norm()], every=1) as watch:
        for step in range(4):
            model.zero_grad()
            for micro in range(2):
                model.set_requires_all_reduce(step != 2 and micro == 1)
                model(_batch(rank, 2 * step + micro)).backward()
            try:
                optimizer.step()
                watch.flush()
                said.append(watch.latest["grad_norm"])
            except UsageError as error:
                said.append("set_requires_all_reduce(True)" in str(error))
        return [said, watch.steps]


def _norm(batches: list[int]) -> float:
    """The norm of the gradient of these batches of four ranks, in a single process."""
    model = Small().double()
    for batch in batches:
        for rank in range(4):
            (model(_batch(rank, batch).double()) / 4).backward()
    return float(model.row.weight.grad.norm())


def test_replicas_that_were_not_reduced_with_each_other(four: Ranks) -> None:
    """The partial sums of a refused step stay with FSDP2, which adds them to the next gradient, as without hooks."""
    for said, steps in four(_replicated, timeout=120):
        assert said[2] is True
        assert steps == 3
        wanted = [_norm([0, 1]), _norm([2, 3]), _norm([4, 5, 6, 7])]
        assert [said[0], said[1], said[3]] == pytest.approx(wanted, rel=1e-5)
