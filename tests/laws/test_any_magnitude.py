"""Law 11: norms of any order are right for every float32, and a decision does not depend on who has which elements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.engines.base import Engine
from disthooks.grads.collectives import Layout
from disthooks.grads.stats.base import Local, Seen
from disthooks.grads.stats.norms import Power, norm_label
from tests.support.engines import whole
from tests.support.ranks.harness import Ranks

ORDERS = [0.5, 1.0, 2.0, 3.0, 8.0, 16.0]
SIZES = [1e-38, 1e-30, 1e-20, 1e-6, 1.0, 300.0, 5e18, 1e30, 1e37]


def _truth(elements: torch.Tensor, p: float) -> float:
    peak = elements.double().abs().max()
    return float(peak * torch.linalg.vector_norm(elements.double() / peak, p))


def _norm(parts: list[list[torch.Tensor]], p: float) -> float:
    """Of the gradients of several ranks, which have some for each of the parameters."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in parts[0]])
    layout = Layout({Power(p): tuple(range(len(parts[0])))}, Engine(model).shards)
    rows = []
    for place, grads in enumerate(parts):
        seen = [Seen()] * len(grads)
        rows.append(layout.pack(Local(layout.shards, grads, seen, [], place, len(parts), torch.device("cpu")))[0])
    return float(Power(p).norm(torch.stack(rows).sum(0), dim=0))


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("many", [1, 3, 5000, 200_000])
def test_one_size(p: float, size: float, many: int) -> None:
    grad = torch.randn(many, generator=torch.Generator().manual_seed(many)).clamp(-3, 3) * size
    for parts in ([[grad]], [[each] for each in grad.tensor_split(2)], [list(grad.tensor_split(3))]):
        assert _norm(parts, p) == pytest.approx(_truth(grad, p), rel=2e-6, abs=0)


@pytest.mark.parametrize("p", [7.0, 8.0, 11.5, 16.0])
def test_different_sizes_on_different_ranks(p: float) -> None:
    for one in SIZES:
        for other in SIZES:
            grads = torch.tensor([one, one]), torch.tensor([other])
            assert _norm([[grads[0]], [grads[1]]], p) == pytest.approx(_truth(torch.cat(grads), p), rel=1e-6, abs=0)


@pytest.mark.parametrize("p", [*ORDERS, math.inf])
def test_zeros_infinity_and_nan(p: float) -> None:
    grad = torch.ones(5)
    assert Power(p).norm(_row(grad * 0, p), dim=0) == 0
    assert Power(p).norm(_row(torch.tensor([1.0, math.inf]), p), dim=0) == math.inf
    assert Power(p).norm(_row(torch.tensor([1.0, math.nan, math.inf]), p), dim=0).isnan()


def _row(grad: torch.Tensor, p: float) -> torch.Tensor:
    layout = Layout({Power(p): (0,)}, Engine(nn.ParameterList([nn.Parameter(torch.zeros(1))])).shards)
    packed = layout.pack(Local(layout.shards, [grad], [Seen()], [[0]], 0, 1, torch.device("cpu")))
    return packed[math.isinf(p)]


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("by", ["all", "parameter"])
@pytest.mark.parametrize("size", [1e-6, 300.0, 5e18, 1e30])
def test_clip_norm_of_any_order(p: float, by: Any, size: float) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (4, 1500, 1)])
    grads = [torch.linspace(-1, 1, p.numel()).add(0.1) * size for p in model]
    for limit in (size / 1000, size * 1e7):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for parameter, grad in zip(model, grads, strict=True):
            parameter.grad = grad.clone()
        with dh.gradients(model, optimizer, rules=[dh.ClipNorm(limit, p, by)], every=1) as watch:
            optimizer.step()
        norm = _truth(torch.cat(grads), p)
        each = [norm] * 3 if by == "all" else [_truth(grad, p) for grad in grads]
        for parameter, grad, own in zip(model, grads, each, strict=True):
            factor = min(1.0, limit / (own + 1e-6))
            torch.testing.assert_close(parameter.grad.double(), grad.double() * factor, rtol=2e-6, atol=0)
        after = _truth(torch.cat([parameter.grad for parameter in model]), p)
        name = norm_label(p)
        assert watch.latest[name] == pytest.approx(norm, rel=2e-6)
        assert watch.latest[f"{name}_clipped"] == pytest.approx(after, rel=2e-6)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("size", [1e-25, 5e18, 1e30])
def test_statistics_say_the_same_whatever_is_measured_beside_them(size: float, every: int) -> None:
    """In a step that is logged all is read in one go, in others the norm alone."""
    model = nn.Linear(700, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = [dh.SkipNonFinite(), dh.ClipAdaptive(1e-3), dh.ClipNorm(size)]
    with dh.gradients(model, optimizer, rules=rules, stats=stats.standard(per_parameter=True), every=every) as watch:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, size)
            optimizer.step()
    assert watch.latest["skipped_total"] == 0
    assert watch.latest["grad_norm"] == pytest.approx(math.sqrt(2103) * size, rel=1e-6)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert bool((model.weight.grad != 0).all())


def _skips(rank: int, engine: str) -> tuple[float, float, list[float]]:
    """1500 squares of 5e18 are more than a float32, and 750 of them, which a rank has, are too."""
    torch.manual_seed(0)
    model: Any = nn.Linear(1500, 1, bias=False)
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite(), dh.ClipNorm(1.0, 16.0)], every=1) as watch:
        model(torch.full((1, 1500), 5e18)).sum().backward()
        optimizer.step()
    grads = whole(next(iter(model.parameters())).grad)
    return watch.latest["skipped"], watch.latest["grad_norm_l16"], [float(grads.min()), float(grads.max())]


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["plain", "ddp", "fsdp2"])
def test_a_decision_does_not_depend_on_sharding(ranks: Ranks, engine: str) -> None:
    for skipped, norm, grads in ranks(_skips, engine):
        assert skipped == 0
        assert norm == pytest.approx(5e18 * 1500 ** (1 / 16), rel=1e-6)
        assert grads == pytest.approx([1500 ** (-1 / 16)] * 2, rel=1e-6)
