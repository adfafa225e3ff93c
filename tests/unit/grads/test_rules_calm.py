"""AdaGC, SkipSpike and a schedule of ClipNorm, beside numpy and the papers."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import ConfigError, UsageError
from disthooks.report.culprit import Timeline
from disthooks.report.document import happenings
from disthooks.report.log import read
from disthooks.report.sentences import verdict
from tests.support.engines import close
from tests.support.rules import normed


def model_of(values: Sequence[float]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in values])


# --- AdaGC


def adagc(steps: Sequence[Sequence[float]], ratio: float, beta: float, warm: int, limit: float) -> list[list[float]]:
    """The paper's algorithm on norms alone: what each is clipped to."""
    average = [math.inf] * len(steps[0])
    found = []
    for step, norms in enumerate(steps):
        whole = math.sqrt(sum(norm**2 for norm in norms))
        clipped = []
        for i, norm in enumerate(norms):
            if step < warm:
                new = norm * min(1.0, limit / (whole + 1e-6))
            else:
                new = norm * min(1.0, ratio * average[i] / (norm + 1e-6))
            if norm:
                average[i] = (
                    new
                    if math.isinf(average[i])
                    else min(average[i], new)
                    if step < warm
                    else beta * average[i] + (1 - beta) * new
                )
            clipped.append(new)
        found.append(clipped)
    return found


STEPS = [[1.0, 2.0, 0.0], [3.0, 0.5, 0.0], [9.0, 0.6, 2.0], [1.2, 8.0, 5.0], [0.0, 3.0, 0.1], [4.0, 0.1, 4.0]]


