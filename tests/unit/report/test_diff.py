"""What ``disthooks diff`` says of two logs: which runs it pairs, what it leaves out, and how it ends."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner

from disthooks.run.cli.app import app


def prints(file: pathlib.Path, runs: Sequence[Sequence[int]], names: Sequence[str], steps: int = 2) -> pathlib.Path:
    """A log in which each run has the fingerprints ``runs[i]`` of the parameters ``names``, in each step the same."""
    lines = []
    for number, numbers in enumerate(runs):
        column = [f"{each:016x}" for each in numbers]
        head = {"about": {"engine": "DDP", "ranks": 2}, "names": {"param": list(names), "module": []}}
        for step in range(steps):
            line = {"step": step, "run": f"r{number}", **head, "param": {"fingerprint/grad": column}}
            lines.append(json.dumps(line) + "\n")
    file.write_text("".join(lines))
    return file


def diff(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["diff", *map(str, words)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_runs_with_nothing_in_common_are_not_the_same(tmp_path: pathlib.Path) -> None:
    one = prints(tmp_path / "one", [[1, 2]], ["a", "b"])
    other = prints(tmp_path / "other", [[1, 2]], ["model.a", "model.b"])
    for words in ([], ["--exit-code"], ["--json"]):
        result = diff(one, other, *words, code=2)
        assert result.stdout == ""
        assert result.stderr == (
            "disthooks: error: the runs have nothing in common that can be compared: "
            "fingerprints only in the first: 4, fingerprints only in the second: 4\n"
        )
    (tmp_path / "empty").write_text("")
    assert "no step is logged there yet" in diff(one, tmp_path / "empty", code=2).stderr


def test_every_run_of_a_log_is_compared_with_that_of_the_other(tmp_path: pathlib.Path) -> None:
    """The last runs are the same, and the first ones are not."""
    one, other = (prints(tmp_path / f"{i}", [[i], [7], [8]][: 3 - i], ["a"]) for i in range(2))
    result = diff(one, other, "--exit-code", code=1)
    assert result.stdout.splitlines() == [
        "Run 1 of both logs:",
        "Step 0: the final gradient of a differs, and all that comes before it is the same.",
        "In this step differ: 1 gradients.",
        "Run 2 of both logs:",
        "The runs are the same bit for bit: 2 fingerprints of 2 steps, 0 to 1, are the same.",
        "Not compared: runs only in the first: 1. The runs of the two logs are paired by their order.",
    ]
    found = json.loads(diff(one, other, "--json").stdout)
    assert (found["same"], found["whole"], found["compared"], found["first"]["where"]) == (False, False, 3, "a")
    assert [(run["pair"], run["compared"], run["first"] is None) for run in found["runs"]] == [
        (1, 1, False),
        (2, 2, True),
    ]


def test_the_exit_code_is_0_only_if_everything_was_compared(tmp_path: pathlib.Path) -> None:
    whole = prints(tmp_path / "whole", [[1, 2]], ["a", "b"], steps=3)
    for part, says in (
        (prints(tmp_path / "steps", [[1, 2]], ["a", "b"], steps=2), "steps only in the first: 1"),
        (prints(tmp_path / "names", [[1, 2, 3]], ["a", "b", "c"], steps=3), "fingerprints only in the second: 3"),
    ):
        result = diff(whole, part, "--exit-code", code=1)
        assert result.stdout.startswith("What was compared is the same bit for bit: ")
        assert f"Not compared: {says}. " in result.stdout
        assert json.loads(diff(whole, part, "--json").stdout)["same"]
    assert "Not compared" not in diff(whole, whole, "--exit-code").stdout


def test_what_the_log_of_one_run_tells_stands_behind_the_difference(tmp_path: pathlib.Path) -> None:
    """The second run's loss becomes NaN in the step of the difference; what comes after it says nothing of it."""
    one, other = (prints(tmp_path / f"{i}", [[7]], ["a"], steps=6) for i in range(2))
    lines = [json.loads(line) | {"loss": 1.0} for line in other.read_text().splitlines()]
    for step in (3, 5):
        lines[step] |= {"loss": "nan", "param": {"fingerprint/grad": ["0" * 16]}}
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diff(one, other).stdout.splitlines() == [
        "Step 3: the final gradient of a differs, and all that comes before it is the same.",
        "3 compared steps before it are the same, 0 to 2.",
        "In this step differ: 1 gradients.",
        "By its own log, the second run: Step 3: the loss became NaN.",
    ]
    (pair,) = json.loads(diff(one, other, "--json").stdout)["runs"]
    assert [[(each["kind"], each["step"]) for each in culprits] for culprits in pair["culprits"]] == [[], [("loss", 3)]]
