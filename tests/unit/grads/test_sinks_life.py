"""A sink is opened once, called with every record, and closed once after the last: whatever ends the run."""

from __future__ import annotations

import contextlib
import pathlib
import pickle
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import sinks
from disthooks.errors import UsageError
from disthooks.grads.attachment import Gradients
from tests.support.logs import Said


def _attach(*targets: Any) -> tuple[Gradients, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=targets, every=1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return watch, step


@pytest.mark.parametrize("raises", [False, True])
def test_closed_once_after_the_last_record_also_when_the_block_raises(raises: bool) -> None:
    sink = Said()
    watch, step = _attach(sink)
    with contextlib.suppress(KeyboardInterrupt), watch:
        step()
        step()
        if raises:
            raise KeyboardInterrupt
    watch.remove()
    assert sink.said == ["open", 0, 1, "close"]


def test_one_that_is_given_twice_is_closed_once() -> None:
    sink = Said()
    watch, _ = _attach(sink, sink)
    watch.remove()
    assert sink.said == ["open", "open", "close"]


def test_one_that_fails_is_left_out_and_closed_and_the_others_go_on() -> None:
    good, bad = Said(), Said(fails="call")
    watch, step = _attach(bad, good)
    step()
    with pytest.warns(RuntimeWarning, match=r"Said .* failed and is left out .*'call: disk full'"):
        step()
    watch.remove()
    assert good.said == ["open", 0, 1, "close"]
    assert bad.said == ["open", 0, "close"]


def test_one_that_cannot_be_closed_is_a_warning() -> None:
    bad, good = Said(fails="close"), Said()
    watch, _ = _attach(good, bad)
    with pytest.warns(RuntimeWarning, match=r"could not be closed: OSError\('close: disk full'\)"):
        watch.remove()
    watch.remove()
    assert bad.said == good.said == ["open", "close"]


def test_those_before_one_that_cannot_be_opened_are_closed() -> None:
    good, late = Said(), Said()
    with pytest.raises(OSError, match="open: disk full"):
        _attach(good, Said(fails="open"), late)
    assert good.said == ["open", "close"]
    assert late.said == []


# --- the end of the process

END = """
import torch, disthooks as dh

class Sink:
    def __init__(self):
        self.file = open({path!r}, "w")  # with a buffer, and nobody else closes it in time
    def __call__(self, record):
        self.file.write(f"{{record['step']}} ")
    def close(self):
        self.file.write("closed ")
        self.file.close()

def main():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[Sink()], every=1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    {end}

main()
"""


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "raise KeyError", "watch.remove()", "watch.flush()"])
def test_the_last_record_and_then_the_end(end: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    script = END.format(path=str(path), end=end)
    done = subprocess.run([sys.executable, "-c", script], timeout=300, check=False, capture_output=True, text=True)
    assert path.read_text() == "0 1 2 closed ", done.stderr
    assert "Exception ignored" not in done.stderr


# --- what is refused


NO_MONITOR = types.SimpleNamespace(monitor=types.SimpleNamespace(enabled=False, write_events=print))
NO_TRACKERS = types.SimpleNamespace(log=print, trackers=[], is_main_process=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sinks.TensorBoard(None), "log_dir is the directory of the run, got None"),
        (lambda: sinks.TensorBoard("run", prefix=None), "TensorBoard: prefix is put in front of every name"),
        (lambda: sinks.WandB("my-project"), r"run is what wandb\.init\(\) returned, .* got 'my-project'"),
        (lambda: sinks.WandB(prefix=1), "WandB: prefix"),
        (lambda: sinks.MLflow(prefix=1), "MLflow: prefix"),
        (lambda: sinks.AccelerateTracker(nn.Linear(1, 1)), "give the Accelerator, got Linear"),
        (lambda: sinks.DeepSpeedMonitor(nn.Linear(1, 1)), "give DeepSpeed's engine, got Linear"),
        (lambda: sinks.DeepSpeedMonitor(NO_MONITOR).open(), "no monitor is on.*'csv_monitor'"),
        (lambda: sinks.AccelerateTracker(NO_TRACKERS).open(), r"no trackers.*init_trackers\(name\)"),
        (lambda: sinks.TensorBoard("run")({"step": 0}), r"TensorBoard\('?.*run.* is not open: give it to gradients"),
    ],
)
def test_what_can_never_work(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.parametrize("sink", [sinks.TensorBoard("run"), sinks.WandB(), sinks.MLflow(prefix="train/")], ids=repr)
def test_a_sink_is_frozen_and_can_be_pickled(sink: Any) -> None:
    assert pickle.loads(pickle.dumps(sink)) == sink
    with pytest.raises(AttributeError):
        sink.prefix = ""
