"""What holds for every rule: it needs no gradient, refuses nonsense, and its state can be saved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.grads.rules import Rule
from tests.support.engines import grads_of, loss_of, make

ALL: list[Rule] = [
    dh.ClipAdaptive(),
    dh.ClipPercentile(),
    dh.ClipZScore(warmup_steps=1),
    dh.ClipNorm(1.0, by="parameter"),
    dh.SkipNonFinite(max_consecutive=2),
    dh.Scale(0.5),
    dh.Sanitize(),
]


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_no_gradient_at_all(rule: Rule) -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[rule], stats=[dh.stats.Norm()]) as watch:
        optimizer.step()
    assert watch.latest["grad_norm"] == 0
    assert not grads_of(model)
    assert all(math.isfinite(value) for value in watch.latest.values())


@pytest.mark.parametrize(
    "make_rule",
    [
        lambda: dh.ClipNorm({-5: 1.0}),
        lambda: dh.ClipAdaptive(eps=math.nan),
        lambda: dh.ClipPercentile(window=0),
        lambda: dh.ClipPercentile(norm_type=-1.0),
        lambda: dh.ClipZScore(z_thresh=0),
        lambda: dh.ClipZScore(warmup_steps=True),
        lambda: dh.ClipZScore(to="median"),
        lambda: dh.ClipZScore(max_norm=math.inf),
        lambda: dh.SkipNonFinite(1.5),
        lambda: dh.Scale(True),
        lambda: dh.Sanitize(nan=None),
        lambda: dh.Sanitize(posinf=math.inf),
    ],
)
def test_arguments_that_can_never_work(make_rule: Any) -> None:
    """What tests/golden/golden_errors.py does not have."""
    with pytest.raises(dh.errors.UsageError, match=r"needed|None, or|adaptive|True or False"):
        make_rule()


@pytest.mark.parametrize(
    "rules",
    [
        [dh.ClipPercentile()],
        [dh.ClipZScore()],
        [dh.ClipZScore(), dh.ClipPercentile(window=4)],
        [dh.ClipZScore(), dh.only("*", dh.ClipPercentile(window=5))],
    ],
)
def test_a_state_of_other_rules_changes_nothing(rules: list[Rule]) -> None:
    def attach(rules: list[Rule]) -> Any:
        model = make("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with dh.gradients(model, optimizer, rules=rules) as watch:
            loss_of(model, 0, "plain").backward()
            optimizer.step()
        return watch

    state, watch = attach([dh.ClipZScore(), dh.ClipPercentile(window=5)]).state_dict(), attach(rules)
    before = watch.state_dict()
    state["steps"] = 77
    with pytest.raises(dh.errors.UsageError, match="the state"):
        watch.load_state_dict(state)
    after = watch.state_dict()
    assert after["steps"] == before["steps"] == 1
    assert str(after) == str(before)
