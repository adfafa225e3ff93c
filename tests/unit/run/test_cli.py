"""The command line: its flags are frozen, what it says is what a run does, and its errors are one line each."""

from __future__ import annotations

import configparser
import contextlib
import copy
import inspect
import io
import json
import math
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import disthooks as dh
from disthooks.run.cli import app as cli_app
from disthooks.run.cli import doctor, output
from disthooks.run.cli import env as env_command
from disthooks.run.cli.app import app
from disthooks.run.cli.doctor import problems
from tests.support import ROOT, needs
from tests.support.logs import log
from tests.support.models import Tiny, step, tokens

JOBS = ROOT / "tests" / "support" / "jobs"
BUILT = str(JOBS / "built.py")
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{JOBS}"}
MIB = 1 << 20

#: Every command and its parameters; settings belong into the YAML file, not here.
FROZEN = {
    "": ["--version", "--install-completion", "--show-completion"],
    "check": ["file", "--model", "--json"],
    "diff": ["one", "other", "--json", "--exit-code"],
    "env": ["--json"],
    "explain": [
        *("model", "[file]", "--device", "--backend", "--dtype", "--autocast", "--optimizer", "--engine", "--world"),
        *("--batch", "--seq", "--fits", "--advice/--no-advice", "--output/-o", "--json"),
    ],
    "fit": [
        *("model", "--budget", "--device", "--dtype", "--autocast", "--optimizer", "--engine", "--world"),
        *("--batch", "--seq", "--measured", "--json"),
    ],
    "launch": [],
    "report": ["path", "--output/-o", "--compare", "--json"],
    "watch": ["path", "--once", "--every"],
}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the tests can be imported, nobody's launcher is told of, and no line depends on the clock."""
    monkeypatch.setattr(output, "EVERY", threading.TIMEOUT_MAX)
    monkeypatch.setattr(sys, "path", [str(JOBS), *sys.path])
    for name in doctor.environment():
        monkeypatch.delenv(name)


def run(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def process(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "disthooks", *map(str, words)]
    return subprocess.run(call, capture_output=True, text=True, check=False, timeout=300, **({"env": ENV} | more))


def hooks(folder: pathlib.Path, text: str) -> pathlib.Path:
    file = folder / "hooks.yaml"
    file.write_text(text.replace("{folder}", str(folder)))
    return file


# -- the commands


def _shown(parameter: Any) -> str:
    options = [name for name in parameter.opts if name.startswith("-")]
    if options:
        return "/".join([*options, *parameter.secondary_opts])
    return str(parameter.name) if parameter.required else f"[{parameter.name}]"


def test_the_flags_are_frozen() -> None:
    whole: Any = typer.main.get_command(app)
    parts = {"": whole, **whole.commands}
    found = {name: [_shown(p) for p in part.params if p.name != "help"] for name, part in parts.items()}
    assert found == FROZEN


def test_help_does_not_wait_for_torch() -> None:
    call = "import sys; sys.argv = ['disthooks', '--help']\nfrom disthooks.run.cli import main\n"
    call += "try:\n    main()\nfinally:\n    print(sorted({'torch', 'rich', 'yaml', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True, env=ENV)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f"\n  {name} " in done.stdout for name in FROZEN if name)


def test_errors_are_one_line_and_exit_codes_are_told(tmp_path: pathlib.Path) -> None:
    done = process("report", tmp_path / "nothing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "nothing: there is no such file or directory" in done.stderr
    for words, says in (([], "Missing argument"), (["x", "--jsn"], "No such option: --jsn")):
        done = process("check", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"disthooks: error: {says}")
        assert "disthooks check -h" in done.stderr


def test_every_command_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for name in FROZEN:
        for flag in ("--help", "-h"):
            if name != "launch":  # whose flags are the launcher's
                assert cli_app.run([name, flag] if name else [flag]) == 0
                assert "-h, --help" in (said := capsys.readouterr().out)
                assert name != "explain" or "nothing runs" in said
    assert cli_app.run([]) == 2
    assert "Commands:" in capsys.readouterr().out
    assert dh.__version__ in run("--version").stdout


def test_completion_knows_the_commands() -> None:
    asked = {"_DISTHOOKS_COMPLETE": "complete_bash", "COMP_WORDS": "disthooks e", "COMP_CWORD": "1"}
    done = process(env={**ENV, **asked})
    assert done.stdout.split() == ["env", "explain"]


def test_the_extra_of_the_command_line_reads_yaml() -> None:
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    wanted = extras["options.extras_require"]
    assert "disthooks[config]" in wanted["cli"].split()
    assert {line.partition(">")[0] for line in wanted["config"].split()} == {"pydantic", "pyyaml"}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colours_and_bars_are_for_terminals(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = hooks(tmp_path, "save: [{modules: x, store: {kind: OnCpu}}]")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("save: [{modules: x}]")
    seen: dict[bool, list[str]] = {}
    for terminal in (True, False):
        streams = [Terminal() if terminal else io.StringIO() for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert [cli_app.run(["check", str(each)]) for each in (file, wrong)] == [0, 1]
        seen[terminal] = [stream.getvalue() for stream in streams]
    monkeypatch.undo()
    out, err = seen[True]
    assert f"\x1b[32m{file}: ok" in out
    assert "\x1b[31mdisthooks: error: " in err
    assert "saving random tensors through each pipeline" in err  # the bar
    assert not any("\x1b" in text or "saving random" in text for text in seen[False])


def test_a_long_command_says_in_a_pipe_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "EVERY", 0.001)
    told = ""
    with output.progress(2) as begin:
        begin("predicting one step")
        begin("batch 16: 3.0 GiB, fits", is_step=False)
        while "fits" not in told:
            err = capsys.readouterr()
            assert err.out == ""
            told += err.err
    assert re.search(r"^disthooks: \d+ s: batch 16: 3.0 GiB, fits$", told, re.MULTILINE)


def test_a_check_ends_in_a_verdict(tmp_path: pathlib.Path) -> None:
    file = hooks(tmp_path, WHOLE)
    assert run("check", file).stdout.splitlines()[-1].startswith(f"{file}: ok (give --model")
    assert run("check", file, "--model", f"{BUILT}:whole").stdout.splitlines()[-1] == f"{file}: ok"
    wrong = hooks(tmp_path, WRONG)
    result = run("check", wrong, "--model", f"{BUILT}:whole", code=1)
    errors = len(result.stderr.splitlines())
    assert result.stdout.splitlines()[-1] == f"{wrong}: {errors} errors, 1 warning: a run would fail"


def test_names_are_whole_when_piped(tmp_path: pathlib.Path) -> None:
    """They are looked for by grep, whatever COLUMNS says."""
    name = f"grad_norm/group/{'a_long_name_' * 20}"
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"step": 0, name: 1.5}))
    done = process("report", file, env={**ENV, "COLUMNS": "40"})
    assert [line.split()[1] for line in done.stdout.splitlines() if "grad_norm" in line] == [name]


