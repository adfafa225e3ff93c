"""Law 11, truth.

"Any rule and any stat on any engine equals the single-process result on the same global batch."

This file shows it for rules: against torch and float64 in one process, then on engines. Its sibling shows it for
statistics; tests/engines has more engines and more situations.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.engines.base import Engine
from disthooks.grads.plan import VectorLayout
from disthooks.grads.stats.base import Local, LocalStats
from disthooks.grads.stats.norms import Power, norm_label
from tests.support import needs
from tests.support.engines import ENGINES, FIRST, STRATEGIES, close, grads_of, loss_of, make, sharded, train, whole
from tests.support.optimizers import small
from tests.support.ranks.harness import Ranks
from tests.support.rounding import drawn, within

# --- In one process, a rule gives what torch and arithmetic by hand give


def test_clip_value_equals_torch() -> None:
    _, found = train(0, "plain", [dh.ClipValue(0.05)], steps=1)
    model = make("plain")
    loss_of(model, 0, "plain").backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    assert close(found, grads_of(model), 0.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("engine", ["plain", "dp"])
def test_clip_norm_equals_torch(engine: str, norm_type: float) -> None:
    model = make("plain")
    loss_of(model, 1, "plain").backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type)
    truth = grads_of(model)
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(0.7, norm_type)], every=1) as watch:
        loss_of(model, 1, engine).backward()
        optimizer.step()
    label = {1.0: "grad_norm_l1", 2.0: "grad_norm", 3.0: "grad_norm_l3", math.inf: "grad_norm_linf"}[norm_type]
    assert close(grads_of(model), truth)
    assert close(watch.latest[label], float(norm))
    assert close(watch.latest["clip_ratio"], 0.7 / (float(norm) + 1e-6))
    assert close(watch.latest[f"{label}_clipped"], float(norm) * watch.latest["clip_ratio"])


def test_only_measures_what_it_clips() -> None:
    records, found = train(0, "plain", [dh.only("*.bias", dh.ClipNorm(0.5))], steps=1)
    model = make("plain")
    loss_of(model, 0, "plain").backward()
    norm = torch.nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if n.endswith(".bias")], 0.5)
    assert close(found, grads_of(model))
    assert close(records[0]["grad_norm/*.bias"], float(norm))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_do_not_overflow(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    model = torch.nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    weight.grad = torch.full((1000,), 300.0, dtype=dtype)  # 300 squared is infinite in float16
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[dh.stats.NonFinite()]) as watch:
        optimizer.step()
    assert watch.latest["nonfinite"] == 0
    assert close(watch.latest["grad_norm"], 300 * math.sqrt(1000))
    assert close(float(weight.grad.double().norm()), 1.0, 1e-2)


def _spoil(model: torch.nn.Module, step: int, rank: int) -> None:
    model.scale.grad[0, 0] = math.nan


def test_nan_spreads_as_torch_has_it() -> None:
    _, found = train(0, "plain", [dh.ClipNorm(1.0)], spoil=_spoil)
    assert all(torch.isnan(grad).all() for grad in found.values())


def test_complex_gradients_are_clipped_by_norm_alone() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    model = torch.nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    weight.grad = torch.tensor([3 + 4j, 0j])
    with pytest.raises(dh.errors.UsageError, match="'0' is complex"):
        dh.gradients(model, optimizer, rules=[dh.ClipValue(1.0)])
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]) as watch:
        optimizer.step()
    assert watch.latest["grad_norm"] == 5.0
    assert close(whole(weight.grad), torch.tensor([0.6 + 0.8j, 0j]))


def test_an_infinite_first_norm_with_percentile_is_as_with_clip_norm() -> None:
    found = []
    for rule in (dh.ClipPercentile(), dh.ClipNorm(1.0)):
        model, optimizer = small()
        model.weight.grad, model.bias.grad = torch.tensor([[1.0, math.inf], [2.0, 3.0]]), torch.ones(2)
        with dh.gradients(model, optimizer, rules=[rule]):
            optimizer.step()
        found.append(model.weight.grad)
    assert torch.equal(found[0].isnan(), found[1].isnan())


# --- Norms of any order are right for every float32


ORDERS = [0.5, 1.0, 2.0, 3.0, 6.0]
SIZES = [1e-38, 1e-30, 1e-20, 1e-6, 1.0, 300.0, 5e18, 1e30, 1e37]


def _truth(elements: torch.Tensor, p: float) -> float:
    peak = elements.double().abs().max()
    return float(peak * torch.linalg.vector_norm(elements.double() / peak, p))


def _norm(parts: list[list[torch.Tensor]], p: float) -> float:
    """The norm of the gradients of several ranks, each of which has a part of every parameter."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in parts[0]])
    layout = VectorLayout({Power(p): tuple(range(len(parts[0])))}, Engine(model).shards)
    rows = []
    for place, grads in enumerate(parts):
        seen = [LocalStats()] * len(grads)
        rows.append(layout.pack(Local(layout.shards, grads, seen, [], place, len(parts), torch.device("cpu")))[0])
    return float(Power(p).norm(torch.stack(rows).sum(0), dim=0))


