"""One YAML file: what it says is what is attached, and what it cannot mean is an error with the nearest right name."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

import disthooks as dh
from disthooks.errors import ConfigError
from tests.support.models import Tiny, identical, step, tokens

WHOLE = """
save:
  - modules: blocks.0
    at_least: 8 KiB
    store: {kind: OnDisk, directory: {folder}}
  - modules: ["blocks.1.mlp", "norm"]
    store: {kind: OnDisk, directory: {folder}, limit: 1 GiB}
watch:
  every: 2
  rules:
    - {kind: only, pattern: "*.bias", rule: {kind: ClipValue, low: -0.1, high: 0.1}}
    - {kind: ClipNorm, max_norm: 0.5}
  stats: [{kind: Norm}, {kind: MaxAbs}, {kind: NonFinite}]
  sinks: [{kind: Jsonl, path: {folder}/run/gradients.jsonl}]
"""
_RECOMPUTE = "save: [{{modules: x, recompute: {}, store: {{kind: OnCpu}}}}]"
_CODECS = "save: [{{modules: x, codecs: {}, store: {{kind: OnCpu}}}}]"


def _write(folder: pathlib.Path, text: str) -> pathlib.Path:
    file = folder / "hooks.yaml"
    file.write_text(text.replace("{folder}", str(folder)))
    return file


def test_all_of_it(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = Tiny()
    truth = step(model, tokens())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dh.config.from_config(_write(tmp_path, WHOLE))
    assert not (tmp_path / "run").exists()  # nothing happens before it is attached
    with plan.save(model) as saving, plan.watch(model, optimizer):
        for i in range(3):
            grads = step(model, tokens())
            if i == 0:
                assert identical(grads, truth)
            optimizer.step()
    assert saving.report().moved > 0
    assert saving.report().held == 0
    lines = [json.loads(line) for line in (tmp_path / "run/gradients.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2]
    assert {"grad_norm", "grad_max_abs", "clip_ratio", "nonfinite"} <= set(lines[0])
    before = saving.report().stored
    step(model, tokens())
    assert saving.report().stored == before  # removed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("save: [{modules: x, at_least: many, store: {kind: OnCpu}}]", r"save\.0\.at_least: .*'many' is not"),
        (_RECOMPUTE.format("true"), r"save\.0\.recompute: \{kind: Recompute\} or null is needed, got True$"),
        (_RECOMPUTE.format("Recompute"), r"got 'Recompute'; did you mean \{kind: Recompute\}\?"),
        (_CODECS.format("[Compact]"), r"codecs\.0: \{kind: Name, \.\.\.\} is needed.*did you mean \{kind: Compact\}\?"),
        (_CODECS.format("compact"), r"a list of \{kind: Name, \.\.\.\} is needed.*mean \[\{kind: Compact\}\]\?"),
        (_CODECS.format("true"), r"codecs: a list of .* got True; there are Cast, Compact, Quantize"),
        (_CODECS.format("[{kind: Recompute}]"), "'Recompute' is a recompute, no codec; there are Cast, Compact"),
        ("save: [{modules: 3, store: {kind: OnCpu}}]", r"modules: a pattern or a list of them is needed, got 3"),
        ("save: [{modules: x, at_least: true, store: {kind: OnCpu}}]", "a number of bytes or a text such as 4 KiB is"),
        (
            "save: [{modules: x, store: {kind: Tiered, stores: [{kind: OnDevice, limit: 1}, OnCpu]}}]",
            r"did you mean \{kind: OnCpu\}\?",
        ),
        ("watch: {stats: [Norm]}", r"'standard', 'full' or \{kind: Name, .* did you mean \{kind: Norm\}\?"),
        ("watch: {sinks: [{kind: WandB, run: mine}]}", r"watch\.sinks\.0\.run: WandB has no argument 'run'; .*prefix"),
        ("watch: {sinks: [{kind: Tensorboard}]}", r"'Tensorboard' is no sink; did you mean 'TensorBoard'\?"),
        (
            "watch: {sinks: [{kind: MLflow, prefx: a}]}",
            r"prefx: MLflow has no argument 'prefx'; did you mean 'prefix'\?",
        ),
    ],
)
def test_what_it_cannot_mean(text: str, says: str, tmp_path: pathlib.Path) -> None:
    """What tests/end_to_end/test_wrong_files.py does not have; that has each with its line, on two ranks."""
    with pytest.raises(ConfigError, match=says):
        dh.config.from_config(_write(tmp_path, text))


def test_objects_in_a_dict() -> None:
    with pytest.raises(ConfigError, match=r"store: \{kind: Name, \.\.\.\} is needed.*disthooks\.config\.Plan\(saves="):
        dh.config.from_config({"save": [{"modules": "*", "store": dh.OnCpu()}]})
