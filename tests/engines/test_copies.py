"""Parameters that several ranks have alike without an engine that knows it: they count once, or are an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from disthooks.errors import AttachError, MatchError, UsageError
from tests.support.ranks.harness import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.first_tier]

RULES = [dh.SkipNonFinite(), dh.ClipNorm(0.5)]


class Moe(nn.Module):
    """A router that all ranks have, and an expert that is each rank's own."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList()
        for rank in ranks:
            torch.manual_seed(10 + rank)
            self.experts.append(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](torch.tanh(self.router(x)))


def _x(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).double()


def _experts(rank: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Plain modules: the loop averages the router's gradients itself."""
    model = Moe([rank]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"experts": "experts.*", "copies": "router.*"}
    with dh.gradients(model, optimizer, rules=RULES, stats=[dh.stats.Norm()], every=1, **options) as watch:
        (100 * model(_x(rank), 0).square().mean()).backward()
        for parameter in model.router.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return watch.latest["grad_norm"], watch.latest["clip_ratio"], {k: v.clone() for k, v in model.state_dict().items()}


def test_experts_on_plain_modules_are_those_of_one_process(ranks: Ranks) -> None:
    model = Moe([0, 1]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=RULES, stats=[dh.stats.Norm()], every=1) as watch:
        sum(100 * model(_x(rank), rank).square().mean() for rank in range(2)).backward()
        optimizer.step()
    for rank, (norm, ratio, state) in enumerate(ranks(_experts)):
        assert norm == pytest.approx(watch.latest["grad_norm"], rel=1e-10)
        assert ratio == pytest.approx(watch.latest["clip_ratio"], rel=1e-10)
        for name, value in state.items():
            true = model.state_dict()[name.replace("experts.0", f"experts.{rank}")]
            torch.testing.assert_close(value, true, rtol=1e-10, atol=1e-12)


class Stage(nn.Module):
    """A stage of a pipeline; the first and the last share a weight, under different names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.mid = nn.Linear(4, 4)
        torch.manual_seed(7)
        shared = nn.Parameter(torch.randn(4, 4))
        if rank == 0:
            self.embed = shared
        else:
            self.head = shared


NAMED: dict[str, Any] = {
    "nothing": {},
    "named": {"copies": {("embed", "head"): "world"}},
    "two names": {"copies": {("embed", "head"): None}},
    "no copies": {"copies": ()},
    "no match": {"copies": "tail"},
    "wrong": {"copies": ["mid.weight", "embed"]},
}


def _stages(rank: int, how: str, averaged: bool = True) -> Any:
    model = Stage(rank).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"stats": [dh.stats.Norm()], "every": 1, "process_group": "world", **NAMED[how]}
    try:
        with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], **options) as watch:
            for step in range(2):
                optimizer.zero_grad()
                torch.manual_seed(20 + 2 * step + rank)
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                shared = model.embed if rank == 0 else model.head
                if averaged:
                    dist.all_reduce(shared.grad)
                true = torch.stack([p.grad.square().sum() for p in model.mid.parameters()]).sum()
                dist.all_reduce(true)
                true = float((true + shared.grad.square().sum()).sqrt())
                optimizer.step()
                watch.flush()
        return watch.latest["grad_norm"] / true, len(watch.report().ranks), watch.report().parameters
    except (AttachError, MatchError, UsageError) as error:
        return str(error)


@pytest.mark.parametrize("how", ["named", "two names"])
def test_a_weight_that_two_stages_share_counts_once(ranks: Ranks, how: str) -> None:
    for ratio, many, parameters in ranks(_stages, how):
        assert (ratio, many, parameters) == (pytest.approx(1.0, rel=1e-10), 2, 5)


def test_a_copy_that_nothing_names_is_an_error(ranks: Ranks) -> None:
    for said in ranks(_stages, "nothing"):
        assert "'embed' on the ranks [0] and 'head' on the ranks [1] have the same values" in said
        assert "copies=()" in said


def test_parameters_that_begin_alike_may_be_different_ones(ranks: Ranks) -> None:
    for ratio, _, parameters in ranks(_stages, "no copies"):
        assert (ratio > 1.0, parameters) == (True, 6)


@pytest.mark.parametrize(
    ("how", "said"), [("no match", "copies: no parameter of any rank matches"), ("wrong", "have different values")]
)
def test_copies_that_cannot_be_are_an_error(ranks: Ranks, how: str, said: str) -> None:
    for found in ranks(_stages, how):
        assert said in found


def test_gradients_of_copies_that_nobody_averaged_are_an_error(ranks: Ranks) -> None:
    for found in ranks(_stages, "named", False):
        assert "ranks have different gradients of 'model0.embed'" in found or "different gradients of 'embed'" in found
