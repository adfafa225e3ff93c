"""DDP: plain modules beside it, branches that one rank does not use, torch's own optimizers and loops."""

from __future__ import annotations

import functools
import math
import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import AttachError, DisthooksError
from tests.support.engines import loss_of, make
from tests.support.models import Tiny, tokens
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import GOOD, HOWS, Proof, numbers, prove

pytestmark = pytest.mark.dist


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


WAYS = ["before", "inside", "part", "replicate", "later"]


def _wrapped(model: Any, attach: Any, way: str) -> nn.Module:
    """The model that DDP, or torch's ``replicate``, takes before or after ``attach`` is given it or a part of it."""
    from torch.distributed._composable.replicate import replicate

    if way in ("before", "later"):
        attach(model)
    if way in ("replicate", "later"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replicate(model)
    wrapped = model if way in ("replicate", "later") else nn.parallel.DistributedDataParallel(model)
    if way not in ("before", "later"):
        attach(model[1] if way == "part" else model)
    return wrapped


def _train(rank: int, way: str) -> str:
    model, attached = _model(), []
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def attach(to: nn.Module) -> None:
        attached.append(dh.gradients(to, optimizer, stats=[stats.Norm()]))

    try:
        model = _wrapped(model, attach, way)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    except AttachError as error:
        return str(error)
    finally:
        for watch in attached:
            watch.remove()
    return ""


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_others_reduce_is_an_error(ranks: Ranks, way: str) -> None:
    expected = "_composable.replicate" if way in ("replicate", "later") else "attach after DDP took the model"
    for message in ranks(_train, way):
        assert expected in message


def _each_alone(rank: int, folder: str, reduced: bool) -> list[Any]:
    """Every rank has a model of its own, beside one that DDP has, whose forward calls it."""
    model, critic = nn.parallel.DistributedDataParallel(_model()), _model()
    optimizer, log = torch.optim.SGD(critic.parameters(), lr=0.0), []
    sinks = [log.append, dh.sinks.Jsonl(pathlib.Path(folder, f"{rank}.jsonl"))]
    model.module.register_forward_hook(lambda module, args, output: critic(torch.ones(1, 2)) + 0 * output)
    with dh.gradients(critic, optimizer, stats=[stats.NonFinite()], sinks=sinks, every=50) as watch:
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (math.nan if (rank, step) == (1, 1) else 1.0)).backward()
            for parameter in critic.parameters() if reduced else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    report = watch.report()
    named = [(record["step"], record["nonfinite_ranks"]) for record in log if "nonfinite_ranks" in record]
    return [report.ranks, report.collectives, named]


def test_ranks_that_train_alone_are_named_by_their_numbers(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    assert ranks(_each_alone, str(tmp_path), False) == [[(0,), (0, 0), [(0, [])]], [(1,), (0, 0), [(0, []), (1, [1])]]]


def test_a_script_that_reduces_by_itself(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """Every rank sees the NaN, and the one that made it says so."""
    assert ranks(_each_alone, str(tmp_path), True) == [
        [(0,), (0, 0), [(0, []), (1, [])]],
        [(1,), (0, 0), [(0, []), (1, [1])]],
    ]


# --- Saved tensors


class Branching(Tiny):
    """The second block is used by some ranks only."""

    def forward(self, tokens: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = self.blocks[0](self.embed(tokens))
        return self.norm(self.blocks[1](x) if both else x)


def _unused(rank: int, how: str, folder: str) -> dict[str, Proof]:
    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for i in range(3):
            torch.manual_seed(i)
            model(tokens(seed=10 * i + rank), both=i < 2 and rank != i).square().mean().backward()
            optimizer.step()
            found += numbers(model)
            optimizer.zero_grad()
        return found

    engine = functools.partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
    return prove(Branching, engine, train, how, folder)


@pytest.mark.parametrize("how", HOWS)
def test_ddp_with_a_branch_not_used_on_one_rank(ranks: Ranks, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_unused, how, str(tmp_path)) == [GOOD, GOOD]


# --- Optimizers and loops of torch's own


def _zero(rank: int) -> tuple[list[Any], dict[str, int]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)
    with dh.on_gradient(model, "weight", lambda grad: grad * 3) as hook:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model.module.weight.grad.tolist(), hook.report()


def test_zero_redundancy_optimizer_edits_once(ranks: Ranks) -> None:
    assert ranks(_zero) == [([[3.0, 3.0]], {"weight": 1})] * 2


def _joined(rank: int) -> str:
    model = make("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    try:
        with dh.gradients(model, optimizer, stats=[stats.Norm()], every=1), model.join():
            for _ in range(2 + rank):
                loss_of(model, 0, "ddp", rank).backward()
                optimizer.step()
    except DisthooksError:
        return "told"
    return "fine"


def test_uneven_inputs_under_join_are_refused_or_work(ranks: Ranks) -> None:
    assert len(set(ranks(_joined, timeout=300))) == 1


def _power_sgd(rank: int, way: str) -> list[str]:
    """The warnings of three steps under PowerSGD, whose error feedback keeps a part of each gradient."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = nn.parallel.DistributedDataParallel(_model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if way == "without":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if way == "before":
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]):
            if way == "after":
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            for _ in range(3):
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [str(each.message) for each in told if "keeps a part of the gradients" in str(each.message)]


@pytest.mark.parametrize(("way", "many"), [("before", 1), ("after", 1), ("without", 0)])
def test_a_communication_hook_that_keeps_gradients_is_said(ranks: Ranks, way: str, many: int) -> None:
    for told in ranks(_power_sgd, way):
        assert len(told) == many
        assert all(each.startswith("DDP's communication hook (PowerSGDState)") for each in told)
