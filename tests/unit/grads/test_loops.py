"""Loops of strangers on a plain module: rules and statistics act, or an error or a warning says that they cannot."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import UsageError
from disthooks.grads.records import StepNumbers
from tests.support import no_warning

NAN = math.nan


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def backward(model: nn.Module, step: int = 0, scale: Any = None, factor: float = 1.0) -> torch.Tensor:
    loss = factor * 50 * model(torch.linspace(-1, 1, 6).view(2, 3) + step).square().sum()
    (loss if scale is None else scale(loss)).backward()
    return loss.detach()


def scaled(*scales: float) -> tuple[list[nn.Module], list[torch.optim.Optimizer], list[torch.amp.GradScaler]]:
    """A model with an optimizer and a scaler for each of ``scales``."""
    models = [net() for _ in scales]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
    return models, optimizers, [torch.amp.GradScaler("cpu", init_scale=scale) for scale in scales]


def norm_of(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm())  # type: ignore[union-attr]


# --- The watched optimizer does not step


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as most repositories have it: around a base optimizer."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        size = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=float(group["rho"] / (size + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


@pytest.mark.parametrize("inner", [True, False])
def test_sam_is_watched_by_its_base_optimizer(inner: bool) -> None:
    model = net()
    sam = Sam(model.parameters(), torch.optim.SGD, lr=0.1)
    with dh.gradients(model, sam.base if inner else sam, rules=[dh.ClipNorm(0.1)]) as watch:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                backward(model)
                sam.first_step()
                backward(model)
                sam.second_step()
        assert [("in SAM" in str(each.message)) for each in told] == ([] if inner else [True])
    assert watch.steps == (2 if inner else 0)


def test_an_optimizer_inside_of_the_watched_one_is_no_stranger() -> None:
    model = net()
    sam = Sam(model.parameters(), torch.optim.SGD, lr=0.1)
    with no_warning():
        for one in (sam, sam.base):
            with dh.gradients(model, one, stats=[stats.Norm()]):
                backward(model)
                sam.step(lambda: backward(model))


def test_weights_that_are_written_by_hand_are_said_at_the_end() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()])
    for _ in range(3):
        backward(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        model.zero_grad()
    assert watch.report().lacks_step
    assert "no step of this optimizer followed" in str(watch.report())
    with pytest.warns(UserWarning, match=r"gradients\(\) of SGD: after 0 steps there were more backwards"):
        watch.remove()


def test_the_last_micro_batches_of_a_training_are_not_blamed() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with no_warning(), dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]) as watch:
        for batch in range(7):  # of four batches a step: three are left over
            backward(model, batch)
            if batch == 3:
                optimizer.step()
                optimizer.zero_grad()
        assert not watch.report().lacks_step


# --- Two attachments, and a clip after the step


def test_rules_of_two_attachments_for_one_gradient_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.only("0.*", dh.Scale(0.5))]):
        with pytest.raises(UsageError, match=r"another attachment, .*Scale.* change the gradients of 0.weight, 0.bias"):
            dh.gradients(model, optimizer, rules=[dh.Scale(0.5)])
        with pytest.raises(UsageError, match="another attachment"):
            dh.gradients(model, optimizer, rules=[dh.only("*", dh.Scale(0.5), at="local")])
        dh.gradients(model, optimizer, rules=[dh.SkipNonFinite(), dh.only("2.*", dh.Scale(0.5))]).remove()
        dh.gradients(model, optimizer, stats=[stats.Norm()]).remove()
    dh.gradients(model, optimizer, rules=[dh.Scale(0.5)]).remove()


# --- GradScalers


@pytest.mark.parametrize("begins_early", [False, True])
def test_an_overflow_of_one_scaler_leaves_the_other_scaler_and_its_step_alone(begins_early: bool) -> None:
    def run(is_watched: bool) -> tuple[list[torch.Tensor], list[float]]:
        models, optimizers, scalers = scaled(8.0, 1024.0)
        parameters = [parameter for model in models for parameter in model.parameters()]
        with contextlib.ExitStack() as attached:
            if is_watched:
                rules = [dh.Scale(0.5)] if begins_early else []
                watch = attached.enter_context(dh.gradients(models, optimizers, rules=rules, stats=[stats.Norm()]))
            for step in range(4):
                backward(models[0], step, scalers[0].scale, math.inf if step == 2 else 1.0)
                backward(models[1], step, scalers[1].scale)
                for scaler, optimizer in zip(scalers, optimizers, strict=True):
                    scaler.unscale_(optimizer)
                if begins_early and is_watched:
                    watch.begin_step()
                elif begins_early:
                    torch._foreach_mul_([parameter.grad for parameter in parameters], 0.5)
                for scaler, optimizer in zip(scalers, optimizers, strict=True):
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            assert not is_watched or watch.steps == 4
        return [parameter.detach() for parameter in parameters], [scaler.get_scale() for scaler in scalers]

    (watched, scales), (plain, true_scales) = run(True), run(False)
    assert scales == true_scales == [4.0, 1024.0]
    assert all(map(torch.equal, watched, plain))


def test_an_update_of_the_one_scaler_before_all_have_stepped_is_an_error() -> None:
    models = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with dh.gradients(models, optimizers, stats=[stats.Norm()]):
        for model in models:
            backward(model, 0, scaler.scale)
        scaler.step(optimizers[0])
        scaler.update()
        before = [parameter.detach().clone() for parameter in models[1].parameters()]
        with pytest.raises(
            UsageError, match=r"update\(\) was called before SGD, one of .*, stepped.*then scaler.update"
        ):
            scaler.step(optimizers[1])
        assert all(map(torch.equal, before, models[1].parameters()))


def test_two_scalers_of_which_nothing_tells_are_an_error_before_anything_changes() -> None:
    models, optimizers, scalers = scaled(8.0, 1024.0)
    with dh.gradients(models, optimizers, stats=[stats.Norm()], every=1):
        for model, scaler in zip(models, scalers, strict=True):
            backward(model, 0, scaler.scale)
        before = [p.detach().clone() for model in models for p in model.parameters()]
        other = norm_of(models[1])
        with pytest.raises(UsageError, match=r"2 GradScalers are in use.*unscale_\(optimizer\) for each"):
            scalers[0].step(optimizers[0])
        assert norm_of(models[1]) == other
        assert all(map(torch.equal, before, [p.detach() for model in models for p in model.parameters()]))


@pytest.mark.parametrize("given", [True, False])
def test_begin_step_unscales(given: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[stats.Norm()], every=1) as watch:
        for step in range(2):
            backward(model, step, scaler.scale)
            true = norm_of(model) / 256.0
            if step == 0 or given:
                watch.begin_step(scaler)
            else:
                watch.begin_step()  # the scaler of this optimizer is known by now
            assert norm_of(model) == pytest.approx(1.0, rel=1e-4)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.flush()
            assert watch.latest["grad_norm"] == pytest.approx(true, rel=1e-4)


def test_begin_step_without_a_scaler_that_it_cannot_know_is_an_error() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]) as watch:
        backward(model, 0, scaler.scale)
        scaled = norm_of(model)
        with pytest.raises(UsageError, match=r"has not unscaled the gradients of SGD: call begin_step\(scaler\)"):
            watch.begin_step()
        assert norm_of(model) == scaled
        watch.begin_step(torch.amp.GradScaler(enabled=False))  # these gradients go through none, says the loop
        assert norm_of(model) == pytest.approx(1.0, rel=1e-4)


# --- Optimizers that step together


def test_an_optimizer_that_was_frozen_when_the_step_began_need_not_have_stepped() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])
    first, second = (torch.optim.SGD([parameter], lr=1.0) for parameter in model)
    model[1].requires_grad_(False)
    with dh.gradients(model, [first, second], rules=[dh.ClipNorm(1.0)]) as watch:
        for step in range(4):
            if step == 2:
                model[1].requires_grad_(True)
            (3 * model[0] + 4 * model[1]).backward()
            first.step()
            if step >= 2:
                second.step()
            for parameter in model:
                parameter.grad = None
    assert watch.steps == 4


def test_lbfgs_beside_another_optimizer_with_statistics_alone() -> None:
    model = net()
    lbfgs = torch.optim.LBFGS(model[0].parameters(), lr=0.1, max_iter=3)  # type: ignore[index]
    sgd = torch.optim.SGD(model[2].parameters(), lr=1e-3)  # type: ignore[index]

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(torch.linspace(-1, 1, 6).view(2, 3)).square().sum()
        loss.backward()
        return loss

    with dh.gradients(model, [lbfgs, sgd], stats=[stats.Norm()], every=1) as watch:
        for _ in range(3):
            lbfgs.step(closure)
            sgd.step()
    assert watch.steps == 3


# --- A skip that the loop can see


@pytest.mark.parametrize("fused", [False, True])
def test_a_schedule_can_follow_the_steps_that_were_made(fused: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]) as watch:
        assert not watch.was_skipped
        for step in range(4):
            backward(model, step, factor=NAN if step in (1, 2) else 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert (watch.skipped.dtype, watch.skipped.shape) == (torch.bool, ())
            assert watch.was_skipped == (step in (1, 2))
            if not watch.was_skipped:
                schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_attachment_tells_of_the_skip_of_another_one() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]),
        dh.gradients(model, optimizer, stats=[stats.Norm()]) as watch,
    ):
        backward(model, factor=NAN)
        optimizer.step()
        assert watch.was_skipped


# --- What a skipped step leaves behind


def test_buffers_stay_if_asked_for_and_it_is_said() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], restore_buffers=False):
        model(torch.full((2, 3), NAN)).sum().backward()
        with pytest.warns(UserWarning, match=r"step 0 was left out, .* into 3 buffers \(1.running_mean, .*restore_buf"):
            optimizer.step()
    assert model[1].running_mean.isnan().all()  # type: ignore[union-attr]


class Counting(nn.Module):
    """Writes into a buffer in place, and gives another one a new tensor, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach()
        return self.weight * x * self.mask


