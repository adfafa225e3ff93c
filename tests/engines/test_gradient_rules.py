"""Rules on ranks: at "local", decisions that all ranks make alike, state that is the same on all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.grads.rules import Rule
from tests.support.engines import ENGINES, close, grads_of, loss_of, make, sharded, unsynced
from tests.support.ranks.harness import Ranks

LOCAL = ["plain", *ENGINES]


def flip(name: str, grad: torch.Tensor) -> torch.Tensor:
    return -grad if name.endswith("bias") else grad * 1.0


def drop(name: str, grad: torch.Tensor) -> torch.Tensor:
    return torch.where(grad.abs() < 0.5, math.nan, grad)


# What a rule at "local" is, by hand, for one gradient.
RULES: dict[str, tuple[Any, Any]] = {
    "value": (dh.ClipValue(0.3), lambda name, g: g.clamp(-0.3, 0.3)),
    "norm": (dh.ClipNorm(0.5, by="parameter"), lambda name, g: g * (0.5 / (g.norm() + 1e-6)).clamp(max=1.0)),
    "scale": (dh.Scale(3.0), lambda name, g: g * 3),
    "function": (flip, flip),
    "sanitize": ([drop, dh.Sanitize(nan=2.0)], lambda name, g: torch.where(g.abs() < 0.5, 2.0, g)),
}


def _accumulated(rank: int, engine: str, scaled: bool) -> dict[str, dict[str, torch.Tensor]]:
    """For each rule the gradients of two micro-batches, of which the first is not synchronized."""
    found = {}
    for key, (rules, _) in RULES.items():
        model = make(engine, torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        local = [dh.only(["embed.*", "head.*"], rule, at="local") for rule in (rules if key == "sanitize" else [rules])]
        with dh.gradients(model, optimizer, rules=local, scaler=scaler):
            for batch in range(2):
                with unsynced(model, batch == 0):
                    loss = loss_of(model, batch, engine, rank, scale=10.0)
                    (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        found[key] = grads_of(model)
    return found


def _by_hand(key: str, engine: str) -> dict[str, torch.Tensor]:
    """The mean over the ranks of the sum over micro-batches of what became of each gradient."""
    world = 1 if engine == "plain" else 2
    total: dict[str, torch.Tensor] = {}
    for rank in range(world):
        for batch in range(2):
            model = make("plain", torch.float64)
            loss_of(model, batch, engine, rank, scale=10.0).backward()
            for name, grad in grads_of(model).items():
                changed = RULES[key][1](name, grad) if name.startswith(("embed.", "head.")) else grad
                total[name] = total.get(name, torch.zeros_like(grad)) + changed / world
    return total


@pytest.mark.dist
@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"))
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("engine", LOCAL)
def test_local_rules_are_right_on_every_micro_batch(ranks: Ranks, engine: str, scaled: bool) -> None:
    everyone = [_accumulated(0, engine, scaled)] if engine == "plain" else ranks(_accumulated, engine, scaled)
    for key in RULES:
        truth = _by_hand(key, engine)
        untouched = {name: g for name, g in truth.items() if not name.startswith(("embed.", "head."))}
        assert len(untouched) == 5
        for found in everyone:
            assert close(found[key], truth, 1e-10), key


def test_under_a_scaler_that_is_not_given_it_raises() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    with dh.gradients(model, optimizer, rules=[dh.only("*", dh.ClipValue(1.0), at="local")]):
        scaler.scale(loss_of(model, 0, "plain")).backward()
        with pytest.raises(dh.errors.UsageError, match=r"gradients\(scaler="):
            scaler.step(optimizer)


def _whole_only(rank: int) -> str:
    """A gradient that is itself in parts, under tensor parallelism without fully_shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(nn.Linear(4, 6), init_device_mesh("cpu", (2,)), ColwiseParallel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[dh.only("*", dh.ClipNorm(1.0, by="parameter"), at="local")]):
        try:
            model(torch.ones(2, 4)).sum().backward()
        except dh.errors.UsageError as error:
            return str(error)
    return ""


