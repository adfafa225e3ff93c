"""DeepSpeed beside the stages themselves: other callers of the step, what is put back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import DisthooksError
from disthooks.grads.rules import Rule
from disthooks.grads.rules.base import Work
from tests.support import needs
from tests.support.engines import close
from tests.support.ranks.harness import Ranks
from tests.support.zero import LR, engine_of, kept, loss_of, near, step, truth, weights_of

pytestmark = [pytest.mark.dist, needs("deepspeed")]


# --- who calls the step, and when


def _boundaries(rank: int, stage: int) -> list[Any]:
    """The calls that accelerate's ``backward`` makes; DeepSpeed's own clipping is on, and comes after ours."""
    engine = engine_of(stage, accumulate=2, gradient_clipping=0.5)
    weights, found = weights_of(engine), []
    with dh.gradients(engine, engine.optimizer, rules=[dh.ClipValue(0.05)], stats=[stats.Norm()], every=1) as watch:
        for batch in (0, 1):
            engine.set_gradient_accumulation_boundary(is_boundary=batch == 1)
            engine.backward(loss_of(engine, batch, rank).float())
            if batch == 1:
                engine.step()
            found.append(watch.steps)
    wanted, log = truth(weights, [dh.ClipValue(0.05)], [stats.Norm()])
    clipped, norms = truth({}, [dh.ClipNorm(0.5)], grads=wanted)
    moved = {name: (weights[name] - after) / LR for name, after in weights_of(engine).items()}
    measured = engine.get_global_grad_norm()
    return [*found, close(watch.latest, log, 1e-5), near(moved, clipped, 2e-5), measured, norms["grad_norm"]]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rules_act_before_deepspeed_measures_and_clips(ranks: Ranks, stage: int) -> None:
    for before, after, logged, moved, measured, norm in ranks(_boundaries, stage):
        assert (before, after, logged, moved) == (0, 1, True, True)
        assert stage == 0 or close(float(measured), norm, 1e-5)  # stage 0 in float32 keeps no norm


def _autocast(rank: int, stage: int) -> list[bool]:
    """With a GradScaler: gradients are those of the loss, and an overflow stays one."""
    from deepspeed.runtime import torch_autocast

    engine = engine_of(stage, "autocast")
    grads: dict[str, torch.Tensor] = {}
    weights, handle = weights_of(engine), kept(engine, grads)
    found = []
    for worse in (1.0, float("nan")):
        before = weights_of(engine)
        with dh.gradients(engine, rules=[lambda name, grad: grad.nan_to_num(0.0) * 3]):
            for batch in (0, 1):
                loss = loss_of(engine, batch, rank).float() * 1e-3
                engine.backward(loss * worse if rank == 1 else loss)
                engine.step()
        if worse == 1.0:
            wanted, _ = truth(weights)
            found.append(near(grads, {name: 1e-3 * grad for name, grad in wanted.items()}, 3e-2))
        tripled = {name: (3 if worse == 1.0 else 0) * grad.nan_to_num(0.0) for name, grad in grads.items()}
        moved = {name: (before[name] - after) / LR for name, after in weights_of(engine).items()}
        found.append(near(moved, tripled, 1e-3))
    handle.remove()
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # or DeepSpeed takes every later engine for one under autocast
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_under_autocast_with_a_grad_scaler(ranks: Ranks, stage: int) -> None:
    assert ranks(_autocast, stage) == [[True] * 3] * 2


# --- what is put back


@dataclass(frozen=True)
class Notes(Rule):
    """Notes that it was called, and changes nothing."""

    calls: list[str]
    rewrites = False

    def rewrite(self, work: Work) -> None:
        self.calls.append("second")


def _removed(rank: int) -> list[Any]:
    """Two attachments, and somebody else's wrapper between them, taken off in the wrong order."""
    engine, calls = engine_of(1), []
    first = dh.gradients(engine, rules=[lambda name, grad: calls.append("first") or grad])
    mine = engine._take_model_step

    def theirs(*args: Any) -> None:
        calls.append("theirs")
        mine(*args)

    engine._take_model_step = theirs
    second = dh.gradients(engine, rules=[Notes(calls)])
    step(engine, rank)
    found = [sorted(set(calls))]
    first.remove()
    second.remove()
    del calls[:]
    step(engine, rank)
    return [*found, calls, engine.__dict__.pop("_take_model_step") is theirs]


def test_removal_leaves_what_others_put_there(ranks: Ranks) -> None:
    assert ranks(_removed) == [[["first", "second", "theirs"], ["theirs"], True]] * 2


# --- what is refused


def _refusals(rank: int) -> dict[str, str]:
    engine, half = engine_of(2), engine_of(0, "fp16")
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    rules: dict[str, Any] = {"rules": [dh.ClipNorm(1.0)]}
    said = {}

    def case(name: str, call: Callable[[], Any]) -> None:
        try:
            call().remove()
            said[name] = "nothing"
        except DisthooksError as error:
            said[name] = f"{type(error).__name__}: {error}"

    case("stage 0 in fp16", lambda: dh.gradients(half, **rules))
    case("the model inside", lambda: dh.on_gradient(engine.module, "*", print))
    case("a part", lambda: dh.gradients(nn.Sequential(engine), other, **rules))
    case("another optimizer", lambda: dh.gradients(engine, other, **rules))
    case("no optimizer on a plain module", lambda: dh.gradients(nn.Linear(1, 1), **rules))
    case("engine.optimizer", lambda: dh.gradients(engine, engine.optimizer, **rules))
    case("basic_optimizer", lambda: dh.gradients(engine, engine.basic_optimizer, **rules))
    case("a frozen parameter", lambda: dh.on_gradient(engine, "frozen", print))
    for name, value in {"has_moe_layers": True, "enable_backward_allreduce": False, "mpu": SimpleNamespace()}.items():
        true = getattr(engine, name)
        setattr(engine, name, value)
        case(name, lambda: dh.gradients(engine, **rules))
        setattr(engine, name, true)
    engine.optimizer.cpu_offload = True
    case("offload", lambda: dh.gradients(engine, **rules))
    engine.optimizer.cpu_offload = False
    engine.optimizer.__class__ = type("MiCS_Optimizer", (type(engine.optimizer),), {})
    case("MiCS", lambda: dh.gradients(engine, **rules))
    return said


def test_what_cannot_be_right_is_refused(ranks: Ranks) -> None:
    expected = {
        "stage 0 in fp16": "AttachError: DeepSpeed with fp16 at stage 0",
        "the model inside": "AttachError: DeepSpeed has partitioned '",
        "a part": "AttachError: '0' is wrapped in DeepSpeedEngine",
        "another optimizer": "AttachError: this engine does not step the SGD",
        "no optimizer on a plain module": "UsageError: which optimizer?",
        "engine.optimizer": "nothing",
        "basic_optimizer": "nothing",
        "a frozen parameter": "AttachError: no matching parameter needs a gradient",
        "has_moe_layers": "AttachError: DeepSpeed with experts in parallel",
        "enable_backward_allreduce": "AttachError: DeepSpeed with an optimizer that reduces gradients itself",
        "mpu": "AttachError: DeepSpeed with model parallelism",
        "offload": "AttachError: DeepSpeed with an optimizer offloaded",
        "MiCS": "AttachError: DeepSpeed with MiCS",
    }
    for said in ranks(_refusals):
        assert said.keys() == expected.keys()
        assert {name: said[name] for name, start in expected.items() if not said[name].startswith(start)} == {}
