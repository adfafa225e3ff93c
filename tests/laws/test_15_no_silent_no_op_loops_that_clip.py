"""Law 15, no silent no-op, in loops that clip by themselves: rules and statistics see what backward made.

They act before the loop's own clipping, and not on what that clipping left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import disthooks as dh
from disthooks._torch import Inner


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def norm_of(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm())  # type: ignore[union-attr]


def backward(model: nn.Module, step: int, scaler: Any = None) -> float:
    model.zero_grad()
    loss = 50 * model(torch.linspace(-1, 1, 6).view(2, 3) + step).square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    return norm_of(model) / (1.0 if scaler is None else scaler.get_scale())


def _two_parts(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)


CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "norm, of the module": lambda model: torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm=0.1),
    "norm, by keywords": lambda model: clip_grad_norm_(parameters=model.parameters(), max_norm=0.1, foreach=False),
    "norm, one by one": lambda model: [clip_grad_norm_(parameter, 0.1) for parameter in model.parameters()],
    "value": lambda model: clip_grad_value_(model.parameters(), 0.01),
    "norm in two parts": _two_parts,
}


@pytest.mark.parametrize("way", CLIPS)
def test_what_is_logged_is_what_backward_made(way: str) -> None:
    """A rule acts before the loop's clipping, too, and that clipping is as it would be without disthooks."""
    model, other = net(), net()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    records: list[Any] = []
    rules = [dh.ClipNorm(5.0)]
    with dh.gradients(model, optimizer, rules=rules, stats=[dh.stats.Norm()], sinks=[records.append], every=1) as watch:
        true = []
        for step in range(3):
            true.append(backward(model, step))
            CLIPS[way](model)
            clipped = norm_of(model)
            optimizer.step()
            backward(other, step)
            for parameter in other.parameters():
                parameter.grad.mul_(5.0 / (true[-1] + 1e-6))  # type: ignore[union-attr]
            with dh.gradients(other, plain, stats=[dh.stats.MaxAbs()]):
                CLIPS[way](other)
            late = way == "norm in two parts"  # the loop has taken the norm before the rule
            assert clipped == pytest.approx(norm_of(other) * (5.0 / true[-1] if late else 1.0), rel=1e-4)
            plain.step()
    assert [record["grad_norm"] for record in records] == pytest.approx(true, rel=1e-5)
    assert min(true) > 5
    assert watch.steps == 3
    for function in (clip_grad_norm_, clip_grad_value_):
        assert Inner(function).function.__module__ == "torch.nn.utils.clip_grad"
        assert Inner(function).function.__code__.co_filename.endswith("clip_grad.py")


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class _Callable:
    def __call__(self, parameters: Any, max_norm: float) -> Any:
        return clip_grad_norm_(parameters, max_norm)


#: Functions of a user's in the place of torch's `clip_grad_norm_`, and whether torch's can be found behind them.
REPLACED: dict[str, tuple[Callable[..., Any], bool]] = {
    "a wrapper": (_logged(clip_grad_norm_), False),
    "functools.wraps": (functools.wraps(clip_grad_norm_)(_logged(clip_grad_norm_)), True),
    "functools.partial": (functools.partial(clip_grad_norm_, norm_type=2.0), True),
    "an object": (_Callable(), False),
    "a method": (_Callable().__call__, False),
}


