"""``gradients(recent=)``: the steps around a spike, or a NaN, between two logged steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks import stats
from tests.support.engines import FIRST, close, loss_of, make
from tests.support.ranks.harness import Ranks

STATS = [
    stats.Norm(per_parameter=True),
    stats.Updates(per_parameter=True),
    stats.NonFinite(),
    stats.Activations(),
    stats.NoiseScale(4),
]


def _records(rank: int, engine: str, every: int, recent: int, happens: str, steps: int = 70) -> list[dict[str, Any]]:
    """What is logged of a training in which something happens in step 37."""
    model = make(engine, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: list[dict[str, Any]] = []
    rules = [dh.SkipNonFinite()] if happens == "nan" else []
    with dh.gradients(
        model, optimizer, rules=rules, stats=STATS, sinks=[seen.append], every=every, recent=recent
    ) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            factor = (
                {"spike": 1e3, "nan": math.nan}.get(happens, 1.0)
                if step == 37 and rank == 1 - (engine == "plain")
                else 1.0
            )
            (factor * loss_of(model, step % 4, engine, rank)).backward()
            optimizer.step()
        watch.flush()
    return seen


@pytest.mark.first_tier(engine=FIRST, happens=("nan",))
@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.dist
@pytest.mark.parametrize("happens", ["spike", "nan"])
@pytest.mark.parametrize("engine", ["plain", "ddp", "fsdp2", "fsdp1"])
def test_the_steps_around_it_are_in_the_log(ranks: Ranks, engine: str, happens: str) -> None:
    """The same numbers as of a run that logs every step; on the first rank alone."""
    if engine == "plain":
        found, truth = _records(0, engine, 50, 12, happens), _records(0, engine, 1, 0, happens)
    else:
        found, rest = ranks(_records, engine, 50, 12, happens)
        truth = ranks(_records, engine, 1, 0, happens)[0]
        assert rest == []
    by_step = {record["step"]: record for record in found}
    assert len(by_step) == len(found), "no step is written twice"
    recent = [step for step, record in by_step.items() if record.get("recent")]
    assert {37, 38, 44} <= set(recent) <= set(range(25, 50))
    assert min(recent) <= 30
    assert 50 in by_step
    assert "recent" not in by_step[50]
    for step in recent:
        for name, value in truth[step].items():
            if not any(each in name for each in ("noise_scale", "peak", "nonfinite_steps", "loop/")):
                assert close(by_step[step][name], value, 1e-9), (step, name)
    if happens == "nan":
        assert by_step[37]["skipped"] == 1.0
        assert by_step[37]["nonfinite_ranks"] == [0 if engine == "plain" else 1]


def test_nothing_happens() -> None:
    *records, end = _records(0, "plain", 50, 12, "")
    assert [record["step"] for record in records] == [0, 50]
    assert (end["step"], "recent" in end) == (69, False)


@pytest.mark.dist
def test_the_averages_of_logged_steps_stay_as_they_are(ranks: Ranks) -> None:
    """A statistic with a state gets a copy of it for the steps that are logged out of turn."""
    with_it, without = (ranks(_records, "ddp", 50, recent, "spike")[0][:-1] for recent in (12, 0))
    assert [r["noise_scale_trace"] for r in with_it if "recent" not in r] == [r["noise_scale_trace"] for r in without]


def test_what_cannot_be() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(dh.errors.UsageError, match="An int of at least 0"):
        dh.gradients(model, optimizer, stats=[stats.Norm()], recent=-1)
    with pytest.raises(dh.errors.UsageError, match=r"add stats\.NonFinite\(\)"):
        dh.gradients(model, optimizer, stats=[stats.Norm()], recent=4)
