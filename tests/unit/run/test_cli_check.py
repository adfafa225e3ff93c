"""``disthooks check``: what it says of a configuration is what a run does."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest
import torch

import disthooks as dh
from tests.support import needs
from tests.support.command_line import BUILT, MIB, hooks, run
from tests.support.models import Tiny, step, tokens

WHOLE = """
save:
  - modules: blocks.0
    at_least: 8 KiB
    store: {kind: OnDisk, directory: {folder}}
  - modules: ["blocks.1.mlp", "norm"]
    codecs: [{kind: Quantize, bits: 8}]
    store: {kind: OnCpu}
watch:
  every: 2
  groups: {norms: "*norm*"}
  rules:
    - {kind: only, pattern: "*.bias", rule: {kind: ClipValue, low: -0.1, high: 0.1}}
    - {kind: ClipNorm, max_norm: 0.5}
  stats: [{kind: Norm}, {kind: NonFinite}]
  sinks: [{kind: Jsonl, path: {folder}/run/gradients.jsonl}]
"""


def checked(folder: pathlib.Path, text: str, model: str = "", code: int = 0) -> dict[str, Any]:
    more = ["--model", f"{BUILT}:{model}"] if model else []
    return json.loads(run("check", hooks(folder, text), *more, "--json", code=code).stdout)


def test_check_reads_a_file(tmp_path: pathlib.Path) -> None:
    told = run("check", hooks(tmp_path, WHOLE)).stdout
    assert "save   blocks.0: OnDisk(" in told
    assert "at_least='8.0 KiB'" in told
    assert "float32, there and back: the same bits; 1.0 MiB are 1.0 MiB" in told
    assert "rule 1 ClipNorm(max_norm=0.5" in told
    (error,) = run("check", hooks(tmp_path, "save: [{modules: x, store: {kind: OnDisc}}]"), code=1).stderr.splitlines()
    assert "did you mean 'OnDisk'?" in error


def test_check_tells_what_a_run_does(tmp_path: pathlib.Path) -> None:
    found = checked(tmp_path, WHOLE, "whole")
    model, plan = Tiny(), dh.config.from_config(tmp_path / "hooks.yaml")
    parts = [model.blocks[0]], [model.blocks[1].mlp, model.norm]
    for entry, modules in zip(found["save"], parts, strict=True):
        assert entry["parameters"] == sum(p.numel() for module in modules for p in module.parameters())
    assert [entry["modules"] for entry in found["save"]] == [["blocks.0"], ["blocks.1.mlp", "norm"]]
    assert len(found["save"][0]["matched"]["blocks.0"]) == 1
    biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    rules = list(found["watch"]["rules"].values())
    assert rules == [biases, [name for name, _ in model.named_parameters()]]
    assert set(found["watch"]["groups"]["norms"]) == {n for n, _ in model.named_parameters() if "norm" in n}
    with dh.save_activations(model, "blocks.0", plan.saves[0][1]) as truth:
        step(model, tokens())
    moved = {each["module"]: each["moved"] for each in found["run"]}
    assert moved["blocks.0"] == truth.report().moved > 0
    assert {each["module"] for each in found["run"]} == {"blocks.0", "blocks.1.mlp", "norm"}
    assert found["ok"]
    assert not (tmp_path / "run").exists()  # nothing is begun by a check


def test_check_of_a_model_in_words(tmp_path: pathlib.Path) -> None:
    told = run("check", hooks(tmp_path, WHOLE), "--model", "built:named").stdout
    assert "on 2: blocks.1.mlp, norm" in told
    assert "│ blocks.0 " in told
    table = told[told.index("one forward") :]
    assert "weights" in table
    assert "recomputed" not in table
    text = "save: [{modules: 'blocks.*', at_least: 0, recompute: {kind: Recompute}, store: {kind: OnCpu}}]"
    dropped = run("check", hooks(tmp_path, text), "--model", f"{BUILT}:named").stdout
    assert "recomputed" in dropped[dropped.index("one forward") :]


def test_pipelines_are_tried(tmp_path: pathlib.Path) -> None:
    stages = "[{kind: Cast, dtype: bfloat16}]", "[{kind: Quantize, bits: 4}]", "[{kind: Compact}]", "[]"
    entries = [
        f"{{modules: m{i}, codecs: {s}, store: {{kind: OnDisk, directory: '{{folder}}'}}}}"
        for i, s in enumerate(stages)
    ]
    cast, four, packed, plain = (e["round_trips"] for e in checked(tmp_path, f"save: [{', '.join(entries)}]")["save"])
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    assert cast[0]["error"] == pytest.approx(float((x.bfloat16().float() - x).norm() / x.norm()), rel=1e-3)
    assert (cast[0]["before"], cast[0]["after"]) == (MIB, MIB // 2)
    assert cast[1]["identical"]  # it is bfloat16 already
    assert 0.01 < four[0]["error"] < 0.5
    assert four[0]["after"] < MIB // 4
    assert all(trip["identical"] and trip["lossless"] for trip in packed + plain)
    assert all(trip["read"] >= trip["moved"] == trip["after"] > 0 for trip in cast + four + packed + plain)


def test_codecs_that_lose_everything_or_say_that_they_lose_nothing(tmp_path: pathlib.Path) -> None:
    for codec, says in (("Endless", "came back infinite or NaN"), ("Careless", "came back with other bits")):
        text = f"save: [{{modules: x, codecs: [{{kind: 'built:{codec}'}}], store: {{kind: OnCpu}}}}]"
        found = checked(tmp_path, text, code=1)
        assert says in " ".join(found["errors"])
        # JSON has no other word for it
        assert codec == "Careless" or found["save"][0]["round_trips"][0]["error"] == "inf"


WRONG = """
save:
  - {modules: blocks.0, store: {kind: OnCpu}}
  - {modules: blocks.7, store: {kind: OnCpu}}
