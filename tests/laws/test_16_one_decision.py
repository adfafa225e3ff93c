"""Law 16, one decision.

"What depends on a value (skip a step, adapt a threshold, change a plan) is decided alike by all ranks and does not
depend on how elements are sharded; its state can be saved and restored. A skipped step leaves every optimizer
untouched."

This file shows skipped steps for every optimizer, whoever calls the step; two attachments; and decisions on two
ranks. Its sibling shows steps that raise, and closures.
"""

from __future__ import annotations

import copy
import math
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks._torch import Inner, step_wrapper
from tests.support.engines import FIRST, loss_of, make, whole
from tests.support.optimizers import MAKE, Counts, backward, everything, net, same, small
from tests.support.ranks.harness import Ranks

# --- A step that is left out, for every optimizer


# What leaves a step out, and in which steps there is a reason: the first one comes before the optimizer has state.
LEAVING: dict[str, tuple[Any, tuple[int, ...]]] = {
    "not finite": (dh.SkipNonFinite(), (0, 3)),
    "a spike of the loss": (dh.SkipSpike(least=2, window=4, norm=False), (3,)),
    "a spike of the norm": (dh.SkipSpike(sigmas=1000.0, least=3, window=4, loss=False), (3,)),
}
#: Of the gradients; one element that is not a number is enough for the first.
FACTORS = {
    "not finite": 1.0,
    "a spike of the loss": 1.0,
    "a spike of the norm": 1e6,
}


@pytest.mark.parametrize("rule", LEAVING)
@pytest.mark.parametrize("kind", MAKE)
def test_a_step_that_is_left_out_changes_nothing(kind: str, rule: str) -> None:
    """The other steps are those of a run without the one that was left out."""
    model, other = net(), net()
    optimizer, plain = MAKE[kind](model.parameters()), MAKE[kind](other.parameters())
    made, reasons = LEAVING[rule]
    with dh.gradients(model, optimizer, rules=[made], every=1) as watch:
        for step in range(5):
            is_left_out = step in reasons
            backward(model, 0.1 * step, is_left_out and rule == "not finite")
            watch.note_loss(100.0 if is_left_out and "loss" in rule else 1.0 + 0.01 * (step % 2))
            for parameter in model.parameters() if is_left_out else ():
                parameter.grad.mul_(FACTORS[rule])  # type: ignore[union-attr]
            before = everything(model, optimizer)
            optimizer.step()
            if is_left_out:
                assert same(everything(model, optimizer)[:4], before[:4])
                assert rule != "not finite" or same(everything(model, optimizer), before)
            else:
                backward(other, 0.1 * step)
                plain.step()
            watch.flush()
            if "spike" in rule:
                assert watch.latest["spike"] == is_left_out
    seen = everything(model, optimizer)
    assert same(seen[:4], everything(other, plain)[:4])
    assert not same(seen[0], list(net().parameters()))


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind.endswith("fused")])
def test_a_step_that_the_scaler_and_a_rule_leave_out(kind: str) -> None:
    """The scaler and the rule both ask the fused kernel to skip, by adding 1 to a tensor.

    Told 1 it makes no update, and told 2 it would write NaN.
    """
    model = net()
    optimizer = MAKE[kind](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], every=1) as watch:
        for step in range(4):
            backward(model, step, step == 2)
            for parameter in model.parameters():
                parameter.grad.mul_(8.0)  # type: ignore[union-attr]
            scaler.scale(torch.ones(()))  # as if it had scaled the loss
            scaler.unscale_(optimizer)
            before = everything(model, optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert same(everything(model, optimizer), before) == (step == 2)
    # Adagrad of torch 2.11 has no such mark: the scaler leaves its whole step out, so that the rule has none to skip.
    is_asked = getattr(optimizer, "_step_supports_amp_scaling", False)
    assert watch.latest["skipped_total"] == (1 if is_asked else 0)


# --- Whoever calls the step


def _scheduled(optimizer: Any, attach: Callable[[], Any], early: bool) -> tuple[Any, Callable[[], None]]:
    make = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)  # noqa: E731
    schedule = make() if early else None
    watch = attach()
    schedule = schedule or make()

    def step() -> None:
        optimizer.step()
        schedule.step()

    return watch, step


def _accelerated(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """accelerate keeps the method that it finds, and puts it back on the optimizer in every step."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    outer = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
    return attach(), outer.step


def _compiled(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    def step() -> None:
        optimizer.step()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    return attach(), compiled


def _kept(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    method = optimizer.step
    return attach(), method


def _in_no_grad(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    return attach(), torch.no_grad()(lambda: optimizer.step())


def _replaced(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Somebody has put a step of their own on the object, around that of the class."""
    true = optimizer.step
    optimizer.step = types.MethodType(lambda self: true(), optimizer)
    return attach(), lambda: optimizer.step()


WAYS: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "a schedule, made before": lambda o, a: _scheduled(o, a, True),
    "a schedule, made after": lambda o, a: _scheduled(o, a, False),
    "accelerate with a scaler": _accelerated,
    "compiled": _compiled,
    "a method kept from before": _kept,
    "no_grad": _in_no_grad,
    "replaced on the object": _replaced,
    "by the class": lambda o, a: (a(), lambda: type(o).step(o)),
}