@pytest.mark.parametrize("p", ORDERS)
def test_a_norm_of_elements_of_one_size_is_right(p: float) -> None:
    """Of one gradient, of one that two ranks have a part of, and of three."""
    for many in (1, 3, 5000, 200_000):
        elements = torch.randn(many, generator=torch.Generator().manual_seed(many)).clamp(-3, 3)
        for grad in [elements * size for size in (SIZES if many < 5000 else SIZES[::4])]:
            for parts in ([[grad]], [[each] for each in grad.tensor_split(2)], [list(grad.tensor_split(3))]):
                assert _norm(parts, p) == pytest.approx(_truth(grad, p), rel=2e-6, abs=0), (many, float(grad[0]))


@pytest.mark.parametrize("p", [2.0, 4.5, 6.0])
def test_a_norm_of_different_sizes_on_different_ranks_is_right(p: float) -> None:
    for one in SIZES:
        for other in SIZES:
            grads = torch.tensor([one, one]), torch.tensor([other])
            assert _norm([[grads[0]], [grads[1]]], p) == pytest.approx(_truth(torch.cat(grads), p), rel=1e-6, abs=0)


@pytest.mark.parametrize("p", ORDERS)
def test_norms_of_zeros_infinity_and_nan_are_right(p: float) -> None:
    for grad, norm in ([0.0, 0.0], 0.0), ([1.0, math.inf], math.inf), ([1.0, math.nan, math.inf], math.nan):
        assert _norm([[torch.tensor(grad)]], p) == pytest.approx(norm, abs=0, nan_ok=True)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("by", ["all", "parameter"])
def test_clip_norm_of_any_order_is_right(p: float, by: Any) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (4, 1500, 1)])
    for size, limit in ((1e-6, 1e-9), (300.0, 3e9), (1e30, 1e27)):
        grads = [torch.linspace(-1, 1, p.numel()).add(0.1) * size for p in model]
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
    """A step that is logged measures everything in one pass; other steps measure the norm alone."""
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


# --- On engines, a rule gives what one process gives


def shrink(name: str, grad: torch.Tensor) -> torch.Tensor:
    return grad * 0.5 if name.endswith("weight") else grad


# A new rule is proven by one more line.
RULES: dict[str, list[Any]] = {
    "value": [dh.ClipValue(0.05)],
    "value between": [dh.ClipValue(-0.02, 0.5)],
    "norm": [dh.ClipNorm(1.0)],
    "norm not reached": [dh.ClipNorm(1e6)],
    "norm l1": [dh.ClipNorm(1.0, 1.0)],
    "norm l3": [dh.ClipNorm(1.0, norm_type=3.0)],
    "norm inf": [dh.ClipNorm(0.1, math.inf)],
    "only": [dh.only("*.bias", dh.ClipNorm(0.5)), dh.only(["embed.*", "scale"], dh.ClipValue(0.01))],
    "value then norm": [dh.ClipValue(0.5), dh.ClipNorm(1.0)],
    "norm then value": [dh.ClipNorm(1.0), dh.ClipValue(0.05)],
    "function": [shrink, dh.ClipNorm(1.0)],
    "norm by parameter": [dh.ClipNorm(0.3, by="parameter")],
    "adaptive": [dh.ClipAdaptive(0.5), dh.ClipNorm(1.0)],
    # The first norm is small: whatever the data, some norm is above those before it.
    "percentile": [dh.ClipNorm({0: 0.1, 1: 1e6}), dh.ClipPercentile(30.0, window=3)],
    "z-score": [dh.ClipZScore(0.5, 0.5, 2), dh.only("*.bias", dh.ClipZScore(0.5, 0.3, 1, to="mean", max_norm=2.0))],
    "schedule": [dh.ClipNorm({0: 2.0, 2: 0.5})],
    "adagc": [dh.AdaGC(ratio=0.7, beta=0.5, warmup_steps=2, max_norm=3.0)],
    "spike": [dh.SkipSpike(sigmas=0.1, window=4, least=2, loss=False), dh.ClipNorm(2.0)],
    "chain": [dh.SkipNonFinite(), dh.Sanitize(), dh.only("*.bias", dh.ClipValue(0.05)), dh.ClipNorm(1.0)],
}
STEPS = {"percentile": 5, "z-score": 5, "adagc": 5, "spike": 5}


def _all(rank: int, engine: str, dtype: torch.dtype) -> dict[str, Any]:
    return {name: train(rank, engine, rules, dtype=dtype, steps=STEPS.get(name, 2)) for name, rules in RULES.items()}


