"""SkipNonFinite under scalers and with other rules; law 16 has it for every optimizer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.engines import loss_of, make
from tests.support.optimizers import same


def backward(model: nn.Module, step: int, spoiled: bool) -> None:
    loss_of(model, step, "plain").backward()
    if spoiled:
        model.scale.grad[0, 1] = math.inf


def run(rules: list[Any], steps: list[int], spoiled: set[int]) -> tuple[Any, Any]:
    """A model after these steps, of which some have an infinite gradient, with the attachment."""
    model = make("plain")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=rules, every=1) as watch:
        for step in steps:
            optimizer.zero_grad()
            backward(model, step, step in spoiled)
            optimizer.step()
    return model, watch


def test_an_optimizer_that_is_fused_in_part() -> None:
    model = make("plain")
    groups = [{"params": model.embed.parameters()}, {"params": model.mid.parameters(), "fused": False}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
    before = copy.deepcopy(model.state_dict())
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]):
        loss_of(model, 0, "plain").backward()
        model.embed.bias.grad[0] = math.nan
        optimizer.step()
        assert same(dict(model.state_dict()), dict(before))
        model.embed.bias.grad[0] = 1.0
        optimizer.step()
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert {name.split(".")[0] for name in moved} == {"embed", "mid"}


def test_rules_behind_it_do_not_learn_from_a_skipped_step() -> None:
    rules = [dh.SkipNonFinite(), dh.ClipPercentile(50.0, 4), dh.only("*.bias", dh.ClipValue(0.1))]
    found, watch = run(rules, [0, 1, 2, 3], {1, 2})
    truth, _ = run(rules, [0, 3], set())
    assert same(list(found.parameters()), list(truth.parameters()))
    assert watch.report().rounds == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_and_every_kind_of_not_finite(dtype: torch.dtype, bad: float) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with dh.gradients(nn.ParameterList([weight]), optimizer, rules=[dh.SkipNonFinite()], every=1) as watch:
        weight.grad = torch.full((3,), 300.0, dtype=dtype)
        optimizer.step()
        moved = weight.detach().clone()
        weight.grad[1] = bad
        optimizer.step()
    assert (moved == 1 - 300).all()
    assert torch.equal(weight, moved)
    assert watch.latest["skipped"] == 1


def test_too_many_in_a_row_raise_one_step_later() -> None:
    model = make("plain")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    log: list[tuple[int, bool]] = []
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite(max_consecutive=1)], every=1) as watch:
        for step, spoiled in enumerate([True, False, True, True, False]):
            optimizer.zero_grad()
            backward(model, step, spoiled)
            before = copy.deepcopy(list(model.parameters()))
            if step < 4:
                optimizer.step()
                log.append((step, same(list(model.parameters()), before)))
        with pytest.raises(
            dh.errors.NonFiniteError, match=r"2 steps in a row, 2 to 3, .*max_consecutive=1.*last_nonfinite"
        ):
            optimizer.step()
        assert watch.steps == 4
        assert same(list(model.parameters()), before)
        optimizer.step()  # who catches it may go on
    assert log == [(0, True), (1, False), (2, True), (3, True)]
    assert watch.latest["skipped_in_a_row"] == 0
    assert issubclass(dh.errors.NonFiniteError, ArithmeticError)


def test_not_at_local() -> None:
    with pytest.raises(dh.errors.UsageError, match=r"optimizer's step.*leave at='local' out"):
        dh.only("*", dh.SkipNonFinite(), at="local")
