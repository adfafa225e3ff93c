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
from tests.support.engines import close
from tests.support.optimizers import backward, closed, net, same
from tests.support.ranks.harness import Ranks

# --- In one process


def _two_micro_batches(
    at: str | None, function: Any = None
) -> tuple[list[torch.Tensor], list[torch.Tensor], nn.Module]:
    """What a function saw of one gradient in a step of two micro-batches, each micro-batch's own, and the model."""
    torch.manual_seed(0)
    model, seen, own = nn.Linear(3, 2), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 24).view(2, 4, 3)
    own = [torch.autograd.grad(model(part).square().sum(), model.weight)[0] for part in x]

    def see(grad: torch.Tensor) -> torch.Tensor | None:
        seen.append(grad.clone())
        return None if function is None else function(grad)

    with dh.on_gradient(model, "weight", see, **({} if at is None else {"at": at})):
        for part in x:
            model(part).square().sum().backward()
        optimizer.step()
    return seen, own, model


def test_local_is_the_gradient_of_each_backward_before_it_is_added_to_others() -> None:
    seen, own, model = _two_micro_batches("local")
    assert len(seen) == 2
    assert all(map(torch.equal, seen, own))
    assert torch.equal(model.weight.grad, own[0] + own[1])


@pytest.mark.parametrize("at", ["final", None])
def test_final_is_what_the_optimizer_uses_and_the_default(at: str | None) -> None:
    seen, own, _ = _two_micro_batches(at)
    assert len(seen) == 1
    assert torch.equal(seen[0], own[0] + own[1])


def test_what_a_function_returns_at_its_moment_is_used_from_there_on() -> None:
    """A local function clips each micro-batch's gradient, and a final one clips their sum."""
    results = {}
    for at in ("local", "final"):
        _, own, model = _two_micro_batches(at, lambda grad: grad.clamp(-1.0, 1.0))
        results[at] = model.weight.grad
    torch.testing.assert_close(results["local"], sum(grad.clamp(-1.0, 1.0) for grad in own))
    torch.testing.assert_close(results["final"], (own[0] + own[1]).clamp(-1.0, 1.0))
    assert not torch.equal(results["local"], results["final"])


def test_a_local_rule_acts_before_the_statistics_and_a_final_one_after() -> None:
    """Statistics are of the final gradient as backward and local rules left it."""
    norms = {}
    for at in ("local", "final"):
        model = nn.Linear(3, 2)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rules = [dh.only("weight", dh.Scale(0.5), at=at)]
        with dh.gradients(model, optimizer, rules=rules, stats=[stats.Norm(per_parameter=True)], every=1) as watch:
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        norms[at] = watch.latest["grad_norm/param/weight"]
        assert float(model.weight.grad.norm()) == pytest.approx(2.0 * math.sqrt(6))
    assert norms["local"] == pytest.approx(2.0 * math.sqrt(6))
    assert norms["final"] == pytest.approx(4.0 * math.sqrt(6))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_grad_scaler_scales_local_gradients_and_not_final_ones(scaled: bool) -> None:
    """Before the loop has unscaled them nobody knows of the scale; what the optimizer uses has none."""
    model, local, final = nn.Linear(3, 2, bias=False), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    with (
        dh.on_gradient(model, "weight", lambda grad: local.append(grad.clone()), "local"),
        dh.on_gradient(model, "weight", lambda grad: final.append(grad.clone()), "final"),
    ):
        scaler.scale(model(torch.ones(4, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert [grad.unique().tolist() for grad in final] == [[4.0]]
    assert [grad.unique().tolist() for grad in local] == [[256.0 if scaled else 4.0]]


# --- On two ranks


def _moments(rank: int, at: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function saw on this rank, whose input is its own, and the gradient that the optimizer used."""
    torch.manual_seed(0)
    model, seen = nn.Linear(3, 2, bias=False), []
    engine = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    with dh.on_gradient(engine, "weight", lambda grad: seen.append(grad.clone()), at):
        engine(torch.full((1, 3), 1.0 + rank)).sum().backward()
        optimizer.step()
    (one,) = seen
    return one, model.weight.grad


@pytest.mark.dist
def test_local_is_a_ranks_own_and_final_is_the_mean_of_all(ranks: Ranks) -> None:
    for rank, (seen, used) in enumerate(ranks(_moments, "local")):
        assert seen.unique().tolist() == [1.0 + rank]
        assert used.unique().tolist() == [1.5]
    for seen, used in ranks(_moments, "final"):
        assert seen.unique().tolist() == used.unique().tolist() == [1.5]


# --- Beside rules, statistics and closures


@pytest.mark.parametrize("begun", [False, True])
def test_on_gradient_comes_before_the_rules(begun: bool) -> None:
    """What the function makes of a gradient is clipped, also in a step that is begun early."""
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
        closed(model, optimizer, 0)
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
    # a UsageError that says so would be right, too
    try:
        found = _second_order(0, "plain", True)
    except dh.errors.UsageError:
        return
    assert close(found, _second_order(0, "plain", False))
