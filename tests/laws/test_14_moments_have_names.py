"""Law 14, moments have names.

"`"local"`: this rank's gradient before any reduction. `"final"`: what the optimizer will use. Default `"final"`."

This file shows it in one process; tests/engines shows it on engines.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from tests.support.engines import close, train

# --- What each moment sees, beside rules and statistics


def test_statistics_are_of_the_gradient_before_any_rule() -> None:
    plain = train(0, "plain", [], [stats.Norm(), stats.MaxAbs()], steps=1)[0]
    ruled = train(0, "plain", [dh.ClipValue(0.01), dh.ClipNorm(0.001)], [stats.Norm(), stats.MaxAbs()], steps=1)[0]
    assert {key: ruled[0][key] for key in plain[0]} == plain[0]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))  # Muon has no biases


def backward(model: nn.Module, step: int, spoiled: bool = False) -> None:
    model.zero_grad()
    model(torch.linspace(-1, 1, 6).view(2, 3) + step).square().sum().backward()
    if spoiled:
        model[0].weight.grad[0, 0] = math.nan  # type: ignore[index]


@pytest.mark.parametrize("begun", [False, True])
def test_on_gradient_comes_before_the_rules(begun: bool) -> None:
    """In a step that is begun early too: what it makes of a gradient is clipped."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[dh.stats.Norm()], every=1) as watch,
        dh.on_gradient(model, "*", lambda grad: grad * 100) as hook,
    ):
        for step in range(3):
            backward(model, step)
            true = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())  # type: ignore[union-attr]
            if begun:
                watch.begin_step()
            optimizer.step()
            watch.flush()
            norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())  # type: ignore[union-attr]
            assert watch.latest["grad_norm"] == pytest.approx(true * 100, rel=1e-5)
            assert norm == pytest.approx(1.0, rel=1e-5)
    assert hook.report() == {"0.weight": 3, "2.weight": 3}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else bool(a == b)


def _closed(model: nn.Module, optimizer: Any, step: int, spoiled: bool = False, seen: list[float] | None = None) -> Any:
    def closure() -> torch.Tensor:
        backward(model, step, spoiled)
        if seen is not None:
            seen.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))  # type: ignore[union-attr]
        return torch.tensor(float(step))

    return optimizer.step(closure)


def test_on_gradient_sees_each_call_of_lbfgs() -> None:
    model, other = net(), net()
    optimizer, plain = (torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, other))
    calls = []

    def closure() -> torch.Tensor:
        backward(other, 0)
        other[0].weight.grad.zero_()  # type: ignore[index, union-attr]
        calls.append(1)
        return torch.tensor(1.0)

    with dh.on_gradient(model, "0.weight", torch.zeros_like) as hook:
        _closed(model, optimizer, 0)
        plain.step(closure)
    assert hook.report() == {"0.weight": len(calls)}
    assert len(calls) > 1
    assert same(list(model.parameters()), list(other.parameters()))
    assert not optimizer._optimizer_step_pre_hooks


def _second_order(rank: int, engine: str, local: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = [dh.only("0.weight", dh.Scale(1.0), at="local")] if local else [dh.ClipNorm(1e9)]
    with dh.gradients(model, optimizer, rules=rules):
        loss = model(torch.ones(3, 2)).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()
    return next(p.grad.clone() for n, p in model.named_parameters() if n.endswith("0.weight"))


def test_a_local_rule_does_not_lose_second_derivatives() -> None:
    # a UsageError that says so would do as well
    try:
        found = _second_order(0, "plain", True)
    except dh.errors.UsageError:
        return
    assert close(found, _second_order(0, "plain", False))
