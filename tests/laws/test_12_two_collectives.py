"""Law 12, two collectives.

"A round is at most one SUM and one MAX all-reduce, whatever the number of parameters, rules and stats; a step costs
one round, or one more for each measuring rule that follows a rewriting one, known when attached. Fixed order, a
process group of its own; no collective runs inside a hook; a rank that has no gradient takes part all the same. The
bytes do not grow with the world size."

This file counts the collectives of two ranks; tests/engines has thousands of ranks, and ranks that differ or fail.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from disthooks import stats
from tests.support.engines import ENGINES, FIRST, all_reduces, loss_of, make
from tests.support.ranks.harness import Ranks

EVERYTHING = [
    *stats.standard(per_parameter=True),
    *(stats.Norm(1.0), stats.MaxAbs(), stats.Weights(), stats.Spread(per_parameter=True), stats.NoiseScale()),
    *(stats.Activations(), stats.Loss(), stats.Times(), stats.RankMaxAbs(per_parameter=True)),
]


def _count(rank: int, engine: str, rules: list, watched: list, every: int = 2) -> tuple[list, list, object]:
    """What was all-reduced in backward and in each of three steps, and the report that said so before."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = dh.gradients(model, optimizer, rules=rules, stats=watched, every=every)
    in_backward: list[tuple[str, int]] = []
    in_steps: list[list[tuple[str, int]]] = []
    for step in range(3):
        with mock.patch.object(dist, "all_reduce", all_reduces(in_backward)):
            loss_of(model, step, engine, rank).backward()
        in_steps.append([])
        with mock.patch.object(dist, "all_reduce", all_reduces(in_steps[-1])):
            optimizer.step()
    watch.remove()
    return in_backward, [[op for op, _ in step] for step in in_steps], watch.report()


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_one_sum_and_one_max(ranks: Ranks, engine: str) -> None:
    for backward, steps, report in ranks(_count, engine, [dh.ClipNorm(1.0), dh.ClipValue(0.1)], EVERYTHING):
        assert backward == []
        assert steps == [["SUM", "MAX"], ["SUM"], ["SUM", "MAX"]]
        assert report.rounds == 1
        assert report.collectives == (1, 2)


NORM, MAXIMA = [["SUM"]] * 3, [["MAX", "SUM", "MAX"], ["SUM", "MAX"], ["MAX", "SUM", "MAX"]]
UPDATES = [["SUM", "MAX", "SUM"], ["SUM"], ["SUM", "MAX", "SUM"]]
# The engine, rules and statistics; what three steps reduce, of which the second is not logged; the report's rounds.
ROUNDS: list[tuple[str, list, list, list, int]] = [
    ("ddp", [dh.ClipValue(0.1), dh.ClipNorm(1.0), dh.ClipNorm(0.5, math.inf)], [stats.MaxAbs()], MAXIMA, 3),
    ("fsdp2", [dh.ClipNorm(1.0)], [*EVERYTHING, stats.Updates()], UPDATES, 2),
    ("fsdp2", [dh.ClipValue(0.1)], [stats.Norm()], [["SUM"], [], ["SUM"]], 1),
    ("ddp", [dh.only("embed.*", dh.ClipNorm(1.0)), dh.only("mid.*", dh.ClipNorm(1.0)), dh.ClipValue(0.1)], [], NORM, 1),
    ("ddp", [dh.SkipNonFinite(), dh.ClipNorm(1.0)], [], NORM, 1),
    ("ddp", [dh.SkipNonFinite(), dh.ClipPercentile(), dh.ClipZScore()], [], [["SUM"] * 2] * 3, 2),
    ("ddp", [dh.only("*.bias", dh.ClipValue(0.1)), dh.ClipNorm(1.0)], [], NORM, 1),
    ("ddp", [dh.SkipNonFinite(), dh.only("*.bias", dh.ClipValue(0.1)), dh.ClipNorm(1.0)], [], [["SUM"] * 2] * 3, 2),
    ("ddp", [dh.only("*.bias", dh.ClipAdaptive()), dh.only("*.weight", dh.ClipZScore())], [], NORM, 1),
    ("ddp", [dh.only("embed.*", dh.Scale(0.5)), dh.only("mid.*", dh.ClipNorm(1.0, by="parameter"))], [], NORM, 1),
    ("ddp", [dh.Scale(0.5), dh.Sanitize(), dh.ClipNorm(1.0)], [], NORM, 1),
    ("ddp", [dh.Scale(0.5), dh.Sanitize(), dh.only("*", dh.Scale(0.5), at="local")], [], [[]] * 3, 0),
]


def _rounds(rank: int) -> list[Any]:
    return [_count(rank, *plan) for *plan, _, _ in ROUNDS]


@pytest.mark.dist
def test_a_step_has_as_many_rounds_as_its_rules_and_statistics_need(ranks: Ranks) -> None:
    for found in ranks(_rounds):
        for (*plan, expected, rounds), (backward, steps, report) in zip(ROUNDS, found, strict=True):
            assert (backward, steps, report.rounds) == ([], expected, rounds), plan
            assert report.collectives == (len(steps[1]), len(steps[0])), plan


def _many(rank: int, layers: int) -> tuple[int, int, int]:
    """Number of collectives and of float64 numbers in one step, and of parameters."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls: list[tuple[str, int]] = []
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[stats.Norm(), stats.MaxAbs()]):
        model(torch.ones(2, 3)).sum().backward()
        with mock.patch.object(dist, "all_reduce", all_reduces(calls)):
            optimizer.step()
    return len(calls), sum(numel for _, numel in calls), 2 * layers


@pytest.mark.dist
def test_many_parameters_take_as_many_collectives_as_few(ranks: Ranks) -> None:
    (few, small, n), (many, large, m) = ranks(_many, 2)[0], ranks(_many, 40)[0]
    assert few == many == 2
    assert (small, large) == (2 * n, 2 * m)  # one for the norm, shared by rule and statistic, and one for the maximum


def _alone(rank: int) -> list[tuple[str, int]]:
    model, calls = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching = dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=EVERYTHING, every=1)
    with mock.patch.object(dist, "all_reduce", all_reduces(calls)), watching:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return calls


@pytest.mark.dist
def test_a_plain_module_beside_other_ranks_reduces_nothing(ranks: Ranks) -> None:
    assert ranks(_alone) == [[], []]


def _own_group(rank: int) -> tuple[bool, bool]:
    model = make("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    groups: list[object] = []
    true = dist.all_reduce

    def watched(*args: object, group: object = None, **kwargs: object) -> object:
        groups.append(group)
        return true(*args, group=group, **kwargs)

    for _ in range(2):
        with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]):
            loss_of(model, 0, "ddp", rank).backward()
            with mock.patch.object(dist, "all_reduce", watched):
                optimizer.step()
    return groups[0] not in (None, dist.group.WORLD, model.process_group), groups[0] is groups[1]


@pytest.mark.dist
def test_rules_have_a_process_group_of_their_own_made_once(ranks: Ranks) -> None:
    assert ranks(_own_group) == [(True, True)] * 2


# --- Ranks never wait for each other for ever


def _differs(rank: int) -> str:
    model = make("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    names = ["embed.weight", "head.weight"]

    def mine(name: str, parameter: object) -> bool:
        return name == names[rank]

    try:
        dh.gradients(model, optimizer, rules=[dh.only(mine, dh.ClipNorm(1.0))]).remove()
    except dh.errors.AttachError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_predicates_that_choose_differently_on_ranks_are_told(ranks: Ranks) -> None:
    assert all("do not attach the same" in message for message in ranks(_differs))
