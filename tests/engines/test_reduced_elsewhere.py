"""A plain module among several ranks: an error where DDP reduces its gradients, right where each rank trains alone."""

from __future__ import annotations

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
from disthooks.errors import AttachError
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def _before(model: nn.Module, attach: Any) -> nn.Module:
    attach(model)
    return nn.parallel.DistributedDataParallel(model)


def _inside(model: nn.Module, attach: Any) -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel(model)
    attach(wrapped.module)
    return wrapped


def _part(model: nn.Module, attach: Any) -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel(model)
    attach(model[1])
    return wrapped


def _replicated(model: nn.Module, attach: Any, first: bool = True) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    if not first:
        attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicate(model)
    if first:
        attach(model)
    return model


def _replicated_later(model: nn.Module, attach: Any) -> nn.Module:
    return _replicated(model, attach, first=False)


WAYS = {"before": _before, "inside": _inside, "part": _part, "replicate": _replicated, "later": _replicated_later}


def _train(rank: int, way: str) -> str:
    model, attached = _model(), []
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def attach(to: nn.Module) -> None:
        attached.append(dh.gradients(to, optimizer, stats=[stats.Norm()]))

    try:
        model = WAYS[way](model, attach)
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
    return [report.ranks, report.collectives, [(r["step"], r["nonfinite_ranks"]) for r in log]]


def test_ranks_that_train_alone_are_named_by_their_numbers(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    assert ranks(_each_alone, str(tmp_path), False) == [
        [(0,), (0, 0), [(0, [])]],
        [(1,), (0, 0), [(0, []), (1, [1])]],
    ]


def test_a_script_that_reduces_by_itself(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """Every rank sees the NaN, and the one that made it says so."""
    assert ranks(_each_alone, str(tmp_path), True) == [
        [(0,), (0, 0), [(0, []), (1, [])]],
        [(1,), (0, 0), [(0, []), (1, [1])]],
    ]