watch:
  groups: {heads: "head.*"}
  rules:
    - {kind: only, pattern: "*.weigth", rule: {kind: Scale, factor: 0.5}}
  stats: [{kind: Norm}]
  sinks: [{kind: Jsonl, path: /proc/1/no/run.jsonl}, {kind: Jsonl, path: {folder}/hooks.yaml/run.jsonl}]
"""


def test_every_error_is_told_in_a_line_of_its_own(tmp_path: pathlib.Path) -> None:
    result = run("check", hooks(tmp_path, WRONG), "--model", f"{BUILT}:whole", code=1)
    lines = result.stderr.splitlines()
    assert all(line.startswith("disthooks: error: ") for line in lines)
    wanted = ("save.1: 'blocks.7' matches no module", "watch.groups.heads: 'head.*'")
    wanted += ("watch.rules.0: '*.weigth'", "hooks.yaml is no directory")
    for text in wanted:
        assert sum(text in line for line in lines) == 1, (text, lines)


def test_a_package_that_a_sink_needs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    text = "watch: {stats: [{kind: Norm}], sinks: [{kind: MLflow}]}"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'disthooks[mlflow]'" in " ".join(checked(tmp_path, text, code=1)["errors"])


@pytest.mark.parametrize(
    ("model", "modules", "says"),
    [
        ("wrapped", "blocks.0.mlp", "save.0: it would save nothing: it is inside 'blocks.0', a CheckpointWrapper"),
        ("hidden", "blocks.*", "'blocks.0' saved nothing: all its calls went without hooks (checkpoint 2)"),
        pytest.param(
            *("llama", "*.mlp", "which transformers' gradient_checkpointing computes again"),
            marks=needs("transformers"),
        ),
        ("raising", "*", "raising: KeyError: 'no such size' ("),
        ("number", "*", "gave int: it has to return a module"),
        ("nowhere", "*", "built.py has no 'nowhere'; did you mean 'whole'?"),
        ("smal", "*", "built.py has no 'smal'; did you mean 'small'?"),
    ],
)
def test_what_stands_in_the_way(model: str, modules: str, says: str, tmp_path: pathlib.Path) -> None:
    text = f"save: [{{modules: '{modules}', at_least: 0, store: {{kind: OnDisk, directory: '{{folder}}'}}}}]"
    assert says in " ".join(checked(tmp_path, text, model, code=1)["errors"])


IDLE = """
from torch import empty, nn

def build():
    frozen = nn.Linear(256, 256).requires_grad_(False)
    return nn.Sequential(nn.Linear(256, 256), frozen, nn.Identity(), nn.Linear(256, 4)), empty(2, 256)
