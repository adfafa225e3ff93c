"""What is attached acts once a step, on the right parameters, or there is an error: optimizers, rules and sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import DisthooksError, UsageError
from tests.support.engines import close, loss_of, make
from tests.support.logs import measured


def _linear(bias: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1, bias=bias)
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


# --- an optimizer whose step runs another optimizer's step


def test_a_step_that_calls_super_step_counts_once() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model, _ = _linear()  # a plain SGD was made: torch has patched SGD.step, and now patches Mine.step too
    optimizer = Mine(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[lambda name, grad: grad * 0.5]) as watch:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert watch.steps == 1
    assert model.weight.grad.tolist() == [[0.5, 0.5]]


def test_a_wrapper_that_is_an_optimizer_by_class_only() -> None:
    """accelerate's AcceleratedOptimizer inherits from Optimizer and never calls its __init__."""

    class AcceleratedOptimizer(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:
            return self.optimizer.param_groups

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    model, inner = _linear()
    optimizer = AcceleratedOptimizer(inner)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]) as watch:
        optimizer.step()
    assert watch.steps == 1


# --- wrong numbers


def test_a_small_factor_does_not_vanish_in_float16() -> None:
    weight = nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.full((10_000,), 60_000.0, dtype=torch.float16)
    with dh.gradients(nn.ParameterList([weight]), optimizer, rules=[dh.ClipNorm(0.1)]):
        optimizer.step()
    assert float(weight.grad.double().norm()) == pytest.approx(0.1, rel=1e-2)


def test_a_large_norm_type_is_refused() -> None:
    with pytest.raises(UsageError, match=r"up to 6, or math\.inf"):
        dh.ClipNorm(1.0, 8.0)


def test_rules_work_in_steps_that_are_not_logged() -> None:
    """Passes; but with rewriting in logged steps alone every other test of gradients passes too."""
    model, optimizer = _linear()
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(0.5)], stats=[stats.Norm()], every=100):
        for _ in range(3):
            model.weight.grad = torch.full((1, 2), 3.0)
            optimizer.step()
    assert float(model.weight.grad.norm()) == pytest.approx(0.5, rel=1e-5)


# --- silent no-ops


def test_on_gradient_refuses_scaled_gradients() -> None:
    model, _ = _linear()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with dh.on_gradient(model, "weight", lambda grad: grad.clamp(-1, 1)), pytest.raises(UsageError, match="unscale_"):
        scaler.step(optimizer)


def test_only_within_only_that_share_no_parameter() -> None:
    model, optimizer = _linear(bias=True)
    with pytest.raises(DisthooksError):
        dh.gradients(model, optimizer, rules=[dh.only("weight", dh.only("bias", dh.ClipNorm(1e-3)))])


# --- what the docs promise


def test_an_in_place_local_function_is_refused() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a + self.b) * x

    model = Sum()
    hook = dh.on_gradient(model, "a", lambda grad: grad.zero_(), at="local")
    with hook, pytest.raises(UsageError, match=r"'a' changed it in place, and autograd may use the same tensor"):
        model(torch.ones(3)).sum().backward()


def test_console_prints_the_list_of_any_statistic() -> None:
    dh.sinks.Console(print=lambda line: None)({"step": 0, "quantiles": [0.1, 0.9]})


# --- names, groups, and models inside of others


def test_a_loss_that_is_known_is_in_the_record() -> None:
    model, records = make("plain"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, stats=[stats.Norm()], sinks=[records.append], every=1) as watch:
        for step in range(2):
            loss_of(model, step, "plain").backward()
            optimizer.step()
            watch.flush(loss=0.5 + step, grad_norm=-1.0)
        watch.flush(loss=7.0)  # nothing is left to be read
    assert [record["loss"] for record in records] == [0.5, 1.5]
    assert all(record["grad_norm"] > 0 for record in records)
    assert watch.latest == measured(records[-1])


def test_on_gradient_takes_everything_off() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    model = make("plain")
    for at in ("local", "final"):
        dh.on_gradient(model, "*", torch.zeros_like, at).remove()
    assert not _global_optimizer_pre_hooks
    assert not model._forward_pre_hooks
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_two_rules_of_a_kind_write_different_names() -> None:
    rules = [dh.ClipNorm(10.0), dh.ClipNorm(1.0), dh.only("head.*", dh.ClipNorm(0.1))]
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[stats.Norm()], rules=rules) as watch:
        loss_of(model, 0, "plain").backward()
        optimizer.step()
    assert set(watch.latest) == {
        *("step", "grad_norm", "grad_norm_clipped", "clip_ratio"),
        *("grad_norm_clipped/1", "clip_ratio/1", "grad_norm_clipped/head.*", "clip_ratio/head.*"),
    }
    assert watch.report().rounds == 3


def test_a_rule_for_some_beside_a_statistic_of_all() -> None:
    rules = [dh.only(["head.*", "embed.weight"], dh.ClipNorm(0.1))]
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model, 0, "plain").backward()
    clipped = [model.embed.weight.grad.clone(), model.head.weight.grad.clone()]
    norm = float(torch.nn.utils.get_total_norm(clipped))
    with dh.gradients(model, optimizer, rules=rules, stats=[stats.Norm()]) as watch:
        optimizer.step()
    assert close(watch.latest["grad_norm/head.*,embed.weight"], norm)
    after = torch.nn.utils.get_total_norm([model.embed.weight.grad, model.head.weight.grad])
    assert close(float(after), 0.1, 1e-5)


def test_data_parallel_is_the_module_inside() -> None:
    model = make("dp")
    with dh.on_gradient(model, "head.weight", torch.zeros_like, at="local") as hook:
        loss_of(model, 0, "dp").backward()
    assert hook.report() == {"head.weight": 1}
    assert not model.module.head.weight.grad.any()


def test_a_compiled_model() -> None:
    model = torch.compile(make("plain"), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        dh.on_gradient(model, "head.weight", lambda grad: grad * 0, at="local"),
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[stats.Norm(per_parameter=True)]) as watch,
    ):
        loss_of(model, 0, "plain").backward()
        optimizer.step()
    assert watch.latest["grad_norm/param/head.weight"] == 0
    assert watch.latest["grad_norm"] > 0