@pytest.mark.first_tier(way=WAYS.keys() - {"accelerate with a scaler", "compiled"})
@pytest.mark.parametrize("way", WAYS)
def test_whoever_calls_the_step_it_is_left_out(way: str) -> None:
    model = net()
    optimizer = Counts(model.parameters())
    function = Inner(step_wrapper(Counts)).function
    attach = lambda: dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], every=1)  # noqa: E731
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        watch, step = WAYS[way](optimizer, attach)
        moved = []
        for number in range(4):
            backward(model, number, number in (0, 2))
            before = everything(model, optimizer)
            step()
            moved.append(not same(everything(model, optimizer)[0], before[0]))
    own = vars(optimizer).get("step")
    assert moved == [False, True, False, True]
    assert (optimizer.param_groups[0]["step"], watch.steps) == (2, 4)
    watch.remove()
    assert vars(optimizer).get("step") is own
    assert Inner(step_wrapper(Counts)).function is function
    assert not optimizer._optimizer_step_pre_hooks
    backward(model, 4, True)
    step()
    assert optimizer.param_groups[0]["step"] == 3


def test_another_optimizer_of_the_class_is_left_alone() -> None:
    model, other = net(), net()
    optimizer, plain = Counts(model.parameters()), Counts(other.parameters())
    first = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()])
    second = dh.gradients(model, optimizer, rules=[dh.Scale(0.5)])
    for net_ in (model, other):
        backward(net_, 0, True)
    first.remove()
    plain.step()
    assert math.isnan(float(other[0].weight.detach()[0, 0]))  # type: ignore[index]
    backward(model, 0)
    grad = model[0].weight.grad.clone()  # type: ignore[index, union-attr]
    optimizer.step()
    assert torch.equal(model[0].weight.grad, grad * 0.5)  # type: ignore[index, arg-type]
    second.remove()
    assert not hasattr(Inner(step_wrapper(Counts)).function, "seam")


def test_copies_and_pickles_of_an_optimizer_are_plain() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]) as watch:
        backward(model, 0)
        optimizer.step()
        copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
        assert "disthooks" not in str(pickle.dumps(optimizer))
        for each in (copied, pickled):
            for group in each.param_groups:
                for p in group["params"]:
                    p.grad = torch.full_like(p, math.nan)
            each.step()
            assert math.isnan(float(each.param_groups[0]["params"][0].detach()[0, 0]))
        assert watch.steps == 1


# --- A second attachment does not undo what the first one decided


NAN = math.nan


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("second", [{"stats": [stats.Norm()]}, {"rules": [dh.ClipNorm(1.0)]}], ids=["stats", "rules"])
def test_skip_survives_a_second_attachment(second: Any, fused: bool) -> None:
    model, optimizer = small(fused=fused)
    before = model.weight.clone()
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]), dh.gradients(model, optimizer, **second):
        model(torch.full((1, 2), NAN)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)


# --- State is saved and restored


def _zeros(name: str, grad: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(grad)


def test_averages_are_saved_and_a_broken_step_is_left_out() -> None:
    def run(steps: range, state: dict[str, Any] | None = None, spoil: int = -1) -> Any:
        model = make("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        watch = dh.gradients(model, optimizer, rules=[_zeros], stats=[stats.NoiseScale()], every=1)
        if state is not None:
            watch.load_state_dict(state)
        for step in steps:
            optimizer.zero_grad()
            for micro in range(2):
                loss_of(model, 2 * step + micro, "plain").backward()
            if step == spoil:
                model.scale.grad[0, 0] = math.nan
            optimizer.step()
        return watch

    through = run(range(4))
    half = run(range(2))
    resumed = run(range(2, 4), half.state_dict())
    through.remove()
    resumed.remove()
    assert resumed.latest == through.latest
    assert through.latest["noise_scale_norm2"] > 0
    spoilt = run(range(5), spoil=4)
    spoilt.remove()
    assert {k: v for k, v in spoilt.latest.items() if k != "step"} == {
        k: v for k, v in through.latest.items() if k != "step"
    }
    model = make("plain")
    with dh.gradients(model, torch.optim.SGD(model.parameters()), stats=[stats.Norm()]) as other:
        with pytest.raises(dh.errors.UsageError, match=r"state is of the stats \['NoiseScale'\]"):
            other.load_state_dict(half.state_dict() | {"rules": []})
        other.load_state_dict({"steps": 7, "rules": []})  # of a version without averages
        assert other.steps == 7


# --- All ranks decide alike


def _skips(rank: int, engine: str) -> tuple[float, float, list[float]]:
    """The sum of 1500 squares of 5e18 is too large for float32, and so is that of the 750 that one rank has."""
    torch.manual_seed(0)
    model: Any = nn.Linear(1500, 1, bias=False)
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite(), dh.ClipNorm(1.0, 6.0)], every=1) as watch:
        model(torch.full((1, 1500), 5e18)).sum().backward()
        optimizer.step()
    grads = whole(next(iter(model.parameters())).grad)
    return watch.latest["skipped"], watch.latest["grad_norm_l6"], [float(grads.min()), float(grads.max())]


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["plain", "ddp", "fsdp2"])
def test_a_decision_does_not_depend_on_sharding(ranks: Ranks, engine: str) -> None:
    for skipped, norm, grads in ranks(_skips, engine):
        assert skipped == 0
        assert norm == pytest.approx(5e18 * 1500 ** (1 / 6), rel=1e-6)
        assert grads == pytest.approx([1500 ** (-1 / 6)] * 2, rel=1e-6)


def _two(rank: int, engine: str) -> bool:
    model = make(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()])
    second = dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)])
    (loss_of(model, 0, engine, rank) * (NAN if rank == 1 else 1.0)).backward()
    optimizer.step()
    first.remove()
    second.remove()
    return any(bool(torch.isnan(whole(p)).any()) for p in model.parameters())


@pytest.mark.dist
@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp", "fsdp1"])
def test_skip_survives_a_second_attachment_on_ranks(ranks: Ranks, engine: str) -> None:
    assert ranks(_two, engine) == [False, False]
