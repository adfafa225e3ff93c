"""blame() on real ranks: which rank, which forward, which module; and training goes on bit for bit as without."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import disthooks as dh
from disthooks._match import canonical_name
from tests.support.engines import all_reduces, data, make
from tests.support.ranks.harness import Ranks
from tests.support.zero import engine_of
from tests.support.zero import loss_of as zero_loss

pytestmark = pytest.mark.dist


def _train(rank: int, engine: str, watched: bool, spoil: bool) -> tuple[list[torch.Tensor], Any]:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = dh.blame(model) if watched else None
    for step in range(3):
        x = data(step)
        if spoil and step == 1 and rank == 1:
            x[0, 0] = 3e38  # finite, and so is the loss of the other rank
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if spoil and step == 1:
            break
        optimizer.step()
    weights = [getattr(w, "_local_tensor", w).detach().clone() for w in model.parameters()]
    return weights, found


def _both(rank: int, engine: str) -> tuple[bool, str, list[Any], str, list[tuple[int, int]]]:
    (plain, _), (watched, quiet) = _train(rank, engine, False, False), _train(rank, engine, True, False)
    same = all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    _, found = _train(rank, engine, True, True)
    local = found.report()
    reduced: list[tuple[str, int]] = []
    gathered: list[tuple[int, int]] = []
    true = dist.all_gather

    def counted(rows: Any, numbers: torch.Tensor, **kwargs: Any) -> Any:
        gathered.append((len(rows), numbers.nbytes))
        return true(rows, numbers, **kwargs)

    with mock.patch.object(dist, "all_gather", counted), mock.patch.object(dist, "all_reduce", all_reduces(reduced)):
        everywhere = found.report(all_ranks=True)
    assert reduced == []
    entries = [(b.rank, b.forward, b.module, b.inputs_finite, b.weights_finite) for b in everywhere.found]
    return same, str(quiet.report(all_ranks=True)), entries, str(local), gathered


@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "hsdp"])
def test_the_rank_and_its_module_are_named_on_every_rank(ranks: Ranks, engine: str) -> None:
    for rank, (same, quiet, entries, local, gathered) in enumerate(ranks(_both, engine)):
        assert same
        assert quiet == "3 forwards, 18 module calls: every output and gradient was finite"
        assert entries == [(1, 1, "mid.0", True, True)]  # the LayerNorm squares it
        assert gathered == [(2, 432)]
        assert ("rank 1, forward 1: mid.0 (LayerNorm)" in local) == (rank == 1)


def _in_backward(rank: int, engine: str) -> Any:
    """On rank 1 the backward of one module gives NaN in the second step; every output is finite."""
    if engine.startswith("zero"):
        made: Any = engine_of(int(engine[-1]))
        model, backward, step, of = made, made.backward, made.step, "mid.0"
        batches = [lambda i=i: zero_loss(made, i, rank).float() for i in range(2)]
    else:
        model = make(engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        backward, step, of = torch.Tensor.backward, optimizer.step, "mid.0"
        batches = [lambda i=i: model(data(i)).square().mean() for i in range(2)]
    found = dh.blame(model)
    (layer,) = (module for name, module in model.named_modules() if canonical_name(name).endswith(of))
    for i, loss in enumerate(batches):
        if i == 1 and rank == 1:
            layer.register_full_backward_hook(
                lambda m, grads, out: tuple(g if g is None else g * math.nan for g in grads)
            )
        backward(loss())
        step()
    return [(b.rank, b.forward, b.module, b.inputs_finite, b.in_backward) for b in found.report(all_ranks=True).found]


@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero3"])
def test_a_nan_of_backward_names_the_rank_and_the_module(ranks: Ranks, engine: str) -> None:
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    assert ranks(_in_backward, engine) == [[(1, 1, "mid.0", True, True)]] * 2


def _weights(rank: int, engine: str) -> list[Any]:
    """A weight is spoilt on the rank that has its first elements: under FSDP2 the others gather it."""
    model = make(engine)
    found = dh.blame(model)
    weight = next(p for n, p in model.named_parameters() if n.endswith("head.weight"))
    if rank == 0:
        getattr(weight, "_local_tensor", weight).detach()[0, 0] = math.nan
    with torch.no_grad():
        model(data(0))
    return [(b.rank, b.module, b.kind, b.weights_finite) for b in found.report(all_ranks=True).found]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_weight_that_is_gathered_is_seen_by_all(ranks: Ranks, engine: str) -> None:
    # ``head`` is never called: its weight is used by the model, which has finite inputs and weights of its own.
    who = [0] if engine == "ddp" else [0, 1]
    assert ranks(_weights, engine) == [[(rank, "", "Net", True) for rank in who]] * 2


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def _before_the_engine(rank: int, engine: str) -> tuple[int, int, list[Any]]:
    """Attached first, taken by the engine afterwards; with a checkpoint inside."""
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = Checked()
    found = dh.blame(model)
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model.block)
        fully_shard(model)
    for step in range(3):
        x = data(step)
        x[0] = math.inf if rank == 0 and step == 2 else 1.0
        model(x).sum().backward()
    report = found.report(all_ranks=True)
    return report.forwards, report.calls, [(b.rank, b.forward, b.module, b.inputs_finite) for b in report.found]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_attached_before_the_engine_and_checkpointed(ranks: Ranks, engine: str) -> None:
    assert ranks(_before_the_engine, engine) == [(3, 15, [(0, 2, "block.0", False)])] * 2


def _other_models(rank: int) -> list[Any]:
    """A plain model on each rank, and not the same: stages of a pipeline."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()) if rank else nn.ModuleDict({"a": nn.Linear(2, 2)})
    found = dh.blame(model)
    (model if rank else model["a"])(torch.full((1, 2), math.nan))
    return [(b.rank, b.module, b.kind) for b in found.report(all_ranks=True).found]


def test_ranks_may_have_different_models(ranks: Ranks) -> None:
    assert ranks(_other_models) == [[(0, "a", "Linear"), (1, "0", "Linear")]] * 2