@pytest.mark.dist
def test_a_local_gradient_in_parts_is_refused(ranks: Ranks) -> None:
    for message in ranks(_whole_only):
        assert "needs the whole gradient of" in message
        assert "DTensor" in message


# --- one decision


def _skipping(rank: int, engine: str) -> list[Any]:
    """One rank's part of a gradient is spoiled in steps 1, 3 and 4; what moved, and what was logged and raised."""
    model = make("plain" if engine == "ignored" else engine)
    if engine == "ignored":
        sharded(model, ignored_params={model.scale})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    moved, logged = [], []
    with dh.gradients(
        model, optimizer, rules=[dh.SkipNonFinite(max_consecutive=1), dh.ClipNorm(1.0)], every=1
    ) as watch:
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, "ddp", rank).backward()
            if engine == "ignored":  # nobody else reduces it
                torch.distributed.all_reduce(model.scale.grad)
            if step in (1, 3, 4) and (rank == 1 or engine in ("ddp", "hsdp")):  # replicas are alike
                _spoil([s for s in watch._runner.plan.shards if engine != "ignored" or s.name == "scale"])
            before = [p.detach().clone() for p in model.parameters()]
            try:
                optimizer.step()
            except dh.errors.NonFiniteError as error:
                return [moved, logged, str(error)]
            after = [p.detach() for p in model.parameters()]
            local = [[getattr(p, "_local_tensor", p) for p in part] for part in (before, after)]
            moved.append(not all(torch.equal(a, b) for a, b in zip(*local, strict=True)))
            watch.flush()
            logged.append([watch.latest[key] for key in ("skipped", "skipped_in_a_row", "skipped_total")])
    return [moved, logged, ""]


def _spoil(shards: list[Any]) -> None:
    """The last element of the first gradient of which this rank has any."""
    grad = next(g for shard in shards if (g := shard.gradient()) is not None and g.numel())
    grad.view(-1)[-1] = math.nan


@pytest.mark.dist
@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"))
@pytest.mark.parametrize("engine", [*ENGINES, "hsdp12", "ignored"])
def test_a_gradient_that_is_spoiled_on_one_rank_stops_all(ranks: Ranks, engine: str) -> None:
    for moved, logged, raised in ranks(_skipping, engine):
        assert moved == [True, False, True, False, False]
        assert logged == [[0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 1, 2], [1, 2, 3]]
        assert "2 steps in a row, 3 to 4" in raised


LEARNING: list[Rule] = [dh.SkipNonFinite(), dh.ClipZScore(0.5, 0.2, 2), dh.ClipPercentile(40.0, 3), dh.ClipAdaptive()]


def _learned(rank: int, engine: str) -> tuple[Any, Any, Any]:
    """The state after six steps in one go, and after three and three; and the last log of both."""
    found, logs = [], []
    for pieces in ([range(6)], [range(3), range(3, 6)]):
        model = make(engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state: Any = None
        for steps in pieces:
            with dh.gradients(model, optimizer, rules=LEARNING, every=1) as watch:
                if state is not None:
                    watch.load_state_dict(state)
                for step in steps:
                    optimizer.zero_grad()
                    loss_of(model, step, engine, rank).backward()
                    optimizer.step()
            state = watch.state_dict()
        found.append(state)
        logs.append(watch.latest)
    return found[0], found[1], logs


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_state_is_the_same_on_all_ranks_and_goes_on(ranks: Ranks, engine: str) -> None:
    (first, again, logs), (theirs, _, others) = ranks(_learned, engine)
    assert str(first) == str(again) == str(theirs)
    assert _bits(first) == _bits(again) == _bits(theirs)
    assert logs[0] == logs[1] == others[0] == others[1]
    assert first["steps"] == 6
    assert first["rules"][2][1]["count"] == 6


def _bits(state: dict[str, Any]) -> list[bytes]:
    return [t.numpy().tobytes() for _, part in state["rules"] for t in part.values()]
