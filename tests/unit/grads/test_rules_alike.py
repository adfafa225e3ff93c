"""What holds for every rule: it needs no gradient, refuses nonsense, and its state can be saved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.grads.rules import Rule
from tests.support.engines import grads_of, loss_of, make
from tests.support.logs import measured

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


# --- saved and gone on with

LEARNING = [
    dh.SkipNonFinite(),
    dh.ClipZScore(0.5, 0.2, 2),
    dh.ClipPercentile(40.0, 3),
    dh.only("*.bias", dh.ClipAdaptive(0.02)),
]


def _train(steps: range, model: nn.Module, optimizer: Any, state: Any, path: Any = None) -> tuple[list, Any]:
    records: list[dict[str, Any]] = []
    with dh.gradients(model, optimizer, rules=LEARNING, sinks=[records.append], every=1) as watch:
        if state is not None:
            watch.load_state_dict(state)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step, "plain").backward()
            optimizer.step()
    if path is not None:
        torch.save(watch.state_dict(), path)
    return [measured(record) for record in records], watch.state_dict()


def test_learned_state_is_saved_and_gone_on_with(tmp_path: Any) -> None:
    model = make("plain")
    truth, _ = _train(range(6), model, torch.optim.Adam(model.parameters(), lr=0.01), None)
    other = make("plain")
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    first, _ = _train(range(3), other, optimizer, None, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second, _ = _train(range(3, 6), other, optimizer, saved)
    assert first + second == truth
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    forgotten = make("plain")
    optimizer = torch.optim.Adam(forgotten.parameters(), lr=0.01)
    _train(range(3), forgotten, optimizer, None)
    assert _train(range(3, 6), forgotten, optimizer, None)[0] != second


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
