"""Law 19, predicted is measured.

"What `explain` says and `fit` promises is compared with what happened, and the difference is shown; a budget is never
exceeded, from the first step on."

`explain` runs nothing: it takes a step on tensors without memory. `fit` is still to come. This file shows what holds:
on the CPU, whose operators both sides use, the saved bytes that `explain` names for each module are those of a real
step, to the byte, and so is the peak; with a plan the bytes that the hooks store, move, share, recompute and keep are
those of the run's report. A limit or a budget is never exceeded, from the first step on, whichever store holds it.
`test_19_predicted_is_measured_modules.py` has torch's own modules.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import typer.testing
from torch import nn

import disthooks as dh
from disthooks.errors import ConfigError
from disthooks.run.cli.app import app
from disthooks.saved.pipeline import pipeline
from tests.support import ROOT, zoo
from tests.support.models import CASES, Tiny, build, identical, step, tokens
from tests.support.predicted import beside
from tests.support.stores.copies import Copies

BUILT = ROOT / "tests" / "support" / "jobs" / "built.py"

# --- What explain says

#: One of each way to save, under autocast and with both kinds of checkpointing among them. They need torch alone.
FEW = (*zoo.FEW, "stack_checkpointed", "stack_checkpointed_autocast")
#: Models with a router, whose choice is not known: each expert is assumed to be chosen equally often.
ROUTED = {"mixtral", "mixtral_loop"}


@pytest.mark.first_tier(name=FEW)
@pytest.mark.parametrize("name", zoo.names())
def test_explain_names_the_bytes_that_a_real_step_saves_and_holds(name: str) -> None:
    """Those of each module, and the peak; of few models in a step with an optimizer."""
    if name not in FEW:
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    context = functools.partial(zoo.context, name) if name in zoo.AUTOCAST else None
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3) if name in FEW else None
    found = beside(functools.partial(zoo.build, name), context, optimizer)
    assert found.wrong() == {}
    assert found.predicted.saved_bytes > 1 << 19
    if name in zoo.DATA_DEPENDENT:
        # Experts that take unequal numbers of tokens have another peak, but they save the same bytes together.
        assert abs(found.peak_off) < 0.1 * found.measured.peak_bytes
    else:
        assert found.peak_off == 0
    assert {each.what for each in found.predicted.unknown} == ({"what topk chooses"} if name in ROUTED else set())


def test_explain_names_the_bytes_of_each_module() -> None:
    """Counted by hand: a linear layer saves its input, a tanh and a ReLU save their output."""
    model, x = (
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Sequential(nn.Linear(64, 32), nn.ReLU())),
        torch.ones(8, 16),
    )
    said = dh.explain(model, x, device="cpu")
    own = {row.name: row.own for row in said.modules if row.own}
    assert own == {"0": x.nbytes, "1": 8 * 64 * 4, "2.1": 8 * 32 * 4}
    assert said.by_module["2"] == own["2.1"]
    assert said.saved_bytes == said.by_module[""] == sum(own.values())


#: Entries that store, move, share, recompute, recast and keep.
PLANS: dict[str, tuple[str, Callable[[], Any]]] = {
    "all in a store": ("", lambda: pipeline(Copies(), at_least=0)),
    "some modules": ("[!m]*", lambda: pipeline(Copies(), at_least=0)),
    "large ones alone": ("", lambda: pipeline(Copies(), at_least="16 KiB")),
    "recomputed": ("", lambda: pipeline(dh.Recompute(), Copies(), at_least=0)),
    "cast": ("", lambda: pipeline(dh.Cast(torch.bfloat16), Copies(), at_least=0)),
    "kept in the host's memory": ("", lambda: pipeline(dh.OnCpu(), at_least=0)),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
def test_explain_with_a_plan_says_what_the_report_of_a_run_says(case: str, plan: str) -> None:
    modules, stages = PLANS[plan]
    said = dh.explain(lambda: build(case), plan=[(modules, stages())], device="cpu")
    model, x = build(case)
    with dh.save_activations(model, modules, stages()) as saving:
        for _ in range(2):
            step(model, x)
        found = said.beside(saving.report())
    assert {each.name: each.predicted for each in found} == {each.name: each.measured for each in found}
    assert sum(each.measured for each in found) > 0


def test_a_plan_may_be_a_dict_as_it_stands_in_a_file(tmp_path: pathlib.Path) -> None:
    plan = {"save": [{"modules": "blocks.*", "store": {"kind": "OnDisk", "directory": str(tmp_path)}}]}
    (said,) = dh.explain(Tiny(), tokens(), plan=plan, device="cpu").reports
    (same,) = dh.explain(Tiny(), tokens(), plan=[("blocks.*", dh.OnDisk(tmp_path))], device="cpu").reports
    assert said.stored == same.stored > 0
    with pytest.raises(ConfigError, match="stor"):
        dh.explain(Tiny(), tokens(), plan={"stor": []}, device="cpu")


@pytest.mark.second_tier
def test_explain_predicts_the_inputs_of_checkpointed_layers(tmp_path: pathlib.Path) -> None:
    zoo = pytest.importorskip("tests.support.zoo")
    plan = [("model.layers.*", dh.OnDisk(tmp_path))]
    said = dh.explain(lambda: zoo.build("llama_checkpointed"), plan=plan, device="cpu")
    model, inputs = zoo.build("llama_checkpointed")
    with dh.save_activations(model, *plan[0]) as saving:
        model(**inputs).loss.backward()
    layers, tokens, hidden = len(model.model.layers), inputs["input_ids"].numel(), model.config.hidden_size
    assert said.reports[0].moved == saving.report().moved == layers * tokens * hidden * 4


@pytest.mark.first_tier(modules=("blocks.0.mlp",))
@pytest.mark.parametrize("modules", ["blocks.*", "blocks.0.mlp", "*.norm?"])
def test_explain_with_a_plan_names_the_bytes_that_the_plan_stores(modules: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "hooks.yaml"
    file.write_text(f"save: [{{modules: '{modules}', at_least: 0, store: {{kind: OnDisk, directory: '{tmp_path}'}}}}]")
    ran = typer.testing.CliRunner().invoke(app, ["explain", f"{BUILT}:whole", str(file), "--json", "--device", "cpu"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)["plan"]["modules"]
    model = Tiny()
    with dh.config.from_config(file).save(model) as saving:
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
    with dh.save_activations(model, "blocks.*", pipeline(store, at_least=0)) as saving:
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
    with dh.config.from_config(file).save(model) as saving:
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
        dh.config.from_config(file).save(model)
