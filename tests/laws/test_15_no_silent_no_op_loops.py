"""Law 15, no silent no-op, in loops that clip or begin a step at another moment than just before the optimizer steps.

A table of loops and engines: updates and norms are those of a single process in float64, written by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.engines import close, flat, whole
from tests.support.ranks.harness import Ranks
from tests.support.ranks.truth import make

pytestmark = pytest.mark.dist

LIMIT, STEPS = 0.1, 4
ENGINES = ("plain", "ddp", "fsdp2")


def batch(step: int, share: int, which: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * which + share)).double()


class Losses:
    """The two losses of a step on this rank's share of the batch; in one process, on all shares."""

    def __init__(self, model: nn.Module, shares: list[int], spoilt: int = -1) -> None:
        self.model, self.shares, self.spoilt = model, shares, spoilt

    def __call__(self, step: int, which: int) -> torch.Tensor:
        each = [self.model(batch(step, share, which), True).square().mean() * 300.0 for share in self.shares]
        factor = math.nan if (step, which) == (self.spoilt, 1) else 1.0
        return torch.stack(each).mean() * factor


Early = Callable[[], object]


def clip_before_backward(losses: Losses, step: int, zero: Early, early: Early, make_step: Early) -> None:
    loss = losses(step, 1)
    early()  # there are no gradients yet, or those of the step before
    zero()
    loss.backward()
    make_step()


def clip_between_backwards(losses: Losses, step: int, zero: Early, early: Early, make_step: Early) -> None:
    first, second = losses(step, 0), losses(step, 1)
    zero()
    first.backward()
    early()
    second.backward()
    make_step()


def clip_after_backward(losses: Losses, step: int, zero: Early, early: Early, make_step: Early) -> None:
    zero()
    losses(step, 1).backward()
    early()
    make_step()


def clip_after_the_step(losses: Losses, step: int, zero: Early, early: Early, make_step: Early) -> None:
    losses(step, 1).backward()
    make_step()
    early()
    zero()


LOOPS = {
    each.__name__: each
    for each in (clip_before_backward, clip_between_backwards, clip_after_backward, clip_after_the_step)
}


def _norm(model: nn.Module) -> float:
    grads = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return float(torch.stack([grad.norm() for grad in grads]).norm()) if grads else 0.0


def _run(rank: int, engine: str, loop: str, way: str, spoilt: int = -1) -> dict[str, Any]:
    """Steps of a loop with the rule: weights, the norms in the log, how many steps there were, those left out."""
    model = make(engine, "step", 2, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    records: list[Any] = []
    rules = [dh.SkipNonFinite(), dh.ClipNorm(LIMIT)]
    with dh.gradients(model, optimizer, rules=rules, stats=[dh.stats.Norm()], sinks=[records.append], every=1) as watch:
        ways: dict[str, Early] = {
            "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "begin": watch.begin_step,
        }
        losses = Losses(model, [0, 1] if engine == "plain" else [rank], spoilt)
        for step in range(STEPS):
            LOOPS[loop](losses, step, optimizer.zero_grad, ways[way], optimizer.step)
        steps = watch.steps
    weights = {n.removeprefix("module."): whole(p.detach()) for n, p in model.named_parameters()}
    logged = {
        "norms": [record["grad_norm"] for record in records if not record["skipped"]],
        "skipped": [record["step"] for record in records if record["skipped"]],
        "logged": [record["step"] for record in records],
    }
    return {"weights": weights, "steps": steps, **(logged if rank == 0 else {})}


class ByHand:
    """The truth: a model that is clipped and stepped by hand, in one process, without disthooks."""

    def __init__(self, loop: str, way: str) -> None:
        self.model = make("plain", "step", 2, torch.float64)
        self.loop, self.way = loop, way
        self.norms: list[float] = []
        self.skipped: list[int] = []
        self.now = 0

    def scale(self, limit: float) -> None:
        factor = min(1.0, limit / (_norm(self.model) + 1e-6))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def early(self) -> None:
        """The rule acts before the loop clips gradients that no step has used; in all other loops nothing is left."""
        if self.loop == "clip_between_backwards":
            self.scale(LIMIT)
            if self.way == "clip":
                self.scale(1.0)

    @torch.no_grad()
    def step(self) -> None:
        norm = _norm(self.model)
        if not math.isfinite(norm):
            self.skipped.append(self.now)
            return
        self.norms.append(norm)
        self.scale(LIMIT)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)


def _truth(loop: str, way: str, spoilt: int = -1) -> dict[str, Any]:
    hand = ByHand(loop, way)
    losses = Losses(hand.model, [0, 1], spoilt)
    for hand.now in range(STEPS):
        LOOPS[loop](losses, hand.now, hand.model.zero_grad, hand.early, hand.step)
    return {
        "weights": {name: p.detach() for name, p in hand.model.named_parameters()},
        "norms": hand.norms,
        "skipped": hand.skipped,
        "steps": STEPS,
        "logged": list(range(STEPS)),
    }