"""


@pytest.mark.parametrize(
    ("module", "store", "code", "says"),
    [
        ("0", "OnDisk, directory: /tmp", 1, "all that its modules save stays where it is (small 2.0 KiB)"),
        ("1", "OnDisk, directory: /tmp", 1, "all that its modules save stays where it is (parameter 256.0 KiB)"),
        ("2", "OnDisk, directory: /tmp", 1, "its modules save no tensor"),
        pytest.param("0", "OnCpu", 0, "on this machine", marks=pytest.mark.skipif("torch.cuda.is_available()")),
    ],
)
def test_an_idle_entry(module: str, store: str, code: int, says: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "models.py").write_text(IDLE)
    at_least = "" if code else "at_least: 0, "
    file = hooks(tmp_path, f"save: [{{modules: '{module}', {at_least}store: {{kind: {store}}}}}]")
    found = json.loads(run("check", file, "--model", f"{tmp_path}/models.py:build", "--json", code=code).stdout)
    (told,) = found["errors"] if code else found["warnings"]
    assert "save.0: it would store nothing" in told
    assert says in told


def test_a_model_in_a_file_that_is_not_there(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.py").touch()
    file = hooks(tmp_path, "save: [{modules: x, store: {kind: OnCpu}}]")
    (error,) = run("check", file, "--model", f"{tmp_path}/modle.py:build", code=1).stderr.splitlines()
    assert error.startswith("disthooks: error: ")
    assert error.endswith("modle.py'; did you mean 'model.py'?")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "save: [{modules: norm, store: {kind: OnCpu}}, {modules: '*norm', store: {kind: OnCpu}}]",
            "both match 'norm'",
        ),
        ("budget: 1 KiB\nsave: [{modules: norm, store: {kind: OnCpu}}]", "hooks.yaml:1: budget: 1.0 KiB"),
        ("watch: {rules: [{kind: Scale, factor: 2}], sinks: [{kind: Console}]}", "these rules log nothing"),
    ],
)
def test_what_a_run_would_refuse(text: str, says: str, tmp_path: pathlib.Path) -> None:
    (told,) = run("check", hooks(tmp_path, text), "--model", f"{BUILT}:whole", code=1).stderr.splitlines()
    assert says in told


@pytest.mark.first_tier(model=("wrapped",))
@pytest.mark.parametrize(("model", "modules"), [("wrapped", "blocks.*"), ("llama", "*.layers.?")])
def test_around_a_checkpoint_all_is_well(model: str, modules: str, tmp_path: pathlib.Path) -> None:
    text = f"save: [{{modules: '{modules}', at_least: 0, store: {{kind: OnDisk, directory: '{{folder}}'}}}}]"
    found = checked(tmp_path, text, model)
    assert all(each["moved"] > 0 for each in found["run"])
    assert len(found["run"]) == 2


def test_hooks_inside_compiled_code(tmp_path: pathlib.Path) -> None:
    found = checked(tmp_path, "save: [{modules: norm, store: {kind: OnCpu}}]", "compiled")
    assert "its graph breaks there" in " ".join(found["warnings"])


def test_check_runs_no_model(tmp_path: pathlib.Path) -> None:
    """The model and its forward have tensors without memory, and a store that is too small is an error as in a run."""
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch._subclasses import FakeTensor\n"
        "class Layer(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        assert isinstance(x, FakeTensor) and isinstance(self.weight, FakeTensor)\n"
        "        return super().forward(x).tanh()\n"
        "def build():\n    model = nn.Sequential(Layer(16, 16), Layer(16, 16))\n"
        "    assert isinstance(model[0].weight, FakeTensor)\n"
        "    return model, torch.randn(2 ** 16, 16)\n"
    )
    text = "save: [{modules: '*', at_least: 0, store: {kind: OnDisk, directory: '{folder}', limit: LIMIT}}]"
    options = "--model", f"{tmp_path}/model.py:build"
    enough = run("check", hooks(tmp_path, text.replace("LIMIT", "1 GiB")), *options)
    assert "one forward and backward, predicted" in enough.stdout
    less = run("check", hooks(tmp_path, text.replace("LIMIT", "2 MiB")), *options, code=1)
    assert "is full: wanted 4.0 MiB more" in less.stderr


def test_a_check_ends_in_a_verdict(tmp_path: pathlib.Path) -> None:
    file = hooks(tmp_path, WHOLE)
    assert run("check", file).stdout.splitlines()[-1].startswith(f"{file}: ok (give --model")
    assert run("check", file, "--model", f"{BUILT}:whole").stdout.splitlines()[-1] == f"{file}: ok"
    wrong = hooks(tmp_path, WRONG)
    result = run("check", wrong, "--model", f"{BUILT}:whole", code=1)
    errors = len(result.stderr.splitlines())
    assert result.stdout.splitlines()[-1] == f"{wrong}: {errors} errors: a run would fail"
