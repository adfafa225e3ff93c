"""``disthooks explain``: what it counts, prints and refuses."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from disthooks.predict.answers import advice
from tests.support.command_line import BUILT, hooks, process, run


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


@pytest.mark.second_tier
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


def test_ctrl_c_shows_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(advice, "advise", interrupted)
    told = run("explain", f"{BUILT}:small", "--device", "cpu", "--fits", "512 B", code=130).stdout
    assert told.startswith("the step does not fit in 512 B")
    assert "memory over the step" in told


def test_the_cheapest_change_that_fits_is_the_last_answer() -> None:
    told = run("explain", f"{BUILT}:whole", "--device", "cpu", "--fits", "1500 KiB").stdout.splitlines()
    answers = [
        line.partition(":")[0] for line in told if line.startswith(("the step", "advice", "the la", "the lo", "che"))
    ]
    assert [answer.split()[0] for answer in answers] == ["the", "advice", "advice", "advice", "the", "the", "cheapest"]
    assert answers[0] == "the step does not fit in 1.5 MiB"