@functools.cache
def _truths() -> dict[str, Any]:
    return _all(0, "plain", torch.float64)


@functools.cache
def _drawn() -> dict[str, list[Any]]:
    return {name: drawn(rules, steps=STEPS.get(name, 2)) for name, rules in RULES.items()}


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_equals_one_process(ranks: Ranks, engine: str, dtype: torch.dtype) -> None:
    for found in [_all(0, "plain", dtype), *ranks(_all, engine, dtype)]:
        assert _truths().keys() - found.keys() <= ({"freeze"} if engine == "fsdp1flat" else set())
        for name, truth in _truths().items():
            if name not in found:
                continue
            if dtype == torch.float64:
                assert close(found[name], truth, 1e-11), name
            else:
                assert within(found[name], truth, _drawn()[name]), name


def test_the_last_of_each_of_these_rules_changes_something() -> None:
    trained = functools.partial(train, 0, "plain", stats=[dh.stats.Norm()], dtype=torch.float64)
    without = {name: trained(rules[:-1], steps=STEPS.get(name, 2))[1] for name, rules in RULES.items()}
    assert close(_truths()["norm not reached"][1], without["norm not reached"], 0.0)
    changed = [name for name in RULES if not close(_truths()[name][1], without[name], 1e-3)]
    assert changed == [name for name in RULES if name != "norm not reached"]


def _ruled_by_norm(rank: int, engine: str) -> Any:
    return train(rank, engine, RULES["norm"])


def _beside(rank: int, engine: str) -> Any:
    """A plain parameter beside DTensors, whose gradient the user averages."""
    model = make("plain")
    sharded(model, ignored_params={model.scale})
    assert not hasattr(model.scale, "placements")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    records = []
    with dh.gradients(model, optimizer, rules=RULES["norm"], every=1) as watch:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, "fsdp2", rank).backward()
            torch.distributed.all_reduce(model.scale.grad)
            model.scale.grad /= 2
            optimizer.step()
            watch.flush()
            records.append(dict(watch.latest))
    return records, grads_of(model)


@pytest.mark.full_tier(engine=tuple(f"{mode}{name}" for mode in ("fsdp1", "fsdp1flat") for name in STRATEGIES))
@pytest.mark.second_tier
@pytest.mark.dist
@pytest.mark.parametrize(
    "engine",
    ["hsdp12", "ignored", *(f"{mode}{name}" for mode in ("fsdp1", "fsdp1flat") for name in STRATEGIES if name)],
)
def test_meshes_and_parameters_beside_them_equal_one_process(ranks: Ranks, engine: str) -> None:
    truth = train(0, "plain", RULES["norm"])
    for found in ranks(_beside if engine == "ignored" else _ruled_by_norm, engine):
        assert close(found, truth)


# --- A predicate is shown the whole parameter, on every engine


def _whole(rank: int, engine: str) -> Any:
    """Predicates of the size and of the number of dimensions."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    large, flat = (lambda name, p: p.numel() > 20), (lambda name, p: p.ndim < 2)
    rules = [dh.only(large, dh.ClipNorm(1.0)), dh.only(flat, dh.Scale(0.0))]
    with dh.gradients(model, optimizer, rules=rules, every=1) as watch:
        loss_of(model, 0, engine, rank).backward()
        optimizer.step()
    (norm,) = [value for name, value in watch.latest.items() if name.startswith("grad_norm/")]
    return norm, grads_of(model)


def _zeroed(rank: int, engine: str) -> dict[str, torch.Tensor]:
    model = make(engine)
    with dh.on_gradient(model, lambda name, p: p.ndim < 2, torch.zeros_like, at="local"):
        loss_of(model, 0, engine, rank).backward()
    return grads_of(model)


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.parametrize(("part", "engine"), [(_whole, "fsdp2"), (_whole, "fsdp1"), (_zeroed, "fsdp1")])
def test_a_predicate_sees_the_whole_parameter(ranks: Ranks, part: Any, engine: str) -> None:
    truth = part(0, "plain")
    for found in ranks(part, engine):
        assert close(found, truth, 1e-5)


def _zero_chosen(rank: int, stage: int) -> list[list[str]]:
    from tests.support import zero

    engine = zero.engine_of(stage)
    found = []
    for predicate in (lambda name, p: p.ndim < 2, lambda name, p: p.numel() > 10):
        with dh.gradients(engine, rules=[dh.only(predicate, dh.ClipNorm(1.0))]) as watch:
            found.append(sorted(watch._runner.plan.shards[i].name for i in watch._runner.plan.rules[0].indices))
    return found


@needs("deepspeed")
@pytest.mark.second_tier
@pytest.mark.dist
def test_a_predicate_sees_the_whole_parameter_under_zero_3(ranks: Ranks) -> None:
    assert ranks(_zero_chosen, 3, timeout=120) == ranks(_zero_chosen, 1, timeout=120)
