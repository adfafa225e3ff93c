"""Law 14 on engines: what is seen when, and ranks that differ from one another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from tests.support.engines import ENGINES, close, grads_of, loss_of, make, sharded, unsynced
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


# --- "local"


def _local(rank: int, engine: str, keep: bool) -> tuple[list[torch.Tensor], dict[str, int], list[str]]:
    """Two steps of two micro-batches; what a local hook saw of a parameter whose module is never called."""
    model = make(engine) if not keep else sharded(make("plain"), engine, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[torch.Tensor] = []

    def see(grad: torch.Tensor) -> None:
        seen.append(grad.clone())

    with dh.on_gradient(model, "head.weight", see, at="local") as hook:
        for step in range(2):
            optimizer.zero_grad()
            with unsynced(model):
                loss_of(model, 2 * step, engine, rank).backward()
            loss_of(model, 2 * step + 1, engine, rank).backward()
            optimizer.step()
    loss_of(model, 0, engine, rank).backward()
    return seen, hook.report(), [type(grad).__name__ for grad in seen]


FSDP1 = ["fsdp1", "fsdp1flat", "fsdp1hybrid", "fsdp1flathybrid", "fsdp1none", "fsdp1flatnone"]
LOCAL = [("ddp", False), ("fsdp2", False), ("fsdp2", True), ("hsdp", False), *((engine, False) for engine in FSDP1)]


@pytest.mark.full_tier(engine=FSDP1)
@pytest.mark.parametrize(("engine", "keep"), LOCAL)
def test_local_is_this_ranks_own_gradient_once_a_micro_batch(ranks: Ranks, engine: str, keep: bool) -> None:
    for rank, (seen, report, kinds) in enumerate(ranks(_local, engine, keep)):
        assert report == {"head.weight": 4}
        assert set(kinds) <= {"Tensor"}
        for batch, grad in enumerate(seen):
            model = make("plain")
            loss_of(model, batch, engine, rank).backward()
            assert close(grad, model.head.weight.grad, 1e-5)


def _edits(rank: int, engine: str, at: str) -> torch.Tensor:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.on_gradient(model, "head.weight", lambda grad: grad * (3.0 if rank == 0 or at == "final" else 1.0), at):
        loss_of(model, 0, engine, rank).backward()
        optimizer.step()
    return grads_of(model)["head.weight"]


@pytest.mark.full_tier(engine=FSDP1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("at", ["local", "final"])
def test_an_edit_reaches_the_update(ranks: Ranks, engine: str, at: str) -> None:
    halves = []
    for rank in range(2):
        model = make("plain")
        loss_of(model, 0, engine, rank).backward()
        halves.append(model.head.weight.grad)
    truth = 1.5 * (halves[0] + halves[1]) if at == "final" else (3 * halves[0] + halves[1]) / 2
    assert all(close(found, truth, 1e-5) for found in ranks(_edits, engine, at))


# --- "final"


def _final(rank: int, engine: str) -> tuple[bool, int]:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0)
    with dh.on_gradient(model, "*bias", lambda grad: grad / grad.norm()) as hook:
        loss_of(model, 0, engine, rank).backward()
        other.step()
        before = sum(hook.report().values())
        optimizer.step()
    found = grads_of(model)
    return all(close(float(g.norm()), 1.0) for n, g in found.items() if n.endswith("bias")), before


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine not in FSDP1])
def test_torchs_own_functions_mean_the_whole_gradient_in_final(ranks: Ranks, engine: str) -> None:
    assert ranks(_final, engine) == [(True, 0)] * 2


# --- ranks that differ


def _none(rank: int, engine: str, who: int) -> dict[str, Any]:
    """One rank steps without having any gradient."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    every = [stats.Norm(), stats.MaxAbs(), stats.NonFinite()]
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=every, every=1) as watch:
        loss_of(model, 0, engine, rank).backward()
        if rank == who:
            optimizer.zero_grad()
        optimizer.step()
    return watch.latest


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_without_gradients_takes_part(ranks: Ranks, engine: str, who: int) -> None:
    one, other = ranks(_none, engine, who)
    assert one == other
    assert 0 < one["grad_norm"] < math.inf


def _checkpointed(rank: int) -> dict[str, int]:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, checkpoint(self.body, x, use_reentrant=False), use_reentrant=False)

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Checkpointed()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with dh.on_gradient(model, "*", lambda grad: None, at="local") as hook:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    return hook.report()


def test_a_checkpointed_layer_used_twice_is_seen_once_a_backward(ranks: Ranks) -> None:
    assert ranks(_checkpointed) == [{"body.weight": 2, "body.bias": 2}] * 2


# --- Four ranks: one dimension of a mesh, with nothing that says that the other one is tensor parallelism


def _on_one_dimension(rank: int, names: str) -> float:
    """Two independent copies (names "same"), or two stages of a pipeline ("stages"), each sharded over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    key = "layer" if names == "same" else f"layer{rank // 2}"
    model = nn.Sequential()
    model.add_module(key, nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)) * (10 if rank > 1 else 1)
    with dh.gradients(model, optimizer, stats=[stats.Norm()], every=1) as watch:
        model(x).square().sum().backward()
        optimizer.step()
    truth = next(model.parameters()).grad.full_tensor().norm()  # over this mesh["dp"]
    return watch.latest["grad_norm"] / float(truth)


@pytest.mark.parametrize("names", ["same", "stages"])
def test_fsdp2_on_one_dimension_of_a_mesh(four: Ranks, names: str) -> None:
    """Each pair's own norm, never a mix of the two."""
    assert four(_on_one_dimension, names) == pytest.approx([1.0] * 4, rel=1e-4)
