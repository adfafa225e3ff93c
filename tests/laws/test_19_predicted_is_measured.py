"""Law 19, predicted is measured.

"What `explain` says and `fit` promises is compared with what happened, and the difference is shown; a budget is never
exceeded, from the first step on."

`explain` runs the model today, and there is no `fit` yet. This file shows what holds: the bytes that `disthooks
explain` names are those of a training run of the same model, for each module and under a plan, and a limit or a budget
is never exceeded, from the first step on, whichever store holds it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import typer.testing
from torch import nn

import disthooks as dh
from disthooks.cli.app import app
from disthooks.cli.explain import saved_by
from tests.support import ROOT
from tests.support.models import CASES, Tiny, build, identical, step, tokens
from tests.support.stores.copies import Copies

BUILT = ROOT / "tests" / "support" / "jobs" / "built.py"

# --- What explain says


@pytest.mark.parametrize("case", CASES)
def test_explain_names_the_bytes_that_a_run_saves(case: str) -> None:
    """All of a model's saved tensors, in a run with a store that counts; up to a fifth more.

    A store keeps a storage whole when most of it is saved, where explain counts the parts.
    """
    model, x = build(case)
    told = {row.name: row for row in saved_by(model, x)}
    with dh.save_activations(model, "", dh.pipeline(dh.AtLeast(0), Copies())) as saving:
        step(model, x)
    report = saving.report()
    kept = sum(nbytes for why, nbytes in report.kept_by.items() if why not in ("parameter", "buffer"))
    assert 0.99 * told[""].whole <= report.stored + kept <= 1.2 * told[""].whole


def test_explain_names_the_bytes_of_each_module() -> None:
    model, x = (
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Sequential(nn.Linear(64, 32), nn.ReLU())),
        torch.ones(8, 16),
    )
    told = {row.name: row.own for row in saved_by(model, x) if row.own}
    with dh.save_activations(model, ["0", "1", "2.?"], dh.pipeline(dh.AtLeast(0), Copies())) as saving:
        model(x).sum().backward()
    sites = saving.report().sites
    assert told == {"0": x.nbytes, "1": 8 * 64 * 4, "2.1": 8 * 32 * 4}
    assert {name: sites[name].saved for name in told} == told


@pytest.mark.parametrize("modules", ["blocks.*", "blocks.0.mlp", "*.norm?"])
def test_explain_with_a_plan_names_the_bytes_that_the_plan_stores(modules: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "hooks.yaml"
    file.write_text(f"save: [{{modules: '{modules}', at_least: 0, store: {{kind: OnDisk, directory: '{tmp_path}'}}}}]")
    ran = typer.testing.CliRunner().invoke(app, ["explain", f"{BUILT}:whole", str(file), "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)["plan"]["modules"]
    model = Tiny()
    with dh.from_config(file).save(model) as saving:
        model(tokens()).square().mean().backward()
    assert sum(module["stored"] for module in told) == saving.report().stored > 0


# --- A limit and a budget, from the first step on


LIMITED: dict[str, Callable[[pathlib.Path, int], Any]] = {
    "OnDevice": lambda folder, limit: dh.Tiered(dh.OnDevice(limit), dh.OnDisk(folder)),
    "OnCpu": lambda folder, limit: dh.Tiered(dh.OnCpu(limit), dh.OnDisk(folder)),
    "OnDisk": lambda folder, limit: dh.Tiered(dh.OnDisk(folder, limit), Copies()),
}


@pytest.mark.parametrize("kind", LIMITED)
def test_a_limit_is_not_exceeded_at_any_moment_of_any_step(kind: str, tmp_path: pathlib.Path) -> None:
    """What the first tier holds, asked behind each module's forward and in backward, the first step included."""
    limit = 256 << 10
    store, model, most = LIMITED[kind](tmp_path, limit), Tiny(), []
    truth = step(model, tokens())

    def look(*_: object) -> None:
        most.append(store.report()[0].held)

    for module in model.modules():
        module.register_forward_hook(look)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    with dh.save_activations(model, "blocks.*", dh.pipeline(dh.AtLeast(0), store)) as saving:
        for _ in range(3):
            assert identical(step(model, tokens()), truth)
    assert limit // 2 < max(most) <= limit
    assert saving.report().stored > 2 * limit


def test_a_budget_is_not_exceeded_from_the_first_step_on(tmp_path: pathlib.Path) -> None:
    """Weights and saved tensors together are what the file allows, and a step of that budget is exact."""
    model = Tiny()
    truth = step(model, tokens())
    weights, room = sum(parameter.nbytes for parameter in model.parameters()), 300 << 10
    file = tmp_path / "hooks.yaml"
    entry = f"{{modules: 'blocks.*', at_least: 0, store: {{kind: OnDisk, directory: '{tmp_path}'}}}}"
    file.write_text(f"budget: {weights + room}\nsave: [{entry}]")
    most: list[int] = []
    with dh.from_config(file).save(model) as saving:
        for module in model.modules():
            module.register_forward_hook(lambda *_: most.append(weights + saving.report().tiers[0].held))
        for _ in range(3):
            assert identical(step(model, tokens()), truth)
        moved = sum(tier.written + tier.never_written for tier in saving.report().tiers)
    assert moved > room // 4  # what did not fit
    assert weights + room // 2 < max(most) <= weights + room
    assert saving.report().tiers[0].limit == room


def test_a_budget_that_cannot_be_kept_is_refused_before_the_first_step(tmp_path: pathlib.Path) -> None:
    model, file = Tiny(), tmp_path / "hooks.yaml"
    file.write_text(f"budget: 1 KiB\nsave: [{{modules: norm, store: {{kind: OnDisk, directory: '{tmp_path}'}}}}]")
    with pytest.raises(dh.errors.ConfigError, match="are less than the parameters and buffers"):
        dh.from_config(file).save(model)
