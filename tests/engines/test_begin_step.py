"""A step that is begun before the loop clips: measured before, ruled before, and not again in the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.grads.rules import Rule
from disthooks.grads.rules.base import Work
from tests.support.engines import close, grads_of, is_fsdp1, loss_of, make, whole
from tests.support.ranks.harness import Ranks

LR = 0.01
ENGINES = ["plain", "ddp", "fsdp1", "fsdp1flat", "fsdp2"]


@dataclass(frozen=True)
class SkipAt(Rule):
    """Leaves one step out, whatever its gradients are."""

    step: int = 1
    rewrites = False

    def rewrite(self, work: Work) -> None:
        work.skips.append(torch.tensor(work.step == self.step))


def clip(model: nn.Module, limit: float) -> float:
    if is_fsdp1(model):
        return float(model.clip_grad_norm_(limit))
    return float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))


def backward(model: nn.Module, step: int, engine: str, rank: int, to_none: bool = True) -> None:
    model.zero_grad(set_to_none=to_none)
    loss_of(model, step, engine, rank).backward()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    if is_fsdp1(model):
        from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

        with Fsdp.summon_full_params(model, writeback=False):
            named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
            return {name: p.detach().clone() for name, p in named}
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def _norm(grads: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())


def _clipped(rank: int, engine: str) -> list[Any]:
    """Two attachments, a rule that must not act twice, and the loop's own clipping after it, in every step."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norm, found = [dh.stats.Norm()], []
    with (
        dh.gradients(model, optimizer, rules=[dh.Scale(0.5)], stats=norm, every=1) as watch,
        dh.gradients(model, optimizer, stats=norm, every=1) as other,
    ):
        for step in range(3):
            backward(model, step, engine, rank)
            true = _norm(grads_of(model))
            watch.begin_step()
            if rank == 0 and "fsdp1" not in engine:  # it logs a metric, say; all ranks decide alike nonetheless
                next(model.parameters()).sum().item()
            watch.begin_step()
            halved, limit = _norm(grads_of(model)), true / 8
            seen = clip(model, limit)
            before = weights(model)
            optimizer.step()
            moved = _norm({name: (before[name] - after) / LR for name, after in weights(model).items()})
            watch.flush(), other.flush()
            truth = [true, true / 2, true / 2, true / 2, limit]  # the second one sees what the first one made
            found.append(
                close([watch.latest["grad_norm"], other.latest["grad_norm"], halved, seen, moved], truth, 1e-3)
            )
            found.append(math.isclose(watch.latest["grad_norm"], true, rel_tol=1e-6))
        found.append([watch.steps, other.steps])
    return found


def _never_made(rank: int, engine: str) -> list[Any]:
    """A step that was begun does not come, as when a GradScaler keeps it back; the next one is begun, or is not.

    The next gradients may lie where the last ones lay. (Of FSDP1 nothing tells then, when the next one is not begun.)
    """
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    found = []
    with dh.gradients(model, optimizer, rules=[dh.Scale(0.5)], stats=[dh.stats.Norm()], every=1) as watch:
        for step, (begins, to_none) in enumerate(((True, True), (False, True), (True, False), (False, False))):
            backward(model, 2 * step, engine, rank)
            watch.begin_step()  # and no step
            backward(model, 2 * step + 1, engine, rank, to_none or ("fsdp1" in engine and not begins))
            true = _norm(grads_of(model))
            if begins:
                watch.begin_step()
                clip(model, math.inf)
            optimizer.step()
            watch.flush()
            found.append(close([watch.latest["grad_norm"], _norm(grads_of(model))], [true, true / 2], 1e-5))
        found.append(watch.steps)
    return found


def _left_out(rank: int, engine: str) -> list[Any]:
    """A decision that was made before the clipping holds in the step."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    rules = [SkipAt(1)]
    found = []
    with dh.gradients(model, optimizer, rules=rules, every=1) as watch:
        for step in range(3):
            backward(model, step, engine, rank)
            true, before = grads_of(model), weights(model)
            watch.begin_step()
            seen = clip(model, math.inf)
            optimizer.step()
            still = {name for name, after in weights(model).items() if torch.equal(before[name], after)}
            right = set(before) if step == 1 else set()
            found += [math.isclose(seen, _norm(true), rel_tol=1e-4), still == right, close(grads_of(model), true)]
    return found


@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"))
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_was_begun(ranks: Ranks, engine: str) -> None:
    for part, truth in ((_clipped, [True] * 6 + [[3, 3]]), (_never_made, [True] * 4 + [4]), (_left_out, [True] * 9)):
        assert ranks(part, engine) == [truth] * 2, part.__doc__


def test_a_loop_that_puts_other_gradients_in_their_place() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with dh.gradients(model, optimizer, rules=[dh.Scale(0.5)], every=1) as watch:
        backward(model, 0, "plain", 0)
        true = _norm(grads_of(model))
        watch.begin_step()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.1
        optimizer.step()
        assert _norm(grads_of(model)) == pytest.approx(true / 20)
        assert watch.steps == 1


def test_a_closure_after_it_was_begun() -> None:
    """One that makes no gradients changes nothing; those of one that makes them are a step of their own."""
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with dh.gradients(model, optimizer, rules=[dh.Scale(0.5)], every=1) as watch:
        backward(model, 0, "plain", 0)
        true = _norm(grads_of(model))
        watch.begin_step()
        optimizer.step(lambda: watch.begin_step())
        assert (_norm(grads_of(model)), watch.steps) == (pytest.approx(true / 2), 1)
        backward(model, 1, "plain", 0)
        watch.begin_step()
        made = []

        def closure() -> None:
            backward(model, 2, "plain", 0, to_none=False)
            made.append(_norm(grads_of(model)))

        optimizer.step(closure)
        assert ([_norm(grads_of(model))], watch.steps) == (pytest.approx([made[0] / 2]), 2)


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_grad_scaler(fused: bool) -> None:
    """Local gradients are known to be scaled; a rule's decision and the scaler's own both hold."""
    model = make("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    stats = [dh.stats.Norm(), dh.stats.Spread()]
    moved, norms = [], []
    with dh.gradients(model, optimizer, rules=[dh.Scale(0.5), SkipAt(1)], stats=stats, every=1) as watch:
        for step in range(4):
            model.zero_grad()
            loss = loss_of(model, step, "plain") * (math.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            true, before = _norm(grads_of(model)), weights(model)
            watch.begin_step(scaler)
            clip(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            watch.flush()
            now = weights(model)
            moved.append(any(not torch.equal(now[name], before[name]) for name in now))
            norms.append(
                step == 2 or close([watch.latest["grad_norm"], watch.latest["grad_norm/max_rank"]], [true] * 2)
            )
    assert (moved, norms) == ([True, False, False, True], [True] * 4)
    # A fused optimizer's step is called, and its kernel reads that the gradients overflowed.
    assert (scaler.get_scale(), watch.steps, hasattr(optimizer, "found_inf")) == (4.0, 3 + fused, False)
