"""One model on every engine, in the situations that training meets, and the same in a single process.

Each rank has its share of one global batch. ``run`` is what happens on a rank, ``run(0, 1, "plain", ...)`` is the
truth: the same losses, of all shares, in one process without any engine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import disthooks as dh
from tests.support.engines import Net, flat, grads_of, sharded, unsynced, where

Micro = tuple[torch.Tensor, bool]  # data, and whether the branch is taken
ROWS = 4  # of the batch, a rank
SITUATIONS = ["step", "accumulated", "no_sync", "frozen", "tied", "groups", "subset"]


class Model(Net):
    """Beside what ``Net`` has, a branch that the first share of the batch alone takes, and if asked for a weight with
    two names."""

    def __init__(self, situation: str) -> None:
        super().__init__()
        self.side = nn.Linear(5, 5)
        self.twice = nn.Linear(5, 5, bias=False)
        if situation == "tied":
            self.twice.weight = self.side.weight
        if situation == "frozen":
            self.embed.requires_grad_(False)

    def forward(self, x: torch.Tensor, side: bool) -> torch.Tensor:
        x = self.mid(self.embed(x)) * self.scale
        x = self.twice(x) + (self.side(x) if side else 0.0)
        return nn.functional.linear(x, self.head.weight)


def shares(world: int, situation: str, dtype: torch.dtype) -> list[list[Micro]]:
    """For each rank its micro-batches."""
    x = torch.randn(world * ROWS, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = 2 if situation in ("accumulated", "no_sync") else 1
    return [
        [(micro, situation != "unused" or rank == 0) for micro in share.chunk(parts)]
        for rank, share in enumerate(x.chunk(world))
    ]


def loss(model: nn.Module, micro: Micro, weight: float) -> torch.Tensor:
    x, side = micro
    return model(x, side).square().mean() * 100.0 * weight


def make(engine: str, situation: str, world: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return ENGINES[engine](Model(situation).to(dtype), situation, world)


def _plain(model: nn.Module, situation: str, world: int) -> nn.Module:
    return model


def _ddp(model: nn.Module, situation: str, world: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=situation == "unused")


def _fsdp2(model: nn.Module, situation: str, world: int) -> nn.Module:
    return sharded(model, shape=(world,))


def _hsdp(model: nn.Module, situation: str, world: int) -> nn.Module:
    return sharded(model, shape=(2, world // 2))


def _mixed(model: nn.Module, situation: str, world: int) -> nn.Module:
    """Forward, backward and reduction in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return sharded(model, shape=(world,), mp_policy=policy)


def _mixed1(model: nn.Module, situation: str, world: int) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecision

    return flat(model, "fsdp1", ("mid",), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def _autocast(model: nn.Module, situation: str, world: int) -> nn.Module:
    model.forward = torch.autocast(where(), torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    return nn.parallel.DistributedDataParallel(model)


def _fsdp1(model: nn.Module, situation: str, world: int, engine: str) -> nn.Module:
    """A module that is frozen in a unit of its own: a flat parameter needs a gradient as a whole."""
    from torch.distributed.device_mesh import init_device_mesh

    options: dict[str, Any] = {}
    if "hybrid" in engine:
        options["device_mesh"] = init_device_mesh(where(), (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return flat(model, engine, ("mid", "embed"), **options)


FLAT = ["fsdp1", "fsdp1none", "fsdp1hybrid", "fsdp1flat", "fsdp1flatnone", "fsdp1flathybrid"]


def _tp(model: Any, situation: str, world: int) -> nn.Module:
    """Linear layers cut over all ranks, the rest plain tensors that every rank has."""
    from torch.distributed.device_mesh import init_device_mesh

    return _cut(model, init_device_mesh(where(), (world,), mesh_dim_names=("tp",)))


def _both(model: Any, situation: str, world: int) -> nn.Module:
    """Linear layers cut over two ranks, everything sharded over the others: DTensors on two meshes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(where(), (world // 2, 2), mesh_dim_names=("dp", "tp"))
    _cut(model, mesh["tp"])
    fully_shard(model.mid, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def _cut(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan = {"mid.1": ColwiseParallel(output_layouts=Replicate()), "side": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


ENGINES: dict[str, Any] = {
    "plain": _plain,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "ddp in bfloat16": _autocast,
    "fsdp2 in bfloat16": _mixed,
    "fsdp1 in bfloat16": _mixed1,
    "tp+fsdp2": _both,
    **{engine: functools.partial(_fsdp1, engine=engine) for engine in FLAT},
}


def position(rank: int, world: int, engine: str) -> tuple[int, int]:
    """Which share of the batch a rank has, and how many there are: tensor parallelism has several ranks work on one."""
    return {"tp": (0, 1), "tp+fsdp2": (rank // 2, world // 2)}.get(engine, (rank, world))


def optimizer_for(model: nn.Module, situation: str, lr: float) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    if situation == "groups":
        biases = [p for name, p in named.items() if "bias" in name]
        others = [p for name, p in named.items() if "bias" not in name]
        return torch.optim.SGD([{"params": biases, "lr": 2 * lr}, {"params": others}], lr=lr, foreach=False)
    chosen = [p for name, p in named.items() if situation != "subset" or "mid" in name or "head" in name]
    return torch.optim.SGD(chosen, lr=lr, foreach=False)


def backward(model: nn.Module, work: Sequence[tuple[Micro, float]], situation: str) -> None:
    """All micro-batches of this rank, with the weight of each in the mean over the ranks."""
    for i, (micro, weight) in enumerate(work):
        with unsynced(model, situation == "no_sync" and i < len(work) - 1):
            loss(model, micro, weight).backward()


def work_of(rank: int, world: int, engine: str, situation: str, dtype: torch.dtype) -> list[tuple[Micro, float]]:
    """The micro-batches of a rank; of all ranks for a single process."""
    at, count = (0, 1) if engine == "plain" else position(rank, world, engine)
    width = world // count
    mine = shares(world, situation, dtype)[at * width : (at + 1) * width]
    return [(micro, 1 / (width * len(share))) for share in mine for micro in share]


def run(
    rank: int,
    world: int,
    engine: str,
    situation: str,
    plans: Sequence[tuple[str, Sequence[Any], Sequence[Any]]],
    dtype: torch.dtype = torch.float64,
    lr: float = 1e-4,
) -> dict[str, Any]:
    """For each plan (a name, rules, statistics): what was logged and the gradients that the optimizer was given."""
    model = make(engine, situation, world, dtype)
    optimizer = optimizer_for(model, situation, lr)
    work = work_of(rank, world, engine, situation, dtype)
    found = {}
    for name, rules, stats in plans:
        model.zero_grad()
        with dh.gradients(model, optimizer, rules=rules, stats=stats, every=1, groups={"mid": "mid.*"}) as watch:
            backward(model, work, situation)
            optimizer.step()
        found[name] = watch.latest, grads_of(model)
    return found
