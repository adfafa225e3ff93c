"""Law 11 for statistics: the same however the tensors are split, and what float64 by hand gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from tests.support.engines import ENGINES, close, first_of, grads_of, is_fsdp1, loss_of, make, train
from tests.support.ranks.harness import Ranks

# A new statistic is proven by one more line.
STATS: list[Any] = [
    stats.Norm(),
    stats.Norm(1.0),
    stats.Norm(3.0, per_parameter=True),
    stats.Norm(math.inf, per_parameter=True),
    stats.MaxAbs(),
    stats.NonFinite(),
    stats.Moments(),  # of some parameters here the mean is zero but for rounding
    stats.Extremes(per_parameter=True),
    stats.Zeros(per_parameter=True),
    stats.Histogram(),
    stats.Weights(per_parameter=True),
    stats.Updates(per_parameter=True),
]
# In float32 the halves of the batch add up a little differently, and a mean near zero shows it.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}
GROUPS = {"mid": "mid.*", "biases": ["*.bias", "scale"]}


def spoil(model: nn.Module, step: int, rank: int) -> None:
    """In step 1 the first element of one gradient is not a number, wherever that element lives."""
    if is_fsdp1(model):
        first = first_of(model, "mid.1.weight")
        if step == 1 and first is not None:
            first[0] = math.nan
        return
    model = getattr(model, "module", model)
    grad = model.mid[1].weight.grad
    local = getattr(grad, "_local_tensor", grad)
    if step == 1 and (local is grad or grad.device_mesh.get_coordinate()[-1] == 0):
        local[0, 0] = math.nan


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("engine", [*ENGINES, "hsdp12", "fsdp1hybrid", "fsdp1none", "fsdp1flatnone"])
def test_every_engine_equals_one_process(ranks: Ranks, engine: str, dtype: torch.dtype) -> None:
    truth = train(0, "plain", [], STATS, 2, spoil, dtype, GROUPS)[0]
    assert truth[0]["nonfinite"] == 0
    assert truth[1]["nonfinite_at"] == [{"param": "mid.1.weight", "count": 1, "rank": None}]
    assert math.isnan(truth[1]["grad_norm"])
    assert math.isnan(truth[1]["grad_max_abs"])  # a MAX over ranks alone may lose it
    assert math.isnan(truth[1]["grad_std/group/mid"])
    assert not math.isnan(truth[1]["grad_std/group/biases"])
    for records, _ in ranks(train, engine, [], STATS, 2, spoil, dtype, GROUPS):
        assert close(records, truth, TOLERANCES[dtype])


def test_by_hand_in_float64() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model, 0, "plain").backward()
    elements = [abs(float(x)) for grad in grads_of(model).values() for x in grad.flatten()]
    with dh.gradients(model, optimizer, stats=STATS) as watch:
        optimizer.step()
    assert close(watch.latest["grad_norm"], math.sqrt(sum(x * x for x in elements)))
    assert close(watch.latest["grad_norm_l1"], sum(elements))
    assert close(watch.latest["grad_norm_l3"], sum(x**3 for x in elements) ** (1 / 3))
    assert watch.latest["grad_max_abs"] == watch.latest["grad_norm_linf"] == max(elements)
    assert watch.latest["update_norm"] == watch.latest["update_ratio"] == 0
    assert sum(watch.latest["grad_histogram"]["counts"]) == len(elements)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_elements_by_hand_in_float64(dtype: torch.dtype) -> None:
    """Of many sizes: less than a row, rows and a rest, more than a block; one empty, one without a gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(3,), (3,), (1,), (40, 50), (0, 4), (5,), (300, 1000), (7000,), (7000,), (4096,), (7000,)]
    weights = nn.ParameterList([nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes])
    for i, weight in enumerate(weights):
        if i != 5:
            grad = (torch.randn(weight.shape, generator=generator) + i % 3).to(dtype)
            weight.grad = grad.where(torch.rand(weight.shape, generator=generator) > 0.1, 0)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.5)
    before = [weight.detach().double().clone() for weight in weights]
    with dh.gradients(
        weights, optimizer, stats=[*STATS, stats.Moments(per_parameter=True)], groups={"few": ["3", "7"]}
    ) as watch:
        optimizer.step()
    scopes = {"": range(len(sizes)), "/group/few": [3, 7]} | {f"/param/{i}": [i] for i in (2, 3, 6, 7, 10)}
    for suffix, scope in scopes.items():
        there = [i for i in scope if weights[i].grad is not None]
        grad = torch.cat([weights[i].grad.double().flatten() for i in there])
        theta = torch.cat([before[i].flatten() for i in scope])
        moved = torch.cat([weights[i].detach().double().flatten() for i in scope]) - theta
        truth = {
            "grad_mean": grad.mean(),
            "grad_std": grad.std(correction=0),
            "grad_min": grad.min(),
            "grad_max": grad.max(),
            "grad_zeros": (grad == 0).double().mean(),
            "param_norm": theta.norm(),
            "update_norm": moved.norm(),
            "update_ratio": moved.norm() / theta.norm(),
        }
        for name, value in truth.items():
            assert close(watch.latest[name + suffix], float(value), 1e-6), name + suffix
    assert watch.latest["grad_norm"] > 0
    assert math.isnan(watch.latest["grad_mean/param/5"])
    assert math.isnan(watch.latest["grad_min/param/4"])


