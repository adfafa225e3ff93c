"""Law 19, predicted is measured.

"What `explain` says and `fit` promises is compared with what happened, and the difference is shown; a budget is never
exceeded, from the first step on." (`fit` is not there yet.)
"""

from __future__ import annotations

import json
import pathlib

import pytest

import disthooks as dh
from tests.support import ROOT
from tests.support.models import Tiny, identical, step, tokens

BUILT = ROOT / "tests" / "support" / "jobs" / "built.py"


@pytest.mark.parametrize("modules", ["blocks.*", "blocks.0.mlp", "*.norm?"])
def test_explain_says_what_a_step_then_stores(modules: str, tmp_path: pathlib.Path) -> None:
    typer = pytest.importorskip("typer.testing")
    from disthooks.cli.app import app

    hooks = tmp_path / "hooks.yaml"
    hooks.write_text(f"save: [{{modules: '{modules}', at_least: 0, store: {{kind: OnDisk, directory: '{tmp_path}'}}}}]")
    done = typer.CliRunner().invoke(app, ["explain", f"{BUILT}:whole", str(hooks), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["plan"]["modules"]
    model = Tiny()
    with dh.from_config(hooks).save(model) as saving:
        model(tokens()).float().square().mean().backward()
        found = saving.report()
    assert sum(each["stored"] for each in said) == found.stored > 0


def test_a_budget_is_never_exceeded_from_the_first_step_on(tmp_path: pathlib.Path) -> None:
    model, room, seen = Tiny(), 400 << 10, []
    truth = step(model, tokens())
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    entry = f"{{modules: 'blocks.*', at_least: 0, store: {{kind: OnDisk, directory: '{tmp_path}'}}}}"
    (tmp_path / "hooks.yaml").write_text(f"budget: {weights + room}\nsave: [{entry}]\n")
    with dh.from_config(tmp_path / "hooks.yaml").save(model) as saving:
        for module in model.modules():
            module.register_forward_hook(lambda *_: seen.append(saving.report().tiers[0].held))
        for _ in range(3):
            assert identical(step(model, tokens()), truth)
        moved = sum(tier.written + tier.never_written for tier in saving.report().tiers)
    assert 0 < max(seen) <= room
    assert moved > room // 4  # what did not fit