def test_without_typer_it_says_how_to_get_it() -> None:
    call = "import sys; sys.modules['typer'] = None\nfrom disthooks.run.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False, env=ENV)
    assert done.returncode == 1
    assert done.stderr == "disthooks: error: the command line needs typer and rich: pip install 'disthooks[cli]'\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["-h"],
        ["torchrun", "--nproc-per-node", "2", "train.py", "--json", "--version", "-h", "--", "--x=1", "a b", ""],
        ["--", "--config_file", "x.yaml", "train.py"],
    ],
)
def test_launch_hands_every_word_on(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    stand_in = types.ModuleType("disthooks.run.launcher")
    stand_in.main = lambda argv: given.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "disthooks.run.launcher", stand_in)
    run("launch", *words, code=7)
    assert given == [words]


# -- check

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
    stages = "[{kind: Cast, dtype: bfloat16}]", "[{kind: Quantize, bits: 4}]", "[{kind: Compress, library: zstd}]", "[]"
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
    - {kind: only, pattern: "*.bias", rule: {kind: Freeze}}
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
    assert "hooks.yaml:9: watch.rules.1: Only(" in result.stdout
    assert "refused under FSDP1 with flat" in result.stdout


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


# -- explain, report


def test_explain_counts_what_autograd_saves(tmp_path: pathlib.Path) -> None:
    file = hooks(tmp_path, "save: [{modules: '1', at_least: 0, store: {kind: OnDisk, directory: '{folder}'}}]")
    told = run("explain", f"{BUILT}:small", file, "--device", "cpu")
    rows = {words[1]: words for line in told.stdout.splitlines() if (words := line.split())[:1] == ["│"]}
    assert rows["0"][5:7] == ["60", "B"]  # the input of the Linear: 5 x 3 floats
    assert "2" not in rows  # what the last Linear saves is its weight, and the output of the Tanh again
    assert "\\n" not in told.stdout
    curve = [line for line in told.stdout.splitlines() if re.match(r"[ .0-9A-Za-z]{11}│", line)]
    assert len(curve) >= 8, "the memory over the step, in rows of its own"
    verdict = told.stdout.splitlines()[:3]
    assert verdict[0].startswith("the peak with ")
    assert "the plan hardly lowers it, because at the peak" in verdict[1]
    assert verdict[2].endswith("autograd saves 220 B for backward, weights not counted")
    assert [line for line in told.stdout.splitlines() if line.startswith("the plan keeps at most 4.0 KiB on disk")]
    assert "not counted: the memory in which the hooks of the plan compute checksums" in told.stdout
    found = json.loads(run("explain", f"{BUILT}:small", file, "--device", "cpu", "--json").stdout)
    assert found["saved"] == 220
    assert [(each["module"], each["own"]) for each in found["modules"]] == [("", 0), ("0", 60), ("1", 160), ("2", 0)]
    assert [(each["module"], each["stored"]) for each in found["plan"]["modules"]] == [("1", 160)]
    alone = run("explain", f"{BUILT}:alone", code=1).stderr
    assert "alone has no example inputs: a function has to return (module, example inputs)" in alone


