"""Law 11 for rules: on every engine what a single process gives on the same global batch, and what torch gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import disthooks as dh
from tests.support.engines import ENGINES, STRATEGIES, close, grads_of, loss_of, make, sharded, train, whole
from tests.support.ranks.harness import Ranks


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
    "percentile": [dh.ClipPercentile(30.0, window=3)],
    "z-score": [dh.ClipZScore(0.5, 0.5, 2), dh.only("*.bias", dh.ClipZScore(0.5, 0.3, 1, to="mean", max_norm=2.0))],
    "noise": [dh.Noise(0.1, seed=3), dh.Scale(0.5)],
    "freeze": [dh.only(["embed.*", "head.*"], dh.Freeze(until=1)), dh.ClipNorm(1.0)],
    "chain": [dh.SkipNonFinite(), dh.Sanitize(), dh.only("*.bias", dh.ClipValue(0.05)), dh.ClipNorm(1.0)],
}
STEPS = {"percentile": 5, "z-score": 5}


# In float32 the batch's two halves add up a little differently (which has nothing to do with the rules), and a
# rule that makes the large gradients small makes that difference large.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-6}
# More steps make it larger, and a z-score divides it by how little the norms vary.
FLOAT32 = {"value then norm": 1e-5, "percentile": 1e-5, "z-score": 1e-4}
LOOSER = {(torch.float32, name): tolerance for name, tolerance in FLOAT32.items()}


@pytest.mark.dist
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_equals_one_process(ranks: Ranks, engine: str, dtype: torch.dtype) -> None:
    truths = _all(0, "plain", dtype)
    for found in ranks(_all, engine, dtype):
        assert found.keys() == truths.keys() - ({"freeze"} if engine == "fsdp1flat" else set())
        for name in found:
            assert close(found[name], truths[name], LOOSER.get((dtype, name), TOLERANCES[dtype])), name
        assert close(found["norm"], truths["norm"])
    untouched = {n: train(0, "plain", dtype=dtype, stats=[dh.stats.Norm()], steps=n)[1] for n in (2, 5)}
    assert close(truths["norm not reached"][1], untouched[2], 0.0)
    changed = [name for name in RULES if not close(truths[name][1], untouched[STEPS.get(name, 2)], 1e-3)]
    assert changed == [name for name in RULES if name != "norm not reached"]


def _all(rank: int, engine: str, dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: train(rank, engine, rules, dtype=dtype, steps=STEPS.get(name, 2))
        for name, rules in RULES.items()
        if (name, engine) != ("freeze", "fsdp1flat")  # which updates all of a unit in one piece
    }


def _frozen(rank: int) -> str:
    with pytest.raises(dh.errors.AttachError) as raised:
        train(rank, "fsdp1flat", RULES["freeze"])
    return str(raised.value)


@pytest.mark.dist
def test_a_part_of_a_flat_parameter_cannot_be_frozen(ranks: Ranks) -> None:
    assert all("in one piece: set requires_grad_(False)" in message for message in ranks(_frozen))


@pytest.mark.dist
@pytest.mark.parametrize(
    "engine",
    ["hsdp12", "ignored", *(f"{mode}{name}" for mode in ("fsdp1", "fsdp1flat") for name in STRATEGIES if name)],
)
def test_meshes_and_parameters_beside_them(ranks: Ranks, engine: str) -> None:
    truth = train(0, "plain", RULES["norm"])
    for found in ranks(_beside if engine == "ignored" else _norm, engine):
        assert close(found, truth)


def _norm(rank: int, engine: str) -> Any:
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


def test_clip_norm_in_float64_by_hand() -> None:
    model = make("plain", torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model, 0, "plain").backward()
    before = grads_of(model)
    norm = math.sqrt(sum(float(x) ** 2 for g in before.values() for x in g.flatten()))
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(0.3)]) as watch:
        optimizer.step()
    assert close(watch.latest["grad_norm"], norm, 1e-14)
    assert close(grads_of(model), {k: g * (0.3 / (norm + 1e-6)) for k, g in before.items()}, 1e-14)


def test_clip_value_equals_torch() -> None:
    _, found = train(0, "plain", [dh.ClipValue(0.05)], steps=1)
    model = make("plain")
    loss_of(model, 0, "plain").backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    assert close(found, grads_of(model), 0.0)


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


def test_nan_spreads_as_torch_has_it() -> None:
    _, found = train(0, "plain", [dh.ClipNorm(1.0)], spoil=_spoil)
    assert all(torch.isnan(grad).all() for grad in found.values())


def _spoil(model: torch.nn.Module, step: int, rank: int) -> None:
    model.scale.grad[0, 0] = math.nan


def test_complex_gradients() -> None:
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
