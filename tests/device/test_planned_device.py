"""A plan on fake tensors that stand for those of an accelerator: the prediction is the report of a run there."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import disthooks as dh
from disthooks.predict.plans.planned import planned
from disthooks.predict.plans.planned_stores import PlacedBytes
from disthooks.saved.pipeline import pipeline
from disthooks.saved.report import SavedReport
from tests.support import models
from tests.support.nets import BasicBlock, residual_network
from tests.unit.predict import test_planned
from tests.unit.predict.test_planned import Adapted, Own, figures, held, step

KIB = 1 << 10


class Block(models.Block):
    """Attention by plain products, which saves the same on every device."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (query @ key.transpose(-1, -2) * 0.25).softmax(-1) @ value


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "blocks": lambda: (nn.Sequential(Block(), Block(), Block()).eval(), torch.randn(8, 32, 64)),
    "residual": lambda: (residual_network(BasicBlock, (2,), 16, 10), torch.randn(8, 3, 32, 32)),
    "adapted": lambda: (Adapted(), torch.randn(64, 64)),
    "own": lambda: (Own(), torch.randn(64, 64)),
}


COMMON = ("OnCpu", "OnDevice", "OnDisk", "Recompute products")
PIPELINES: dict[str, Callable[[Any], Any]] = {name: test_planned.PIPELINES[name] for name in COMMON} | {
    "Cast": lambda folder: pipeline(dh.Cast(torch.bfloat16), dh.OnDevice(), at_least="4 KiB"),
    "Quantize": lambda folder: pipeline(dh.Quantize(8), dh.OnCpu(), at_least="4 KiB"),
    "Compact": lambda folder: pipeline(dh.Compact(), dh.OnCpu(), at_least="4 KiB"),
    "Recompute": lambda folder: pipeline(dh.Recompute(), dh.OnCpu(), at_least="4 KiB"),
    "Tiered": lambda folder: pipeline(
        dh.Tiered(dh.OnDevice("600 KiB"), dh.OnCpu("400 KiB"), dh.OnDisk(folder)), at_least="4 KiB"
    ),
}


@pytest.mark.parametrize("pipeline", list(PIPELINES))
@pytest.mark.parametrize("model", list(MODELS))
def test_a_prediction_is_the_report_of_a_run_on_the_device(
    model: str, pipeline: str, device: torch.device, tmp_path: pathlib.Path
) -> None:
    to = PIPELINES[pipeline](tmp_path)
    built, x = MODELS[model]()
    with warnings.catch_warnings(), dh.save_activations(built.to(device), "*", to) as saving:
        warnings.simplefilter("ignore")
        step(built, x.to(device))
    with FakeTensorMode():
        built, x = MODELS[model]()
        with planned(built, [("*", to)], device="cuda") as found:
            step(built, x)
    predicted, at_run = figures(found.report()), figures(saving.report())
    if "Recompute" in pipeline:
        # A device has more variants of batch norm, and each is compared in the first step, with inputs that come back.
        for each in (predicted, at_run):
            del each["loaded"], each["sites"]
    for each in (predicted, at_run):
        del each["proof_waits"]  # nothing is waited for in a prediction
    assert predicted == at_run
    assert found.unknown == []


def test_the_tiers_hold_what_they_hold_in_a_run(
    device: torch.device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, placed = PIPELINES["Tiered"](tmp_path), list[dict[str, int]]()
    monkeypatch.setattr(PlacedBytes, "note", lambda self: placed.append(self.now))

    def report() -> SavedReport:
        torch.accelerator.synchronize()
        return saving.report()

    built, x = MODELS["blocks"]()
    with dh.save_activations(built.to(device), "*", to) as saving:
        at_run = held(built, x.to(device), report)
    with FakeTensorMode():
        built, x = MODELS["blocks"]()
        with planned(built, [("*", to)], device="cuda") as found:
            predicted = held(built, x, found.report)
    assert predicted == at_run
    # One tensor that is on its way may be larger than what may be in flight.
    assert max(each["device"] + each["in flight"] for each in placed) <= (600 + 256) * KIB
