"""``make demo`` as a user runs it, made small: its table, its logs, and the promise that saving changes nothing."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.support import ROOT

ENGINES = ("ddp", "fsdp2")


class Run(NamedTuple):
    """What one run printed and left."""

    output: str
    folder: pathlib.Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``launch/local.sh`` with this Python, two processes on the CPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"PYTHON": sys.executable, "PYTHONPATH": path, "NPROC": "2", "LOGS": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(ROOT / "launch" / "local.sh"), *arguments]
    return subprocess.run(
        command, env=os.environ | fixed | environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """``demo(engine, save)``: a tiny run, made once for all tests that look at it."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def run(engine: str, save: str) -> Run:
            place = pathlib.Path(folder, f"{engine}-{save}")
            done = launch("demo/train.py", "--tiny", "--engine", engine, "--save", save, "--run", str(place))
            assert done.returncode == 0, done.stdout + done.stderr
            return Run(done.stdout, place)

        yield run


@pytest.mark.dist
@pytest.mark.full_tier
@pytest.mark.parametrize("engine", ENGINES)
def test_saved_tensors_leave_memory_and_the_losses_keep_their_bits(demo: Any, engine: str) -> None:
    without, saved = demo(engine, "never").rows("steps.jsonl"), demo(engine, "always").rows("steps.jsonl")
    assert len(without) == 8
    assert [step["loss"] for step in without] == [step["loss"] for step in saved]
    assert not any(step["saved"] for step in without)
    assert all(step["saved"] for step in saved)
    summary = demo(engine, "always").summary
    assert summary["with"]["moved_bytes"] > 2**20
    assert summary["with"]["shared_bytes"] > 0  # q, k and v
    assert summary["with"]["kept_bytes"] > 0  # parameters
    assert summary["gradients_changed"] == 0
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["held_out_last"] < summary["held_out_first"]
    rows = demo(engine, "always").rows("gradients.jsonl")
    assert len(rows) == 10, "two steps of warm-up and eight"
    assert all(row["grad_norm_clipped"] <= min(row["grad_norm"], 1.0) * (1 + 1e-5) for row in rows)
    assert all(row["nonfinite"] == 0 and row["grad_max_abs"] > 0 for row in rows)


@pytest.mark.dist
def test_the_tables_say_what_was_asked_for(demo: Any) -> None:
    run = demo("ddp", "alternate")
    for words in ("bits per byte", "moved to", "shared", "kept", "with disthooks", "step time", "clip ratio"):
        assert words in run.output
    assert "the same bits (29 parameters)" in run.output
    for name in ("explain.html", "report.html"):
        assert str(run.folder / name) in run.output
        assert "blocks.1.mlp" in (run.folder / name).read_text()
    assert run.output.count("\nstep ") == 8, "one line for a block of steps, no bar, where there is no terminal"
    assert [step["saved"] for step in run.rows("steps.jsonl")] == [False, True] * 4
    ratios = run.summary["ratios"]
    times, spread = (line for line in run.output.splitlines() if "step time" in line or "middle half" in line)
    assert f"x {statistics.median(ratios):.2f}" in times
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" in spread


@pytest.mark.dist
def test_where_steps_are_slow_a_smaller_model_gives_a_ratio(tmp_path: pathlib.Path) -> None:
    done = launch("demo/train.py", "--batch", "2", "--windows", "16", "--limit", "0.5", "--run", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a smaller model is trained" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["parameters"] < 1e6
    assert len(summary["ratios"]) >= 4


@pytest.mark.dist
@pytest.mark.full_tier
def test_plain_is_one_process_under_any_launcher(tmp_path: pathlib.Path) -> None:
    done = launch("demo/train.py", "--tiny", "--engine", "plain", "--run", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["world"] == 1


@pytest.mark.dist
@pytest.mark.full_tier
def test_a_failing_rank_is_named(tmp_path: pathlib.Path) -> None:
    done = launch("demo/train.py", "--tiny", "--run", str(tmp_path / "file" / "x"), NPROC="1")
    assert done.returncode == 0
    (tmp_path / "taken").write_text("")
    done = launch("demo/train.py", "--tiny", "--run", str(tmp_path / "taken"), NPROC="1")
    assert done.returncode == 1
    assert "FileExistsError" in done.stderr
    assert "rank      : 0" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "'0' is not a whole number above zero"),
        (["--clip", "nan"], "'nan' is not a number above zero"),
        (["--directory", "/nowhere"], "'/nowhere' is not a directory that can be written to"),
        (["--steps", "4"], "at least two blocks"),
    ],
)
def test_wrong_options_end_at_once_and_say_what_is_right(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "demo"))
    import options

    with pytest.raises(SystemExit):
        options.parse(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.full_tier
@pytest.mark.dist
def test_the_same_from_a_file(tmp_path: pathlib.Path) -> None:
    log, hooks = tmp_path / "gradients.jsonl", tmp_path / "hooks.yaml"
    text = (ROOT / "demo" / "hooks.yaml").read_text()
    hooks.write_text(text.replace("/tmp", str(tmp_path)).replace("runs/demo/gradients.jsonl", str(log)))
    done = launch("demo/train.py", "--tiny", "--hooks", str(hooks), "--run", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["with"]["moved_bytes"] > 2**20
    assert summary["gradients"]["logged"] == 10
