"""Law 20: a step that is not finite is recorded, with its own step, all its ranks and parameters, and once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.engines.detect import detect_engine
from disthooks.grads.plan import StepPlan
from disthooks.grads.records import WatchedSteps
from tests.support.engines import ENGINES, loss_of, make
from tests.support.logs import measured
from tests.support.ranks.harness import Ranks
from tests.support.zero import engine_of
from tests.support.zero import loss_of as zero_loss

pytestmark = [pytest.mark.dist, pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"))]

BOTH = {"param": "mid.1.weight", "rank": 1}, {"param": "head.weight", "rank": 1}


def _train(rank: int, engine: str, bad: dict[int, tuple[int, ...]], options: dict[str, Any], steps: int = 53) -> Any:
    """Two gradients of the ranks in ``bad[step]`` are infinite; what was logged, and the last record on this rank."""
    model, now, log = make(engine), [0], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def breaks(grad: torch.Tensor) -> torch.Tensor | None:
        return grad * math.inf if rank in bad.get(now[0], ()) else None

    with (
        dh.on_gradient(model, ["mid.1.weight", "head.weight"], breaks, at="local"),
        dh.gradients(model, optimizer, sinks=[log.append], every=50, **options) as watch,
    ):
        for step in range(steps):
            now[0] = step
            optimizer.zero_grad()
            loss_of(model, step, engine, rank).backward()
            optimizer.step()
    return log, watch.last_nonfinite


def _at(record: dict[str, Any]) -> list[dict[str, Any]]:
    found = [{"param": at["param"], "rank": at["rank"]} for at in record["nonfinite_at"]]
    return sorted(found, key=lambda at: at["param"], reverse=True)  # FSDP1 has units, in its own order


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_between_logged_ones_is_recorded_once(ranks: Ranks, engine: str) -> None:
    (log, last), (nothing, other) = ranks(_train, engine, {37: (1,)}, {"stats": [stats.NonFinite()]})
    assert nothing == []
    assert other == last
    assert [record["step"] for record in log] == [0, 37, 50]
    assert log[0]["nonfinite_ranks"] == []
    assert "nonfinite_since" not in log[0]
    event = log[1]
    assert (event["nonfinite_ranks"], _at(event), event["nonfinite_params"]) == ([1], list(BOTH), 2)
    assert event["nonfinite"] == sum(at["count"] for at in event["nonfinite_at"]) == 50
    assert last == measured(event)
    assert log[2]["nonfinite_ranks"] == [0, 1]  # the update has spoiled the parameters of all
    assert log[2]["nonfinite_since"] == 37
    assert (log[1]["nonfinite_steps"], log[2]["nonfinite_steps"]) == (1, 50 - 37 + 1)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1"])
def test_each_step_that_is_left_out_is_recorded(ranks: Ranks, engine: str) -> None:
    """The same again is not; another rank's fault is, and so is one after a step that was right."""
    bad = {7: (1,), 8: (1,), 9: (1,), 10: (0,), 20: (0, 1), 50: (1,), 51: (1,)}
    (log, last), (_, other) = ranks(_train, engine, bad, {"rules": [dh.SkipNonFinite(), dh.ClipNorm(1.0)]})
    assert _at(other) == _at(last) == [BOTH[0], BOTH[1]]
    assert other["step"] == last["step"] == 50
    assert "grad_norm/peak" in log.pop()  # of the steps after the last record
    assert [record["step"] for record in log] == [0, 7, 10, 20, 50]
    assert [record.get("nonfinite_ranks") for record in log] == [None, [1], [0], [0, 1], [1]]
    assert all(record["skipped"] == (record["step"] > 0) for record in log)
    assert [at["param"] for at in _at(log[1])] == [at["param"] for at in BOTH]
    assert log[-1]["skipped_total"] == 6.0
    assert "grad_norm" in log[-1]


def _zero(rank: int, stage: int) -> Any:
    engine, log = engine_of(stage), []
    with dh.gradients(engine, rules=[dh.SkipNonFinite()], sinks=[log.append], every=50):
        for step in range(4):
            for batch in (0, 1):
                loss = zero_loss(engine, batch, rank).float()
                engine.backward(loss * math.nan if (rank, step, batch) == (1, 2, 0) else loss)
                engine.step()
    return log


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(ranks: Ranks, stage: int) -> None:
    pytest.importorskip("deepspeed")
    log, nothing = ranks(_zero, stage)
    assert nothing == []
    assert [(record["step"], record.get("nonfinite_ranks")) for record in log] == [(0, None), (2, [1]), (3, None)]
    assert log[1]["nonfinite_params"] == len(log[1]["nonfinite_at"]) == 8


def _late(rank: int, engine: str) -> Any:
    """Attached between backward and step: no hook has seen these gradients, and nothing is refused."""
    model, log = make(engine), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (loss_of(model, 0, engine, rank) * math.nan).backward()
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[log.append], every=50):
        optimizer.step()
    return log


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_that_no_hook_saw(ranks: Ranks, engine: str) -> None:
    log, _ = ranks(_late, engine)
    assert [(record["step"], record["skipped"], record["nonfinite_ranks"]) for record in log] == [(0, 1.0, [])]
    assert log[0]["nonfinite_at"][0]["rank"] is None


def test_of_many_ranks_that_failed_no_rank_is_named() -> None:
    """With more than 52 ranks the marks of several cannot be told apart; that is not the same as no rank."""
    engine = detect_engine(nn.Linear(2, 1))
    steps = WatchedSteps(StepPlan([dh.SkipNonFinite()], [], engine.shards), range(100))
    one, two = float(2**14 + 70), float(2 * 2**14 + 150)
    found = steps._fields([0, 1], None, [one, two])["nonfinite_at"]
    assert found == [{"param": "bias"}, {"param": "weight", "rank": 70}]
    assert steps._fields([0], None, [0.0])["nonfinite_at"] == [{"param": "weight", "rank": None, "before": "bias"}]


# --- Steps that were never made


STATS = (stats.Norm(), stats.Spread(), stats.NoiseScale(decay=0.0), stats.NonFinite())


def _after(rank: int, engine: str, way: str) -> dict[str, Any]:
    """One step alone, after one that a GradScaler left out, or after a batch that was thrown away (no step)."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way == "skipped")
    with dh.gradients(model, optimizer, stats=STATS, every=1) as watch:
        for spoil in {"alone": (1.0,), "skipped": (math.inf, 1.0), "dropped": (100.0, 1.0)}[way]:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 0, engine, rank) * spoil).backward()
            if spoil != 100.0:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
    return dict(watch.latest)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_never_made_leaves_nothing_behind(ranks: Ranks, engine: str) -> None:
    truth, *others = (ranks(_after, engine, way)[0] for way in ("alone", "skipped", "dropped"))
    for found in others:
        for name in ("grad_norm", "grad_norm/max_rank", "grad_norm/min_rank", "noise_scale"):
            assert found[name] == pytest.approx(truth[name], rel=1e-4), (name, found[name], truth[name])
        assert found["grad_norm/outlier_rank"] is None