def test_fit_prints_a_file_that_keeps_the_budget(tmp_path: pathlib.Path) -> None:
    options = (f"{BUILT}:whole", "--device", "cpu", "--optimizer", "adamw")
    free = json.loads(run("explain", *options, "--json").stdout)["peak"]["nbytes"]
    budget = free * 9 // 10
    told = run("fit", *options, "--budget", budget).stdout
    assert told.startswith("# ")
    assert "\n# This counts tensors. A budget of dh.fit on a CPU counts the whole process" in told
    file = tmp_path / "hooks.yaml"
    file.write_text(told)
    found = json.loads(run("explain", options[0], file, *options[1:], "--json").stdout)
    assert found["plan"]["peak"]["nbytes"] <= budget
    assert "no plan is needed" in run("fit", *options, "--budget", free).stdout
    found = json.loads(run("fit", *options, "--budget", free, "--json").stdout)
    assert (found["budget"], found["peak"], found["plan"]) == (free, free, None)
    assert "no plan keeps 1.0 KiB" in run("fit", *options, "--budget", "1 KiB", code=1).stderr
    measured = tmp_path / "env.json"
    measured.write_text(run("env", "--json").stdout)
    assert run("fit", *options, "--budget", budget, "--measured", measured).stdout.startswith("# ")
    measured.write_text("{}")
    wrong = run("fit", *options, "--budget", budget, "--measured", measured, code=1).stderr
    assert "it is not what disthooks env --json prints" in wrong


ARGUMENTS = """
import warnings
from torch import empty, nn

def needs(width):
    return nn.Linear(width, 4), empty(2, width)

def sized(batch, seq=8):
    return nn.Linear(4, 4), empty(batch, seq, 4)

def careless():
    return nn.Sequential(nn.Identity(), nn.Linear(5, 4)), empty(2, 4)

def frozen():
    return nn.Linear(4, 4).requires_grad_(False), empty(2, 4)

def warns():
    warnings.warn("this model is old")
    return nn.Linear(4, 4), empty(2, 4)

number = 5
"""


def test_explain_says_what_is_wrong_where_and_what_to_do(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(ARGUMENTS)
    for name, options, told in (
        ("needs", (), "needs cannot be called: it needs 'width'"),
        ("needs", (), "let each argument have a default"),
        ("sized", (), "or say batch= (--batch)"),
        ("careless", (), "one step of Sequential, in 1 (Linear): RuntimeError"),
        ("frozen", (), "let some parameter require a gradient"),
        ("number", (), "number: explain takes a module, or a function that builds one, not 5"),
        ("warns", ("-o", tmp_path / "none" / "page.html"), "make it first"),
    ):
        error = run("explain", f"{file}:{name}", "--device", "cpu", *options, code=1).stderr
        assert told in error, error
        assert "kernels.py" not in error, "a line of disthooks is no place in the user's code"


def test_explain_shows_a_warning_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "models.py").write_text(ARGUMENTS)
    told = process("explain", f"{tmp_path}/models.py:warns", "--device", "cpu", "--fits", "1 MiB")
    assert told.stderr.count("UserWarning: this model is old") == 1
    assert told.stdout.startswith("the step fits in 1.0 MiB")


