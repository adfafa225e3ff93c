"""Several optimizers that are attached together, of which not all step at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import UsageError


def two() -> tuple[nn.ParameterList, list[torch.optim.Optimizer]]:
    """Two numbers, each with an optimizer."""
    model = nn.ParameterList([nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2)])
    return model, [torch.optim.SGD([parameter], lr=1.0) for parameter in model]


def backward(model: nn.ParameterList) -> None:
    """Add 3 and 4 to the two gradients."""
    (3 * model[0] + 4 * model[1]).backward()


def grads(model: nn.ParameterList) -> list[float]:
    return [pytest.approx(float(parameter.grad), abs=1e-6) for parameter in model]


def test_an_update_is_that_of_those_that_stepped() -> None:
    model, (often, seldom) = two()
    seen: list[Any] = []
    watched = [stats.Updates(per_parameter=True)]
    with dh.gradients(model, [often, seldom], stats=watched, sinks=[seen.append], every=1) as watch:
        for step in range(4):
            backward(model)
            watch.begin_step(optimizers=[often, seldom] if step % 2 else [often])
            often.step()
            if step % 2:
                seldom.step()
    assert [record["step"] for record in seen] == [0, 1, 2, 3]
    assert [record["update_norm/param/1"] > 0 for record in seen] == [False, True, False, True]
    assert all(record["update_norm/param/0"] > 0 for record in seen)


@pytest.mark.parametrize("attached", [{"rules": [dh.ClipNorm(1.0)]}, {"stats": [stats.Norm()]}])
def test_one_that_does_not_step_and_nobody_said_so_is_an_error(attached: dict[str, Any]) -> None:
    model, optimizers = two()
    with dh.gradients(model, optimizers, **attached):
        backward(model)
        optimizers[0].step()
        backward(model)
        before = float(model[0].detach())
        with pytest.raises(UsageError, match=r"SGD \(number 1\) did not step.*begin_step\(optimizers="):
            optimizers[0].step()
        assert float(model[0].detach()) == before


def test_a_loop_that_clips_beside_a_frozen_optimizer_is_measured_before_it_clips() -> None:
    model, optimizers = two()
    model[1].requires_grad_(False)
    with dh.gradients(model, optimizers, stats=[stats.Norm()], every=1) as watch:
        for _ in range(3):
            model[0].grad = None
            (3 * model[0]).backward()
            nn.utils.clip_grad_norm_([model[0]], 1.0)
            assert float(watch.norm) == pytest.approx(3.0), "the step was begun before the loop clipped"
            optimizers[0].step()
            watch.flush()
            assert watch.latest["grad_norm"] == pytest.approx(3.0)


def test_optimizers_that_are_not_attached_cannot_be_told() -> None:
    model, optimizers = two()
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with dh.gradients(model, optimizers, rules=[dh.ClipNorm(1.0)]) as watch:
        for given in ([], [other]):
            with pytest.raises(UsageError, match="give some of the optimizers of"):
                watch.begin_step(optimizers=given)
    with (
        dh.gradients(model, optimizers[:1], rules=[dh.ClipNorm(1.0)]) as watch,
        pytest.raises(UsageError, match="has one"),
    ):
        watch.begin_step(optimizers=optimizers[:1])


def test_a_loop_that_clips_for_each_optimizer_begins_one_step() -> None:
    """torch's function begins the step for both; the second clipping and the second step belong to it."""
    model, optimizers = two()
    with dh.gradients(model, optimizers, rules=[dh.ClipNorm(1.0)], every=1) as watch:
        for step in range(2):
            backward(model)
            for optimizer, parameter in zip(optimizers, model, strict=True):
                nn.utils.clip_grad_norm_([parameter], 10.0)
                optimizer.step()
            assert watch.steps == step + 1
            assert grads(model) == [0.6, 0.8]
            for optimizer in optimizers:
                optimizer.zero_grad()