@pytest.mark.parametrize("warm", [1, 2, 4])
def test_adagc_is_the_papers(warm: int) -> None:
    model = model_of([1.0, 1.0, 1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = adagc(STEPS, 1.05, 0.9, warm, 1.0)
    with dh.gradients(model, optimizer, rules=[dh.AdaGC(1.05, 0.9, warm, 1.0)], every=1) as watch:
        for norms, clipped in zip(STEPS, expected, strict=True):
            for parameter, norm in zip(model, norms, strict=True):  # the third has no gradient at first
                parameter.grad = torch.tensor([-norm], dtype=torch.float64) if norm else None
            optimizer.step()
            watch.flush()
            found = [0.0 if parameter.grad is None else float(-parameter.grad) for parameter in model]
            assert close(found, clipped, 1e-12)
            assert close(watch.latest["grad_norm"], math.sqrt(sum(n**2 for n in norms)), 1e-12)
            assert close(watch.latest["grad_norm_clipped"], math.sqrt(sum(n**2 for n in clipped)), 1e-12)


def test_a_norm_that_is_not_finite_does_not_enter_the_average() -> None:
    norms = [1.0, 2.0, math.nan, math.inf, 30.0]
    clean = normed(dh.AdaGC(warmup_steps=1), [1.0, 2.0, 30.0])
    found = normed(dh.AdaGC(warmup_steps=1), norms)
    assert found[4][0] == clean[2][0]
    assert math.isnan(found[2][0])


# --- SkipSpike


def spikes(numbers: Sequence[float], sigmas: float, window: int, least: int) -> list[bool]:
    seen: list[float] = []
    found = []
    for number in numbers:
        last = seen[-window:]
        limit = np.mean(last) + sigmas * np.std(last, ddof=1) if len(last) >= least else math.inf
        found.append(not (math.isfinite(number) and number <= limit))
        if math.isfinite(number):
            seen.append(min(number, float(limit)))
    return found


def _numbers(count: int) -> list[float]:
    numbers = (2.0 + np.random.default_rng(0).standard_normal(count) * 0.1).tolist()
    for place, value in ((30, 9.0), (31, 9.0), (50, math.nan), (60, 2.9), (61, 3.1), (62, 3.2), (3, 8.0)):
        numbers[place] = value
    return numbers


def test_a_spike_of_the_loss_is_numpys() -> None:
    losses = _numbers(80)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    rules = [dh.SkipSpike(sigmas=4.0, window=20, least=8, norm=False)]
    with dh.gradients(model, optimizer, rules=rules, sinks=[seen.append], every=1) as watch:
        for loss in losses:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            watch.note_loss(torch.tensor(loss, dtype=torch.float64) + 0.5)
            watch.note_loss(loss - 0.5)  # of a second micro-batch
            before = model.weight.item()
            optimizer.step()
            watch.flush()
            assert (model.weight.item() == before) == bool(watch.latest["spike"])
    expected = spikes(losses, 4.0, 20, 8)
    assert [bool(record["spike"]) for record in seen] == expected
    assert 3 <= sum(expected) < 10
    assert seen[-1]["spikes_total"] == sum(expected)
    assert seen[31]["spikes_in_a_row"] == 2


def test_a_spike_of_the_norm_is_numpys() -> None:
    found = normed(dh.SkipSpike(sigmas=4.0, window=20, least=8, loss=False), _numbers(80))
    assert [bool(log["spike"]) for _, log in found] == spikes(_numbers(80), 4.0, 20, 8)


def test_a_spike_is_in_the_log_in_any_case(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    rules = [dh.SkipNonFinite(), dh.SkipSpike(least=4)]
    sinks = [seen.append, dh.sinks.Jsonl(tmp_path / "run.jsonl")]
    with dh.gradients(model, optimizer, rules=rules, sinks=sinks, every=50) as watch:
        for step in range(12):
            model(torch.ones(1, 1)).sum().backward()
            watch.note_loss(30.0 if step == 7 else 1.0 + 0.1 * (step % 2))
            optimizer.step()
            optimizer.zero_grad()
    assert [record["step"] for record in seen] == [0, 7, 11]  # the last record has the largest norm since step 7
    assert (seen[1]["spike"], seen[1]["loss"]) == (1.0, 30.0)
    assert seen[1]["loss_limit"] < 2.0
    assert "nonfinite_params" not in seen[1]
    assert watch.nonfinite_steps == 0
    (run,) = read(tmp_path / "run.jsonl").runs
    assert "1 step was skipped as a spike, the first at step 7." in verdict(run, Timeline([], [], []))
    assert [(each["step"], each["text"]) for each in happenings(run, [])] == [
        (7, "The step was a spike, and was skipped.")
    ]


def test_a_loss_that_nobody_hands_in_is_an_error() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipSpike()]):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        with pytest.raises(UsageError, match=r"disthooks\.note_loss\(loss\) after forward"):
            optimizer.step()


def test_too_many_spikes_in_a_row_are_an_error() -> None:
    with pytest.raises(UsageError, match="3 steps in a row, 5 to 7"):
        normed(dh.SkipSpike(sigmas=1.0, least=2, loss=False, max_consecutive=2), [1, 1.1, 1, 1.1, 1, 9, 99, 999, 9999])


# --- A schedule, and state by name


def test_a_schedule_of_the_norm() -> None:
    for rule in (dh.ClipNorm({0: 4.0, 2: 2.0}), dh.ClipNorm(lambda step: max(2.0, 4.0 - step))):
        found = [norm for norm, _ in normed(rule, [10.0] * 4)]
        assert close(found, [4.0, 3.0, 2.0, 2.0], 1e-6)


@pytest.mark.parametrize("schedule", [{}, {0: -1.0}, {"a": 1.0}, {0.5: 1.0}])
def test_a_wrong_schedule_is_refused(schedule: Any) -> None:
    with pytest.raises(UsageError, match="a dict of steps"):
        dh.ClipNorm(schedule)
    with pytest.raises(UsageError, match="gave 0 at step 0"):
        normed(dh.ClipNorm(lambda step: 0), [1.0])


def test_state_is_by_the_names_of_parameters() -> None:
    """It is loaded into a model that has the same parameters in another order."""
    rule = dh.AdaGC(warmup_steps=1)

    def run(names: str, steps: range, weights: Any = None, state: Any = None) -> tuple[dict[str, Any], Any]:
        model = nn.ParameterDict([(name, nn.Parameter(torch.ones(1, dtype=torch.float64))) for name in names])
        model.load_state_dict(weights or model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with dh.gradients(model, optimizer, rules=[rule]) as watch:
            if state:
                watch.load_state_dict(state)
            for number in steps:
                for name, parameter in model.items():
                    parameter.grad = torch.full_like(parameter, {"a": 1.0, "b": 20.0}[name] * (1 + number % 3))
                optimizer.step()
        return dict(model.state_dict()), watch.state_dict()

    truth, _ = run("ab", range(7))
    half = run("ab", range(3))
    found, _ = run("ba", range(3, 7), *half)
    assert list(found) == ["b", "a"]
    assert found == truth
    with pytest.raises(UsageError, match="has nothing of 'c'"):
        run("ac", range(0), None, half[1])


def test_what_cannot_be() -> None:
    for make, said in (
        (lambda: dh.AdaGC(ratio=0), "ratio=0"),
        (lambda: dh.AdaGC(beta=1.0), "beta=1.0"),
        (lambda: dh.SkipSpike(loss=False, norm=False), "would compare nothing"),
        (lambda: dh.SkipSpike(least=200), "above window=128"),
    ):
        with pytest.raises(UsageError, match=said):
            make()


OURS = {"ZClip": "ClipZScore", "AGC": "ClipAdaptive", "AutoClip": "ClipPercentile"}


@pytest.mark.parametrize(("name", "ours"), OURS.items())
def test_names_of_papers_lead_to_ours(name: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=f"did you mean '{ours}'"):
        getattr(dh, name)
    with pytest.raises(ConfigError, match=f"did you mean '{ours}'"):
        dh.config.from_config({"watch": {"rules": [{"kind": name}]}})
    assert name in (getattr(dh, ours).__doc__ or "")
