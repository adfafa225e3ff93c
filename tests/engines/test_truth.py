"""Law 11 in the situations that training meets: every engine gives what a single process gives in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks import stats
from tests.support.engines import FIRST, close
from tests.support.ranks.harness import Ranks
from tests.support.ranks.truth import SITUATIONS, Model, run

pytestmark = pytest.mark.dist

STATS = [stats.Norm(per_parameter=True), stats.Norm(1.0), stats.MaxAbs(per_parameter=True), stats.NonFinite()]
STATS += [stats.Moments(per_parameter=True), stats.Extremes(per_parameter=True), stats.Zeros(), stats.Histogram()]
STATS += [stats.Weights(per_parameter=True), stats.Updates(per_parameter=True)]
PLANS: list[tuple[str, list[Any], list[Any]]] = [
    ("statistics", [], STATS),
    ("norm", [dh.ClipNorm(1.0)], []),
    ("norm of each", [dh.ClipNorm(0.5, by="parameter")], []),
    ("value", [dh.ClipValue(0.05)], [stats.Norm(), stats.Activations()]),
    ("value then norm", [dh.ClipValue(0.5), dh.ClipNorm(1.0)], []),
    ("some", [dh.only("mid.*", dh.ClipNorm(0.5)), dh.only("head.*", dh.ClipValue(0.01))], [stats.Norm()]),
    ("units", [dh.SkipNonFinite(), dh.ClipAdaptive(0.5)], []),
    ("history", [dh.Sanitize(), dh.ClipPercentile(50.0), dh.Scale(0.5), dh.ClipZScore(max_norm=2.0)], [stats.Norm()]),
]
# What rounding in float32 moves by more than a little: differences, elements at the edge of a bin.
UNLIKE = ("grad_histogram", "grad_mean")
TWO = [(engine, situation) for engine in ("ddp", "fsdp2", "tp") for situation in SITUATIONS] + [("ddp", "unused")]
TWO.remove(("tp", "tied"))  # parallelize_module gives the two names a parameter each
TWO += [("fsdp1", situation) for situation in SITUATIONS] + [("fsdp1none", "no_sync"), ("fsdp1flatnone", "frozen")]
# an optimizer cannot hold a part of a flat parameter
TWO += [("fsdp1flat", situation) for situation in SITUATIONS if situation not in ("groups", "subset")]
#: The situations that FSDP1 meets in the full tier alone.
RARE = ("step", "accumulated", "frozen", "tied", "subset")
FOUR = [("hsdp", situation) for situation in ("step", "no_sync", "tied")]
FOUR += [("fsdp1hybrid", "no_sync"), ("fsdp1hybrid", "groups"), ("fsdp1flathybrid", "accumulated")]
FOUR += [("tp+fsdp2", situation) for situation in ("step", "no_sync", "groups")]


@functools.cache
def truth(situation: str, world: int) -> dict[str, Any]:
    return run(0, world, "plain", situation, PLANS)


def _is_of_ranks(key: str) -> bool:
    """Whether one process does not log it, or has another number of elements: what TP replicates is counted twice."""
    return "lead_rank" in key or (key.startswith("activation") and ("_rank" in key or "nonfinite" in key))


def equal_to_one_process(found: dict[str, Any], situation: str, world: int) -> None:
    expected = truth(situation, world)
    for name, _, _ in PLANS:
        (whole, grads), (their_record, their_grads) = found[name], expected[name]
        their_record = {key: value for key, value in their_record.items() if not _is_of_ranks(key)}
        record = {key: value for key, value in whole.items() if not _is_of_ranks(key)}
        assert record.keys() == their_record.keys()
        for key, value in their_record.items():
            nothing = isinstance(value, float) and abs(value) < 1e-12  # the mean of what adds up to nothing
            assert close(record[key], value, 1e-11) or (nothing and abs(record[key]) < 1e-12), (name, key)
        assert grads.keys() == their_grads.keys(), name
        assert close(grads, their_grads, 1e-11), name


@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"), situation=RARE)
@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.parametrize(("engine", "situation"), TWO)
def test_two_ranks(ranks: Ranks, engine: str, situation: str) -> None:
    for found in ranks(run, 2, engine, situation, PLANS):
        equal_to_one_process(found, situation, 2)


@pytest.mark.parametrize(("engine", "situation"), FOUR)
def test_four_ranks(four: Ranks, engine: str, situation: str) -> None:
    for found in four(run, 4, engine, situation, PLANS):
        equal_to_one_process(found, situation, 4)


@pytest.mark.parametrize("engine", ["ddp in bfloat16", "fsdp2 in bfloat16", "fsdp1 in bfloat16"])
def test_mixed_precision(ranks: Ranks, engine: str) -> None:
    """What bfloat16 made of the gradients is not ours to judge; what is measured and made of those is."""
    for found in ranks(run, 2, engine, "accumulated", PLANS, torch.float32, 0.0):
        given = found["statistics"][1]
        torch.manual_seed(0)  # ClipAdaptive looks at the weights as well
        torch.manual_seed(0)
        model = Model("accumulated")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for name, rules, watched in PLANS:
            for path, parameter in model.named_parameters():
                parameter.grad = given[path].clone()
            with dh.gradients(model, optimizer, rules=rules, stats=watched, every=1, groups={"mid": "mid.*"}) as watch:
                optimizer.step()
            unlike = {key for key, value in watch.latest.items() if not close(found[name][0][key], value, 1e-4)}
            assert all(key.startswith(UNLIKE) for key in unlike), (name, unlike)
            assert close(found[name][1], {n: p.grad for n, p in model.named_parameters()}, 1e-5), name


def test_the_rules_do_something() -> None:
    """Or all of the above would pass without any."""
    found = truth("step", 2)
    untouched = found["statistics"][1]
    for name, rules, _ in PLANS:
        assert not rules or not close(found[name][1], untouched, 1e-3), name
    assert torch.stack([grad.abs().max() for grad in untouched.values()]).max() > 1
