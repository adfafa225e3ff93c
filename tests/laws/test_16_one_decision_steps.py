"""Law 16, one decision, in steps with a closure and in steps that raise.

Optimizer and gradients are as they were.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks import stats
from disthooks.errors import UsageError
from tests.support.optimizers import MAKE, Own, Raises, backward, closed, everything, net, same, small

# --- Closures


@pytest.mark.parametrize("kind", ["SGD", "Counts", "AdamW fused"])
def test_rules_act_when_the_closure_is_done(kind: str) -> None:
    model, other = net(), net()
    optimizer, plain = MAKE[kind](model.parameters()), MAKE[kind](other.parameters())
    rules = [dh.SkipNonFinite(), dh.ClipValue(0.01)]
    with dh.gradients(model, optimizer, rules=rules, every=1) as watch, dh.gradients(other, plain, rules=rules):
        for step in range(4):
            assert float(closed(model, optimizer, step, step in (0, 2))) == step  # step() returns the loss
            backward(other, step, step in (0, 2))
            plain.step()
            assert same(everything(model, optimizer)[:4], everything(other, plain)[:4])
    assert watch.latest["skipped_total"] == 2
    assert watch.steps == 4


@pytest.mark.parametrize("kind", ["SGD", "Counts", "AdamW", "AdamW fused"])
def test_a_spike_that_a_closure_makes_changes_nothing(kind: str) -> None:
    model, rule = net(), dh.SkipSpike(sigmas=1000.0, least=3, loss=False)
    optimizer = MAKE[kind](model.parameters())

    def closure() -> torch.Tensor:
        backward(model, 0.1 * len(found))
        for parameter in model.parameters() if len(found) == 3 else ():
            parameter.grad.mul_(1e6)  # type: ignore[union-attr]
        return torch.zeros(())

    found: list[bool] = []
    with dh.gradients(model, optimizer, rules=[rule], every=1):
        for _ in range(5):
            before = everything(model, optimizer)
            optimizer.step(closure)
            found.append(same(everything(model, optimizer)[:4], before[:4]))
    assert found == [False, False, False, True, False]


def test_an_optimizer_that_moves_before_its_closure_cannot_skip() -> None:
    class Looks(Own):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for _, p in self.each():
                p.data.add_(0.1)  # no version counter shows it
            torch.enable_grad()(closure)()
            for group, p in self.each():
                p.data.sub_(0.1).sub_(p.grad, alpha=group["lr"])

    model = net()
    optimizer = Looks(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite(), dh.ClipNorm(0.5)], every=1) as watch:
        closed(model, optimizer, 0)
        with pytest.raises(UsageError, match=r"Looks changed its parameters.*before it called the closure"):
            closed(model, optimizer, 1, True)
    assert watch.latest["grad_norm_clipped"] <= 0.5 or math.isnan(watch.latest["grad_norm_clipped"])


def test_a_parameter_that_has_become_nan_is_no_change() -> None:
    """The optimizer moved nothing before its closure, so the step is left out and not refused."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[0] = math.nan
    before = copy.deepcopy(list(model.parameters()))
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], every=1) as watch:
        closed(model, optimizer, 0)
    assert watch.latest["skipped"] == 1
    for mine, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(mine, was, rtol=0, atol=0, equal_nan=True)


def test_statistics_of_lbfgs_are_of_its_first_call() -> None:
    model, other = net(), net()
    makes = dict(lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    optimizer, plain = (torch.optim.LBFGS(m.parameters(), **makes) for m in (model, other))  # type: ignore[arg-type]
    records: list[Any] = []
    firsts = []
    with dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[records.append], every=1):
        for step in range(3):
            seen: list[float] = []
            closed(model, optimizer, step, seen=seen)
            closed(other, plain, step)
            assert len(seen) > 1
            firsts.append(seen[0])
    assert same(list(model.parameters()), list(other.parameters()))
    assert [record["grad_norm"] for record in records] == pytest.approx(firsts)


def test_rules_for_lbfgs_are_refused_before_anything_moves() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]), pytest.raises(UsageError, match="more than once"):
        closed(model, optimizer, 0)
    assert same(list(model.parameters()), list(net().parameters()))
    assert not optimizer.state


def test_a_closure_that_is_never_called_is_an_error() -> None:
    model = net()
    optimizer = Raises(model.parameters())
    backward(model, 0)
    with (
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]),
        pytest.raises(UsageError, match="never called its closure"),
    ):
        optimizer.step(lambda: None)


# --- What a step that raised leaves behind, and what goes with an attachment


NAN = math.nan


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_fused_optimizer_is_free_again_after_removal() -> None:
    model, optimizer = small(fused=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]):
        hook = optimizer.register_step_pre_hook(_interrupt)
        model(torch.full((1, 2), NAN)).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    hook.remove()
    optimizer.zero_grad()
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)  # if found_inf had stayed on it, it would never step again


def test_a_model_and_its_optimizer_die_with_what_is_attached() -> None:
    model, optimizer = small()
    watch = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=[stats.Norm(), stats.Spread()])
    refs = [weakref.ref(each) for each in (model, optimizer, watch)]
    del model, optimizer, watch
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_a_handle_that_is_dropped_leaves_the_rules_at_work() -> None:
    model, optimizer = small()
    alive = weakref.ref(dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]))
    gc.collect()
    assert alive() is not None
    (100.0 * model(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    assert float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(1.0, abs=1e-4)
    del model, optimizer
    gc.collect()
    assert alive() is None
