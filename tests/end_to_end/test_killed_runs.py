"""A run that is killed leaves a log of which the page is made, and misses at most one logged step."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from disthooks.report.log import read
from disthooks.run.cli.app import app
from tests.support import ROOT

SCRIPT = """
import os, sys, torch
import disthooks as dh

model = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())])
optimizer = torch.optim.AdamW(model.parameters())
watch = dh.gradients(model, optimizer, stats=dh.stats.full(), sinks=[dh.sinks.Jsonl(sys.argv[1])], every=1)
for step in range(100_000):
    loss = model(torch.randn(8, 64)).square().mean()
    watch.note_loss(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    os.write(1, b"%d\\n" % step)
"""


def _killed(file: pathlib.Path, seconds: float) -> int:
    """Start a run, kill it some time after its first step, and return the last step that it made."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        made = (first + process.stdout.read()).split(b"\n")
    return int(made[-2])


@pytest.mark.slow
@pytest.mark.full_tier(runs=(20,))
@pytest.mark.parametrize("runs", [3, 20])
def test_a_run_that_is_killed_misses_at_most_one_step(runs: int, tmp_path: pathlib.Path) -> None:
    chance = random.Random(runs)
    for number in range(runs):
        file = tmp_path / f"{number}.jsonl"
        made = _killed(file, chance.uniform(0.0, 1.0))
        log = read(file)
        (run,) = log.runs or [None]
        assert (run.steps[-1] if run else -1) >= made - 1, number
        assert not log.broken
        page = tmp_path / f"{number}.html"
        result = CliRunner().invoke(app, ["report", str(file), "-o", str(page)])
        assert result.exit_code == 0, result.output
        assert "</html>" in page.read_text()


def test_a_run_that_goes_on_after_it_was_killed_is_one_log(tmp_path: pathlib.Path) -> None:
    """The second life writes into the same file, behind a line that may be half."""
    file = tmp_path / "run.jsonl"
    _killed(file, 0.3)
    with file.open("a") as log:
        log.write('{"step": 9999, "grad_no')
    last = _killed(file, 0.3)
    found = read(file)
    assert len(found.runs) == 2, "two processes without a launcher are two runs"
    assert found.runs[1].steps[-1] >= last - 1
    assert found.runs[1].names["param"], "its first line is not joined to the half one"
    assert len(found.broken) == 1