CASES = [(loop, way, -1) for loop in LOOPS for way in ("clip", "begin")]
CASES += [(loop, "clip", 2) for loop in ("clip_before_backward", "clip_between_backwards")]


@pytest.mark.first_tier
@pytest.mark.parametrize(("loop", "way", "spoilt"), CASES)
def test_a_rule_acts_on_the_gradients_of_the_step(ranks: Ranks, loop: str, way: str, spoilt: int) -> None:
    """A NaN of the last backward of the step ``spoilt`` does not enter the weights."""
    truth = _truth(loop, way, spoilt)
    assert spoilt < 0 or truth["skipped"] == [spoilt]
    for engine in ENGINES if loop != "clip_between_backwards" else ("plain", "fsdp2"):
        given = (engine, loop, way, spoilt)
        for found in ranks(_run, *given) if engine != "plain" else [_run(0, *given)]:
            wrong = [key for key, value in found.items() if not close(value, truth[key], 1e-9)]
            assert not wrong, (engine, {key: (found[key], truth[key]) for key in wrong if key != "weights"})


def _unreduced(rank: int, way: str) -> str:
    """Two backwards after the forwards of DDP, which reduces the first alone: without disthooks ranks drift apart."""
    model = make("ddp", "step", 2, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = Losses(model, [rank])
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(LIMIT)]):
        first, second = losses(0, 0), losses(0, 1)
        first.backward(retain_graph=way == "one forward")
        (first * 2 if way == "one forward" else second).backward()
        try:
            optimizer.step()
        except dh.errors.UsageError as error:
            return str(error)
    return "no error"


@pytest.mark.first_tier
@pytest.mark.parametrize("way", ["two forwards", "one forward"])
def test_a_second_backward_that_ddp_does_not_reduce_is_an_error(ranks: Ranks, way: str) -> None:
    for said in ranks(_unreduced, way):
        assert said.startswith("DDP did not reduce the gradients of the last backward"), said


def _penalty(rank: int) -> bool:
    """A penalty on the gradient of the input comes before the one backward that accumulates: that one is reduced."""
    model = make("ddp", "step", 2, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(LIMIT)]):
        x = batch(0, rank, 0).requires_grad_()
        out = model(x, True).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        optimizer.step()
    return math.isclose(_norm(model), LIMIT, rel_tol=1e-4)


@pytest.mark.first_tier
def test_a_penalty_on_gradients_under_ddp_is_no_error(ranks: Ranks) -> None:
    assert ranks(_penalty) == [True, True]


def _with_batch_norm(engine: str, micro_batches: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if engine == "fsdp1":
        return flat(model, parts=())
    if engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if engine == "zero2":
        from tests.support.zero import engine_of

        return engine_of(2, model=model, accumulate=micro_batches)
    return model


def _buffers(rank: int, engine: str, micro_batches: int, spoilt: int | None) -> dict[str, torch.Tensor]:
    """The buffers after four steps, one with a NaN in the input of rank 0; or after the three others."""
    model = _with_batch_norm(engine, micro_batches)
    optimizer = None if engine == "zero2" else torch.optim.SGD(model.parameters(), lr=0.01)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=[dh.stats.Norm()], every=1):
        for step in [0, 1, 3] if spoilt is None else range(4):
            for micro in range(micro_batches):
                x = batch(step, rank, micro).float()
                if (step, micro, rank) == (spoilt, 0, 0):
                    x[0, 0] = math.nan
                loss = model(x).square().mean()
                if optimizer is None:
                    model.backward(loss)
                    model.step()
                else:
                    loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return {name.rpartition(".")[2]: buffer.clone() for name, buffer in model.named_buffers()}


def _are_put_back(rank: int, engine: str, micro_batches: int) -> dict[str, bool]:
    found, truth = (_buffers(rank, engine, micro_batches, spoilt) for spoilt in (2, None))
    return {name: torch.equal(found[name], truth[name]) and bool(found[name].isfinite().all()) for name in truth}


@pytest.mark.first_tier
@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "zero2"])
def test_a_skipped_step_leaves_buffers_as_they_were(ranks: Ranks, engine: str, micro_batches: int) -> None:
    for found in ranks(_are_put_back, engine, micro_batches):
        assert len(found) >= 3
        assert all(found.values()), found


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_skipped_step_leaves_buffers_as_they_were_in_one_process(micro_batches: int) -> None:
    found = _are_put_back(0, "plain", micro_batches)
    assert len(found) == 3
    assert all(found.values()), found