def test_torchs_clipping_does_not_begin_the_step_of_those_that_were_left_out() -> None:
    model, (often, seldom) = two()
    with dh.gradients(model, [often, seldom], rules=[dh.ClipNorm(1.0)]) as watch:
        backward(model)
        watch.begin_step(optimizers=[often])
        nn.utils.clip_grad_norm_([model[0]], 0.5)
        often.step()
        assert grads(model) == [0.5, 4.0]
        assert watch.steps == 1


@pytest.mark.parametrize("which", [0, 1])
def test_under_a_scaler_the_one_that_does_not_step_is_found_too(which: int) -> None:
    model, optimizers = two()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with dh.gradients(model, optimizers, rules=[dh.ClipNorm(1.0)]):
        for step in range(2):
            scaler.scale(3 * model[0] + 4 * model[1]).backward()
            if not step:
                scaler.step(optimizers[which])
                scaler.update()
                continue
            with pytest.raises(UsageError, match=f"number {1 - which}\\) did not step"):
                scaler.step(optimizers[which])


# --- optimizers that step inside backward


def linear(rules: list[Any], **more: Any) -> tuple[nn.Linear, Callable[[float], None], Any]:
    """A layer whose two parameters step in backward, a function that runs one, and the attachment."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1.0) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    watch = dh.gradients(model, list(optimizers.values()), rules=rules, **more)
    return model, lambda x: model(torch.full((1, 1), x)).sum().backward(), watch


ONE = [dh.ClipValue(0.01), dh.ClipNorm(0.01, by="parameter"), dh.only("*", dh.ClipValue(0.01)), dh.Scale(1e-4)]


@pytest.mark.parametrize("rule", ONE, ids=str)
def test_a_rule_for_one_gradient_works_inside_backward(rule: Any) -> None:
    model, run, watch = linear([rule])
    before = [p.item() for p in model.parameters()]
    run(100.0)
    run(100.0)
    moved = [before - now.item() for before, now in zip(before, model.parameters(), strict=True)]
    assert moved == [pytest.approx(0.02, abs=1e-6), pytest.approx(2e-4 if "Scale" in str(rule) else 0.02, abs=1e-6)]
    assert watch.steps == 2, "the steps of one backward count as one"
    watch.remove()


@pytest.mark.parametrize("rule", [dh.ClipNorm(0.01), dh.SkipNonFinite(), dh.ClipPercentile(), dh.AdaGC()], ids=str)
def test_a_rule_that_needs_all_gradients_is_an_error_inside_backward(rule: Any) -> None:
    model, run, watch = linear([rule])
    before = [p.item() for p in model.parameters()]
    with pytest.raises(UsageError, match=r"SGD steps inside backward.*step after backward"):
        run(math.nan)
    assert [p.item() for p in model.parameters()] == before
    watch.remove()


@pytest.mark.parametrize("more", [{"stats": [stats.Norm()]}, {"stats": [stats.Norm()], "sinks": [print]}])
def test_nothing_is_logged_of_steps_inside_backward_so_that_is_an_error(more: dict[str, Any]) -> None:
    _, run, watch = linear([], **more)
    with pytest.raises(UsageError, match=r"Norm\(.*needs all of them"):
        run(1.0)
    watch.remove()


@pytest.mark.parametrize("which", [0, 1])
def test_a_backward_after_the_step_was_begun_makes_rules_act_on_all_again(which: int) -> None:
    """It reaches the gradients of one optimizer alone, and the norm is that of both."""
    model, optimizers = two()
    with dh.gradients(model, optimizers, rules=[dh.ClipNorm(1.0)], stats=[stats.Norm()], every=1) as watch:
        for _ in range(2):
            backward(model)
            watch.begin_step()
            assert grads(model) == [0.6, 0.8]
            (7 * model[which]).backward()
            wanted = [0.6, 0.8]
            wanted[which] += 7
            for optimizer in optimizers:
                optimizer.step()
            norm = math.hypot(*wanted)
            assert grads(model) == [each / norm for each in wanted]
            watch.flush()
            assert watch.latest["grad_norm"] == pytest.approx(norm, abs=1e-5)
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert watch.steps == 2