@pytest.mark.parametrize("calls_the_model", [True, False])
def test_other_buffers_are_put_back_too(calls_the_model: bool) -> None:
    model = nn.Sequential(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = model if calls_the_model else model[0]
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]):
        for step in range(4):
            optimizer.zero_grad()
            forward(torch.full((3,), NAN if step == 2 else 1.0)).sum().backward()
            optimizer.step()
    assert float(model[0].calls) == 3.0  # type: ignore[arg-type]
    assert torch.equal(model[0].mean, _mean_of(3))  # type: ignore[arg-type]
    assert torch.equal(model[0].mask, torch.ones(3))  # type: ignore[arg-type]


def _mean_of(calls: int) -> torch.Tensor:
    mean = torch.zeros(3)
    for _ in range(calls):
        mean = 0.9 * mean + 0.1 * torch.ones(3)
    return mean


def test_a_state_that_was_loaded_between_steps_is_not_lost() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaded = {name: torch.full_like(value, 7) for name, value in model.state_dict().items() if "running" in name}
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        model.load_state_dict(loaded, strict=False)
        model(torch.full((2, 3), NAN)).sum().backward()
        optimizer.step()
    assert torch.equal(model[1].running_mean, torch.full((4,), 7.0))  # type: ignore[arg-type]


def test_optimizers_that_step_inside_backward_keep_no_numbers_of_steps() -> None:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    with dh.gradients(model, list(optimizers.values()), rules=[dh.ClipValue(1.0)]):
        for parameter, optimizer in optimizers.items():
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        before = numbers_alive()
        for step in range(20):
            model.zero_grad()
            backward(model, step)
        assert numbers_alive() - before < 5


def numbers_alive() -> int:
    gc.collect()  # those of other tests may wait for it
    return sum(type(each) is StepNumbers for each in gc.get_objects())