def test_statistics_are_of_the_gradient_before_any_rule() -> None:
    plain = train(0, "plain", [], [stats.Norm(), stats.MaxAbs()], steps=1)[0]
    ruled = train(0, "plain", [dh.ClipValue(0.01), dh.ClipNorm(0.001)], [stats.Norm(), stats.MaxAbs()], steps=1)[0]
    assert {key: ruled[0][key] for key in plain[0]} == plain[0]


def test_watching_changes_no_number() -> None:
    model = make("plain")
    loss_of(model, 0, "plain").backward()
    assert close(train(0, "plain", [], STATS, 1)[1], grads_of(model), 0.0)


@pytest.mark.dist
@pytest.mark.parametrize("engine", ENGINES)
def test_the_rank_and_the_parameter_where_it_began(ranks: Ranks, engine: str) -> None:
    found = ranks(_began, engine)
    assert found[0] == found[1]
    assert found[0] == [[], [{"param": "head.weight", "count": 1, "rank": 1}], []]


def _began(rank: int, engine: str) -> list[object]:
    """In step 1, in the first of two micro-batches, rank 1's own gradient of one parameter breaks."""
    model, bad = make(engine), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def breaks(grad: torch.Tensor) -> torch.Tensor | None:
        return grad.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(math.inf)) if bad else None

    seen = []
    with (
        dh.on_gradient(model, "head.weight", breaks, at="local"),
        dh.gradients(model, optimizer, rules=[_zeros], stats=[stats.NonFinite()], every=1) as watch,
    ):
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                bad[:] = [1] if (rank, step, micro) == (1, 1, 0) else []
                loss_of(model, step, engine, rank).backward()
            optimizer.step()
            watch.flush()
            seen.append(watch.latest["nonfinite_at"])
    return seen


def _zeros(name: str, grad: torch.Tensor) -> torch.Tensor:
    """So that the update leaves the parameters finite."""
    return torch.zeros_like(grad)


@pytest.mark.dist
def test_a_rank_is_not_blamed_for_an_earlier_step(ranks: Ranks) -> None:
    assert ranks(_blamed) == [[[("scale", 1)], [("scale", None)]]] * 2


def _blamed(rank: int) -> list[object]:
    """Rank 1's own gradient breaks in step 0; in step 1 it breaks after the reduction."""
    model, now = make("ddp"), [True]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    with (
        dh.on_gradient(model, "scale", lambda grad: grad * math.inf if rank == 1 and now[0] else None, at="local"),
        dh.gradients(model, optimizer, rules=[_zeros], stats=[stats.NonFinite()], every=1) as watch,
    ):
        for step in range(2):
            now[0] = step == 0
            optimizer.zero_grad()
            loss_of(model, step, "ddp", rank).backward()
            if step == 1:
                model.module.scale.grad[0, 0] = math.nan
            optimizer.step()
            watch.flush()
            seen.append([(item["param"], item["rank"]) for item in watch.latest["nonfinite_at"]])
    return seen


def test_long_sums_keep_their_digits() -> None:
    """torch's own float32 norm on the CPU is about 1e-4 off here."""
    weight = nn.Parameter(torch.zeros(5_000_003))
    weight.grad = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with dh.gradients(nn.ParameterList([weight]), optimizer, stats=[stats.Norm(), stats.Norm(1.0)]) as watch:
        optimizer.step()
    assert close(watch.latest["grad_norm"], float(weight.grad.double().norm()), 1e-7)
    assert close(watch.latest["grad_norm_l1"], float(weight.grad.double().norm(1)), 1e-7)