@pytest.mark.parametrize("both", [False, True], ids=["one name", "both names"])
@pytest.mark.parametrize("way", REPLACED)
def test_a_function_in_the_place_of_torchs_is_called_as_it_is(
    way: str, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules act before it if torch's function is found behind it, and in the step otherwise."""
    function, is_found = REPLACED[way]
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", function)
    if both:
        monkeypatch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", function)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(0.5)], stats=[dh.stats.Norm()], every=1) as watch:
        true = backward(model, 0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        is_before = is_found or not both
        assert norm_of(model) == pytest.approx(0.5 if is_before else 1.0, rel=1e-4)
        optimizer.step()
        watch.flush()
    assert watch.latest["grad_norm"] == pytest.approx(true if is_before else 1.0, rel=1e-4)
    assert norm_of(model) == pytest.approx(0.5, rel=1e-4)
    assert torch.nn.utils.clip_grad_norm_ is function


def test_of_two_models_the_one_that_is_clipped_begins_its_step() -> None:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    watches = [
        dh.gradients(m, o, rules=[dh.Scale(0.5)], stats=[dh.stats.Norm()], every=1)
        for m, o in zip(models, optimizers, strict=True)
    ]
    first, _ = (backward(model, 0) for model in models)
    clip_grad_norm_(models[0].parameters(), math.inf)
    assert norm_of(models[0]) == pytest.approx(first / 2)
    second = backward(models[1], 1)
    for optimizer in optimizers:
        optimizer.step()
    assert [norm_of(model) for model in models] == pytest.approx([first / 2, second / 2])
    for watch, true in zip(watches, (first, second), strict=True):
        watch.remove()
        assert watch.latest["grad_norm"] == pytest.approx(true)
        assert watch.steps == 1


def test_a_norm_that_is_only_asked_for_begins_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[dh.Scale(0.5)]) as watch:
        true = backward(model, 0)
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert (float(total), watch.steps) == (pytest.approx(true), 0)
        with torch.no_grad():  # a hook in backward that clips as gradients arrive
            handle = model[0].weight.register_post_accumulate_grad_hook(  # type: ignore[union-attr, operator, index]
                lambda p: clip_grad_value_([p], 0.1) and None
            )
        backward(model, 1)
        handle.remove()
        assert watch.steps == 0
        optimizer.step()
    assert watch.steps == 1


@pytest.mark.parametrize("early", [False, True], ids=["unscaled first", "clipped while scaled"])
def test_a_grad_scaler_and_clipping_keep_the_users_units(early: bool) -> None:
    """A loop that clips before the scaler has unscaled clips scaled gradients.

    Statistics are in the user's units all the same.
    """
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    stats = [dh.stats.Norm(), dh.stats.Spread()]
    records: list[Any] = []
    scale, unscale = torch.amp.GradScaler.scale, torch.amp.GradScaler.unscale_
    with dh.gradients(model, optimizer, stats=stats, sinks=[records.append], every=1):
        true = []
        for step in range(3):
            true.append(backward(model, step, scaler))
            if not early:
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.8)
            scaler.step(optimizer)
            scaler.update()
    wanted = [0.1] * 3 if early else true
    assert [record["grad_norm"] for record in records] == pytest.approx(wanted, rel=1e-4)
    assert [record["grad_norm/mean_rank"] for record in records] == pytest.approx(true, rel=1e-4)
    assert torch.amp.GradScaler.__dict__["scale"] is scale
    assert torch.amp.GradScaler.__dict__["unscale_"] is unscale


def test_a_model_beside_one_that_a_scaler_scales_is_ruled() -> None:
    """The scaler's update() ends its scaled step, so the gradients of the other model are final when its loop clips."""
    models = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    update = torch.amp.GradScaler.update
    records: list[Any] = []
    stats = [dh.stats.Norm()]
    with (
        dh.gradients(models[0], optimizers[0], stats=stats, every=1),
        dh.gradients(models[1], optimizers[1], stats=stats, sinks=[records.append], every=1),
    ):
        true = []
        for step in range(3):
            backward(models[0], step, scaler)
            scaler.unscale_(optimizers[0])
            clip_grad_norm_(models[0].parameters(), 0.1)
            scaler.step(optimizers[0])
            scaler.update()
            true.append(backward(models[1], step))
            clip_grad_norm_(models[1].parameters(), 0.1)
            optimizers[1].step()
    assert [record["grad_norm"] for record in records] == pytest.approx(true, rel=1e-4)
    assert torch.amp.GradScaler.__dict__["update"] is update


@pytest.mark.parametrize("which", [["0.weight"], ["2.bias"], ["0.weight", "0.bias", "2.weight", "2.bias"]])
def test_a_parameter_that_is_frozen_after_its_backward_is_in_the_step(which: list[str]) -> None:
    """The frozen parameter still has its gradient.

    torch takes no hook on it, and the step is begun once all the same.
    """
    model, other = net(), net()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(0.5)], stats=[dh.stats.Norm()], every=1) as watch:
        true = backward(model, 0)
        for name in which:
            model.get_parameter(name).requires_grad_(False)
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    backward(other, 0)
    clip_grad_norm_(other.parameters(), 0.5)
    clip_grad_norm_(other.parameters(), 0.3)
    plain.step()
    assert watch.steps == 1
    assert watch.latest["grad_norm"] == pytest.approx(true, rel=1e-5)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, check_device=False)