def test_explain_shows_equal_layers_as_one_line_and_a_page(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.html"
    options = ("--device", "h100", "--optimizer", "adamw", "--engine", "fsdp2", "--world", "4", "-o", page)
    told = run("explain", f"{BUILT}:whole", *options).stdout
    assert re.search(r"0–1 × 2 +│ Block", told)
    assert "optimizer state" in told
    assert "time on H100-SXM-80GB, roughly: forward" in told
    assert told.count("not counted: ") == 3
    assert "checksums" not in told, "those are of hooks on the CPU"
    assert "<html" in page.read_text()
    assert f"wrote {page}" in told


def logged(folder: pathlib.Path) -> pathlib.Path:
    """What a run of six steps logs, the fourth with a NaN in one gradient."""
    torch.manual_seed(0)
    model = Tiny()
    file = folder / "run" / "gradients.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    at: list[int] = []
    model.norm.bias.register_hook(lambda grad: grad * torch.nan if at[-1] == 3 else grad)
    before = copy.deepcopy(model.state_dict())
    kinds = [dh.stats.Norm(per_parameter=True), dh.stats.NonFinite()]
    with dh.gradients(model, optimizer, stats=kinds, sinks=[dh.sinks.Jsonl(file)], every=1):
        for i in range(6):
            at.append(i)
            step(model, tokens(seed=i))
            optimizer.step()
            model.load_state_dict(before)  # the NaN went into a weight
    return file


def test_report_of_a_run(tmp_path: pathlib.Path) -> None:
    file = logged(tmp_path)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    norms = sorted(record["grad_norm"] for record in records if record["grad_norm"] != "nan")
    with file.open("a") as half:
        half.write('{"step": 6, "grad_n')
    told = run("report", tmp_path).stdout
    (row,) = [line.split() for line in told.splitlines() if line.startswith("│ grad_norm ")]
    wanted = records[0]["grad_norm"], norms[2], records[-1]["grad_norm"], norms[-1]
    assert row[3:10:2] == [f"{value:.4g}" for value in wanted]
    largest = next(record["step"] for record in records if record["grad_norm"] == norms[-1])
    assert row[11:15] == ["step", str(largest), "│", "1"]
    assert "6 logged steps, 0 to 5" in told
    assert "a plain module, 1 rank, 4 parameters, every 1; rules: none" in re.sub(
        r"\d+ parameters", "4 parameters", told
    )
    assert "Step 3: gradients were not finite on rank 0, of 1 parameter: norm.bias." in told
    assert told.index("Step 3: ") < told.index("│ grad_norm ")  # what went wrong comes before the figures
    assert "  What to do: Look at the data of this step" in told
    assert "the last line is not whole" in told
    assert "more numbers, of single parameters too" in told
    assert len(told.splitlines()) < 30, "it is at most one screen"
    assert run("report", file).stdout == told
    (found,) = json.loads(run("report", file, "--json").stdout)["runs"]
    assert found["numbers"]["grad_norm"]["median"] == norms[2]
    assert found["counts"]["nonfinite"] == {"sum": records[3]["nonfinite"], "steps": 1, "of": 6}
    assert (found["steps"], found["about"]["ranks"]) == (6, 1)
    assert found["run"] == records[0]["run"]
    assert found["began"] == records[0]["time"] <= found["ended"] == records[-1]["time"] <= time.time()
    assert [each["step"] for each in found["nonfinite"]] == [3]


def test_runs_in_one_file_are_told_apart(tmp_path: pathlib.Path) -> None:
    """Two trainings of this process, and one that a launcher started twice."""
    file = logged(tmp_path)
    logged(tmp_path)
    life = [{"step": i, "run": "other", "restart": i // 2, "grad_norm": 10.0 * i} for i in (0, 1)]
    again = [{"step": i, "run": "other", "restart": 1, "grad_norm": 20.0 * i} for i in (1, 2)]
    with file.open("a") as log:
        log.writelines(json.dumps(record) + "\n" for record in life + again)
    first, second, other = json.loads(run("report", file, "--json").stdout)["runs"]
    assert (first["steps"], second["steps"], other["steps"]) == (6, 6, 3)
    assert second["run"] == f"{first['run']}.1"
    assert first["numbers"]["grad_norm"]["first"] == second["numbers"]["grad_norm"]["first"]
    assert (other["restarts"], other["repeated"]) == (1, 1)
    assert other["numbers"]["grad_norm"]["median"] == 20.0  # of 0, 20 and 40: the second life of step 1
    told = run("report", file).stdout
    assert f"run {first['run']}: 6 logged steps, 0 to 5" in told
    assert "run other: 3 logged steps, 0 to 2" in told
    assert "1 steps come again; of each the last line counts" in told


def reported(folder: pathlib.Path, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the report says of these records; ``said`` are the sentences before those of what was not looked at."""
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (found,) = json.loads(run("report", folder, "--json").stdout)["runs"]
    known = len(found["verdict"]) - len(found["unseen"])
    assert found["verdict"][known:] == found["unseen"]
    return {**found, "said": found["verdict"][:known]}


def ranked(step: int, rank: int, most: float, mean: float, **more: Any) -> dict[str, Any]:
    which = {"grad_norm/argmax_rank": rank, "grad_norm/max_rank": most, "grad_norm/mean_rank": mean}
    return {"step": step, "grad_norm": 1.0, "nonfinite": 0, "replicas/compared": 9, "replicas/differ": 0} | which | more


def test_report_knows_what_numbers_are(tmp_path: pathlib.Path) -> None:
    """A rank's number has no median, a count has a sum, and of a running total the last value counts."""
    ranks, moved = (3, 0, 3, None), (10.0, 20.0, 30.0, 40.0)
    records = [
        {"step": i, "grad_norm": 1.0, "grad_norm/argmax_rank": ranks[i], "nonfinite": i, "saved/moved": moved[i]}
        for i in range(4)
    ]
    found = reported(tmp_path, records)
    assert list(found["numbers"]) == ["grad_norm"]
    assert found["labels"] == {"grad_norm/argmax_rank": {"3": 2, "0": 1}}
    assert found["counts"] == {"nonfinite": {"sum": 6.0, "steps": 3, "of": 4}}
    assert found["totals"] == {"saved/moved": {"last": 40.0}}
    by_nan = [ranked(i, 1, 1.1, 1.05) for i in range(3)] + [ranked(3, 0, math.nan, math.nan)]
    assert reported(tmp_path, by_nan)["labels"]["grad_norm/argmax_rank"] == {"1": 3}


def test_report_says_that_nothing_stands_out(tmp_path: pathlib.Path) -> None:
    assert reported(tmp_path, [ranked(10 * i, i % 2, 1.1, 1.05) for i in range(6)])["said"] == [
        "Nothing stands out in 6 logged steps, 0 to 50: gradients that are not finite, gradients, copies of ranks."
    ]


def test_report_says_which_rank_leads_and_by_how_much(tmp_path: pathlib.Path) -> None:
    """As often as another rank, but once with 5,594 where the other has 0.56."""
    records = [ranked(i, i % 2, 0.6, 0.58) for i in range(60)]
    records[37] = ranked(37, 1, 5594.0, 2797.28)
    told = ["Step 37 on rank 1: grad_norm was 5594, 9,323 times its usual 0.6."]
    assert reported(tmp_path, records)["said"] == told
    # Without a history there is no usual value.
    assert reported(tmp_path, [ranked(0, 0, 0.6, 0.58) for _ in range(7)] + records[37:])["said"] == [
        "Rank 1 had the largest gradient norm in 12 of 24 logged steps. Its lead is the largest at step 37: 5594, and "
        "0.56 on the other ranks on average."
    ]


def test_report_names_a_spike_between_two_logged_steps(tmp_path: pathlib.Path) -> None:
    """A step that is not logged, with the rank if the records tell it."""
    peak = {"grad_norm/peak": 1.5, "grad_norm/peak_step": 49}
    records = [ranked(50 * i, 0, 1.1, 1.05, **peak) for i in range(4)]
    records[2] |= {"grad_norm/peak": 3789.0, "grad_norm/peak_step": 77, "grad_norm/peak_rank": 1}
    found = reported(tmp_path, records)
    assert found["said"] == [
        "Step 77: the gradient norm was 3789, 3,789 times its median of 1, and rank 1 had the largest norm."
    ]
    assert found["numbers"]["grad_norm/peak"]["max_step"] == 77
    assert not {"grad_norm/peak_step", "grad_norm/peak_rank"} & found["numbers"].keys()


def test_report_says_how_many_steps_were_not_finite(tmp_path: pathlib.Path) -> None:
    """Of a row that began at step 37, two steps are in the log, and the records know of 23 steps."""
    at = [{"param": "a.weight", "rank": 1}]
    first = {"step": 37, "nonfinite_params": 1, "nonfinite_at": at, "nonfinite_ranks": [1], "skipped": 0.0}
    later = {"step": 50, "nonfinite_at": at, "nonfinite_since": 37, "nonfinite_steps": 23, "replicas/compared": 1}
    assert reported(tmp_path, [{"step": 0, "nonfinite": 0}, first, later])["said"][:2] == [
        "Step 37: gradients were not finite on rank 1, of 1 parameter: a.weight; the step was made.",
        "Gradients were not finite in 23 steps, 37 to 50 at least.",
    ]


def test_report_says_what_is_known_of_a_nan_that_came_after_the_measurement(tmp_path: pathlib.Path) -> None:
    """A hook that runs after those of disthooks makes it."""
    model, file = Tiny(), tmp_path / "a.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[dh.sinks.Jsonl(file)], every=1):
        model.norm.bias.register_hook(lambda grad: grad * torch.nan)
        step(model, tokens(seed=0))
        optimizer.step()
    known = "finite on every rank when its gradient was measured; it became non-finite later in backward or in the"
    told = run("report", file).stdout
    assert f"Step 0: gradients were not finite, of 1 parameter: norm.bias ({known} reduction); the step was" in told


def test_report_names_clipping_skipping_saving_and_replicas(tmp_path: pathlib.Path) -> None:
    base = {"clip_ratio": 0.25, "skipped_total": 2.0, "skipped": 0.0, "grad_norm/argmax_rank": 0}
    base |= {
        "saved/moved_per_step": 3 << 20,
        "saved/pack_seconds_per_step": 0.003,
        "saved/unpack_seconds_per_step": 0.0,
    }
    base |= {"replicas/compared": 7, "replicas/differ": 1, "replicas/steps": 40, "replicas/at": ["a differs on rank 1"]}
    found = reported(tmp_path, [{"step": 10 * i, "time": i, **base} for i in range(5)])
    (culprit,) = found["culprits"]
    assert (culprit["kind"], culprit["step"]) == ("replicas", 39)
    assert culprit["evidence"] == [
        "The ranks no longer have the same model, found after 40 steps: 1 of 7 tensors differ; a differs on rank 1."
    ]
    assert found["said"] == [
        "Steps 0 to 39: a tensor differs from the copies on other ranks.",
        "Gradients were clipped in 5 of 5 logged steps, by a median factor of 0.25.",
        "2 steps were skipped.",
        "Saving moved 3.0 MiB of saved tensors a step out of the memory they were in, on the first rank; forward and "
        "backward waited 3 ms a step for it, 3.0% of the 100 ms from step to step.",
    ]


@pytest.mark.parametrize(("step", "when"), [(20, "Steps 16 to 20"), (16, "Step 16")])
def test_report_says_between_which_comparisons_copies_began_to_differ(
    step: int, when: str, tmp_path: pathlib.Path
) -> None:
    differs = {"replicas/differ": 1, "replicas/compared": 7, "replicas/names": ["a.weight"], "replicas/ranks": [1]}
    records = [{"step": 5 * i, "replicas/differ": 0, "replicas/compared": 7} for i in range(4)]
    (culprit,) = reported(tmp_path, [*records, {"step": step, **differs}])["culprits"]
    assert culprit["text"] == f"{when} on rank 1: a.weight differs from the copies on other ranks."
    assert culprit["step"] == step


@pytest.mark.parametrize("rules", [[], ["SkipNonFinite(max_consecutive=None)"]])
def test_report_names_a_rule_only_if_the_run_has_it_not(rules: list[str], tmp_path: pathlib.Path) -> None:
    bad = {"step": 3, "grad_norm": math.nan, "nonfinite": 4, "nonfinite_at": [{"param": "a", "count": 4, "rank": 0}]}
    records: list[dict[str, Any]] = [{"step": i, "grad_norm": 1.0, "nonfinite": 0} for i in range(3)]
    records[0]["about"] = {"rules": rules, "ranks": 1}
    (culprit,) = reported(tmp_path, [*records, bad])["culprits"]
    assert ("SkipNonFinite leaves such steps out" in culprit["advice"]) == (not rules)


def test_a_prediction_beside_the_log_may_hold_anything(tmp_path: pathlib.Path) -> None:
    (tmp_path / "explain.json").write_text('{"plan": {"modules": [{"moved": %s}, 3, {"moved": "x"}]}}' % ("9" * 400))
    reported(tmp_path, [{"step": at, "saved/moved_per_step": 5.0, "saved/moved": 5.0 * at} for at in range(3)])
    run("report", tmp_path, "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file()


def test_report_says_what_was_not_looked_at(tmp_path: pathlib.Path) -> None:
    records: list[dict[str, Any]] = [{"step": 10 * i, "grad_norm": 1.0} for i in range(6)]
    records[0]["about"] = {"every": 10, "ranks": 2}
    few = "6 logged steps are too few to know which numbers are unusual: that takes more than 12."
    between = (
        "Every 10th step is logged: of the steps between them only what lasts is seen, steps that are not finite, and "
        "the largest gradient norm."
    )
    assert reported(tmp_path, records)["unseen"] == [
        "The log does not tell gradients that are not finite in unlogged steps (SkipNonFinite, NonFinite); which rank "
        "leads (Spread); whether the ranks still have the same model (check_replicas); which rank is slow (Times); "
        "which layer moved first (stats.full()).",
        few,
        between,
    ]
    for record in records:
        record |= {"nonfinite": 0, "grad_norm/argmax_rank": 0, "input_seconds/max_rank": 1.0, "update_ratio": 1.0}
        record |= {"replicas/differ": 0, "replicas/compared": 4, "replicas/steps": 32}
    last = "The copies of the ranks were compared last after step 31."
    assert reported(tmp_path, records)["unseen"] == [few, between, last]
    records[-1]["replicas/steps"] = 51
    assert reported(tmp_path, records)["unseen"] == [few, between]
    all_steps = [{**record, "step": at, "about": {"ranks": 1}} for at, record in enumerate(3 * records)]
    assert reported(tmp_path, all_steps)["unseen"] == []


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", 0, "no step is logged there yet"),
        ("import torch\n\nx = 1\n", 1, "none of its 2 lines is a record of a run"),
        ('{"step": 0, "gr', 0, "the last line is not whole"),
        ('nonsense\n[1]\n{"step": 2, "grad_norm": 1.5}\n', 0, "\n2 lines are no records and were left out\n"),
        (
            '{"step": 2, "about": {"ranks": "2"}}\n{"step": 2}',
            0,
            "line 1 is no record: about.ranks is no whole number\n1 ",
        ),
        ('{"step": 4, "loss": 1}\n{"step": 1, "loss": 2}', 0, "steps come again"),
        (None, 1, "has no .jsonl file"),
    ],
)
def test_report_of_what_is_not_whole(text: str | None, code: int, says: str, tmp_path: pathlib.Path) -> None:
    if text is not None:
        (tmp_path / "gradients.jsonl").write_text(text)
    result = run("report", tmp_path, code=code)
    assert says in (result.stderr if code else result.stdout)


# -- watch


def test_watch_shows_one_frame(tmp_path: pathlib.Path) -> None:
    file = log(tmp_path / "gradients.jsonl", steps=100, layers=60)
    told = run("watch", tmp_path, "--once").stdout
    lines = told.splitlines()
    assert lines[0].startswith("step 99  DDP, 2 ranks, 1 s a step, logged ")
    assert lines[1].startswith("Step 75 on rank 1: the output of blocks.7.c jumped to ")
    assert [line.split()[0] for line in lines if line.startswith("            loss")] == ["loss"]
    assert sum("blocks." in line for line in lines[3:]) == 8, "two of the 15 blocks are in a row"
    assert "largest norm rank 0 in 50% of steps" in told
    assert len(lines) <= 24
    file.write_text("")
    assert "no step is logged there yet" in run("watch", file, "--once").stdout
    assert "--every" in run("watch", file, "--every", "0", code=1).stderr


def test_watch_goes_on_until_ctrl_c(tmp_path: pathlib.Path) -> None:
    """In a terminal: the frame follows the log."""
    whole = log(tmp_path / "whole.jsonl", steps=30, layers=4).read_text().splitlines(keepends=True)
    file = tmp_path / "growing.jsonl"
    file.write_text("".join(whole[:20]))
    own, other = pty.openpty()
    command = [sys.executable, "-m", "disthooks", "watch", str(file), "--every", "0.1"]

    def heed_ctrl_c() -> None:  # also if this process was started in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    streams = {"stdin": other, "stdout": other, "stderr": other}
    with subprocess.Popen(command, **streams, cwd=tmp_path, env=ENV, preexec_fn=heed_ctrl_c) as process:
        os.close(other)
        seen = b""

        def wait_for(text: bytes) -> None:
            nonlocal seen
            end = time.monotonic() + 60
            while text not in seen:
                assert time.monotonic() < end, seen
                seen += os.read(own, 1 << 16)

        wait_for(b"step 19")
        with file.open("a") as log_file:
            log_file.writelines(whole[20:])
        wait_for(b"step 29")
        process.send_signal(signal.SIGINT)
        reader = threading.Thread(target=lambda: iter_until_closed(own), daemon=True)
        reader.start()
        assert process.wait(60) == 130
    assert b"Traceback" not in seen


def iter_until_closed(descriptor: int) -> None:
    """Read what a process still writes, so that it does not wait."""
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1 << 16):
            pass


# -- env

KEYS = {
    "": "config cpu directories environment link memory problems system torch versions",
    "config": "error missing origin passed_over source",
    "cpu": "there usable",
    "memory": "available_bytes limit_bytes memlock_bytes total_bytes",
    "torch": "backends cuda devices driver hip threads version",
    "directories": "direct error file_system free_bytes in_memory path read_bytes_per_s roles write_bytes_per_s",
}


def test_env_is_a_document(tmp_path: pathlib.Path) -> None:
    """In a process: what is printed besides, and what is left behind, would be found."""
    hooks(tmp_path, WHOLE).rename(tmp_path / "disthooks.yaml")
    other = hooks(tmp_path, "save: [{modules: x, store: {kind: OnDisk, directory: {folder}}}]")
    before = sorted(tmp_path.rglob("*"))
    told = {"DISTHOOKS_CONFIG": str(other), "TMPDIR": str(tmp_path)}
    done = process("env", "--json", cwd=tmp_path, env={**ENV, **told})
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert sorted(facts) == KEYS[""].split()
    for name in ("config", "cpu", "memory", "torch"):
        assert sorted(facts[name]) == KEYS[name].split(), name
    (there,) = facts["directories"]
    assert sorted(there) == KEYS["directories"].split()
    assert there["roles"] == ["temporary", "save.0"]
    assert there["write_bytes_per_s"] > 1e6 < there["read_bytes_per_s"]
    assert facts["config"]["source"] == str(other)
    assert "DISTHOOKS_CONFIG" in facts["config"]["origin"]
    assert any("disthooks.yaml" in text for text in facts["config"]["passed_over"])
    assert facts["versions"]["torch"]
    assert facts["versions"]["disthooks"] == dh.__version__
    assert all(set(problem) == {"what", "why", "do"} for problem in facts["problems"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_command, "MOST", env_command._LEAST)


@pytest.mark.usefixtures("quick")
def test_env_for_people(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTHOOKS_CONFIG", "gone.yaml")
    told = run("env").stdout
    assert "\x1b" not in told
    assert max(map(len, told.splitlines())) <= 100
    assert dh.__version__ in told
    assert "would not work" in told[told.index("environment") :]  # problems come last
    assert "gone.yaml" in told


@pytest.mark.usefixtures("quick")
def test_env_of_several_processes_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run("env").stdout == ""
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("RANK", "0")  # a launcher's own number counts
    assert run("env", "--json").stdout.startswith("{")
    for variable in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PMI_RANK", "1")
    assert run("env").stdout == ""


@pytest.mark.dist
def test_env_under_torchrun() -> None:
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "disthooks"]
    done = subprocess.run([*call, "env", "--json"], capture_output=True, text=True, check=True, timeout=300, env=ENV)
    facts = json.loads(done.stdout)
    assert facts["environment"]["WORLD_SIZE"] == "2"


ALONE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numpy", "yaml", "deepspeed", "accelerate", "transformers", "lightning"}:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["disthooks", "env", "--json"]
from disthooks.run.cli import main
main()
"""


def test_env_needs_nothing_that_is_optional(tmp_path: pathlib.Path) -> None:
    (tmp_path / "disthooks.yaml").write_text("save: []")
    call = [sys.executable, "-W", "ignore", "-c", ALONE]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path, env=ENV)
    assert done.returncode == 0, done.stderr
    found = [problem["why"] + problem["do"] for problem in json.loads(done.stdout)["problems"]]
    assert any("disthooks[config]" in text for text in found)


# -- what would not work

GOOD: dict[str, Any] = {
    "versions": dict.fromkeys(doctor.PACKAGES, "1.0"),
    "torch": {"cuda": None, "driver": None, "devices": [], "backends": ["gloo"]},
    "link": None,
    "directories": [
        {
            "path": "/t",
            "roles": ["temporary"],
            "error": None,
            "in_memory": False,
            "free_bytes": 1 << 40,
            "file_system": "ext4",
        }
    ],
    "config": {"source": "hooks.yaml", "error": None, "missing": []},
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"config": {"error": "hooks.yaml: is not YAML"}}, "is not YAML"),
    ({"config": {"missing": [("WandB", "pip install 'disthooks[wandb]'")]}}, "disthooks[wandb]"),
    ({"versions": {"pydantic": None}}, "pydantic is not installed"),
    ({"directories": {"in_memory": True, "file_system": "tmpfs"}}, "tmpfs is memory"),
    ({"directories": {"free_bytes": 1 << 20}}, "0.00 GB are free"),
    ({"directories": {"file_system": "nfs4"}}, "a network's (nfs4)"),
    ({"directories": {"error": "/t: Permission denied"}}, "Permission denied"),
    ({"link": {"error": "pinned: out of memory"}}, "out of memory"),
    ({"torch": {"cuda": "13.0"}}, "sees no GPU"),
    ({"torch": {"driver": "580.95"}}, "built without CUDA"),
    ({"torch": {"backends": []}}, "no gloo"),
    ({"torch": {"cuda": "13.0", "devices": [{"index": 0}, {"index": 1}]}}, "no nccl"),
]


def _facts(changed: dict[str, Any]) -> dict[str, Any]:
    facts = copy.deepcopy(GOOD)
    for key, value in changed.items():
        if key == "directories":
            facts[key][0].update(value)
        elif isinstance(facts[key], dict):
            facts[key].update(value)
        else:
            facts[key] = value
    return facts


def test_where_all_is_well_nothing_is_told() -> None:
    assert problems(GOOD) == []
    assert problems(_facts({"torch": {"cuda": "13.0", "devices": [{"index": 0}]}})) == []


@pytest.mark.parametrize(("changed", "says"), BAD, ids=[says for _, says in BAD])
def test_what_would_not_work(changed: dict[str, Any], says: str) -> None:
    (found,) = problems(_facts(changed))
    assert says in f"{found.what} {found.why} {found.do}"
    assert found.do


@pytest.mark.usefixtures("quick")
def test_a_directory_that_is_memory_or_is_not_there(tmp_path: pathlib.Path) -> None:
    there = env_command.directory_facts(str(tmp_path), ["temporary"])
    assert there["error"] is None
    assert there["read_bytes_per_s"] > 0
    assert "No such file" in env_command.directory_facts(str(tmp_path / "no"), [])["error"]
    if doctor.file_system("/dev/shm") == "tmpfs":
        assert env_command.directory_facts("/dev/shm", [])["in_memory"]


def test_docs_have_every_key() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for keys in KEYS.values():
        assert [key for key in keys.split() if f"`{key}`" not in page] == []
    for name in FROZEN:
        assert f"disthooks {name}".strip() in page
    assert inspect.getdoc(env_command)
