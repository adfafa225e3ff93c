"""What each framework has got, read back from what it wrote."""

from __future__ import annotations

import math
import os
import pathlib
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import sinks
from disthooks.errors import UsageError
from tests.support import needs
from tests.support.accelerated import tracker
from tests.support.logs import measured

BAD_AT = [{"param": f"p{i}", "count": 1, "rank": i} for i in range(6)]
RECORDS: list[dict[str, Any]] = [
    {"step": 0, "grad_norm": 0.5, "nonfinite": 0, "nonfinite_at": [], "grad_norm/*.bias": 0.25, "phase": "warm-up"},
    {
        "step": 50,
        "grad_norm": math.inf,
        "nonfinite": 6,
        "nonfinite_at": BAD_AT,
        "grad_norm/*.bias": math.nan,
        "grad_histogram": {"edges": [0.0, 1.0, 2.0, 4.0, math.inf], "counts": [0, 3, 1, 0]},
    },
]


def _train(*targets: Any, steps: int = 3) -> list[float]:
    """The true norms, logged in every step; what is logged is one step late, and the last is flushed."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=targets, every=1):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()))
            optimizer.step()
    return norms


def _written(sink: Any) -> None:
    opened = sink.open() or sink
    for record in RECORDS:
        opened(dict(record))
    getattr(opened, "close", lambda: None)()


# --- TensorBoard

needs_tensorboard = needs("tensorboard")


def _events(folder: pathlib.Path) -> Any:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    ).EventAccumulator(str(folder))
    return accumulator.Reload()


def _scalars(folder: pathlib.Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _events(folder).Scalars(tag)]


@needs_tensorboard
def test_tensorboard_has_the_norms_of_a_run(tmp_path: pathlib.Path) -> None:
    norms = _train(sinks.TensorBoard(tmp_path / "a" / "run", prefix="train/"))
    found = _scalars(tmp_path / "a" / "run", "train/grad_norm")
    assert [step for step, _ in found] == [0, 1, 2]
    assert [value for _, value in found] == pytest.approx(norms, rel=1e-6)


@needs_tensorboard
def test_tensorboard_has_text_and_histograms(tmp_path: pathlib.Path) -> None:
    _written(sinks.TensorBoard(tmp_path))
    events = _events(tmp_path)
    assert [event.value for event in events.Scalars("gradients/grad_norm")] == [0.5, math.inf]
    assert math.isnan(events.Scalars("gradients/grad_norm/*.bias")[1].value)
    assert "gradients/step" not in events.Tags()["scalars"]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val for tag in events.Tags()["tensors"]}
    assert texts == {
        "gradients/phase/text_summary": [b"warm-up"],
        "gradients/nonfinite_at/text_summary": [", ".join(f"p{i} on rank {i}" for i in range(6)).encode()],
    }
    (histogram,) = events.Histograms("gradients/grad_histogram")
    assert histogram.step == 50
    value = histogram.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (1.0, 4.0, 4.0, 7.5, 15.75)
    assert (value.bucket_limit, value.bucket) == ([1.0, 2.0, 4.0, 4.0], [0.0, 3.0, 1.0, 0.0])


@needs_tensorboard
def test_tensorboard_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"TensorBoard: '.*file' cannot be written: File exists"):
        _train(sinks.TensorBoard(tmp_path / "file"))


@needs_tensorboard
def test_two_attachments_share_a_directory(tmp_path: pathlib.Path) -> None:
    sink = sinks.TensorBoard(tmp_path)
    first, second = sink.open(), sink.open()
    first({"step": 0, "a": 1.0})
    first.close()
    second({"step": 1, "a": 2.0})
    second.close()
    assert len(list(tmp_path.glob("events.*"))) == 2


ENDS = """
import sys, torch, disthooks as dh
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[{sink}], every=1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
{end}
"""


def _ends(sink: str, end: str, folder: pathlib.Path, before: str = "") -> subprocess.CompletedProcess[str]:
    script = before + ENDS.format(sink=sink, end=end)
    env = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # not this process's
    return subprocess.run(
        [sys.executable, "-c", script], timeout=300, check=False, capture_output=True, text=True, cwd=folder, env=env
    )


@needs_tensorboard
@pytest.mark.second_tier
@pytest.mark.parametrize("end", ["raise SystemExit(3)", "raise KeyError('batch')", "sys.exit()"])
def test_tensorboard_has_the_last_step_when_the_process_ends(end: str, tmp_path: pathlib.Path) -> None:
    done = _ends("dh.sinks.TensorBoard('run')", end, tmp_path)
    assert [step for step, _ in _scalars(tmp_path / "run", "gradients/grad_norm")] == [0, 1, 2], done.stderr


@needs_tensorboard
@pytest.mark.second_tier
def test_tensorboard_has_what_was_logged_when_the_process_is_killed(tmp_path: pathlib.Path) -> None:
    script = """
import os, disthooks as dh
opened = dh.sinks.TensorBoard("run").open()
opened({"step": 0, **{str(i): 1.0 for i in range(500)}})
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script], timeout=300, check=False, cwd=tmp_path)
    assert _scalars(tmp_path / "run", "gradients/499") == [(0, 1.0)]


# --- Weights & Biases


@pytest.fixture
def offline(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.finish()


def _records(data: bytes) -> Iterator[Any]:
    """What a run's file holds, in blocks as a log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, part = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""


def _rows(folder: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a run's history, values as JSON; a process of wandb's own writes them, until some time after."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(1000):
        records = list(_records(file.read_bytes()))
        if records and records[-1].HasField("exit"):
            break
        time.sleep(0.1)
    rows = [record.history.item for record in records if record.HasField("history")]
    return [{"/".join(item.nested_key): item.value_json for item in row} for row in rows]


def test_wandb_has_the_norms_of_a_run(offline: Any, tmp_path: pathlib.Path) -> None:
    with offline.init(project="p", dir=tmp_path):
        norms = _train(sinks.WandB())
    rows = _rows(tmp_path)
    assert [row["gradients/step"] for row in rows] == ["0", "1", "2"]
    assert [float(row["gradients/grad_norm"]) for row in rows] == pytest.approx(norms)


def test_wandb_loses_nothing_and_moves_no_step_of_yours(offline: Any, tmp_path: pathlib.Path) -> None:
    """Records are one step late, and yours have a step: what is late on that axis would be dropped."""
    with offline.init(project="p", dir=tmp_path) as run:
        late = sinks.WandB(prefix="train/").open()
        for step in range(4):
            run.log({"loss": float(step)}, step=10 * step)
            late({"step": step, "grad_norm": step + 0.5})
            run.log({"lr": 0.1}, step=10 * step)
    rows = _rows(tmp_path)
    assert [(row["loss"], row["lr"], row["_step"]) for row in rows] == [
        (str(step), "0.1", str(10 * step)) for step in range(4)
    ]
    assert [(row["train/step"], row["train/grad_norm"]) for row in rows] == [(str(i), str(i + 0.5)) for i in range(4)]


def test_wandb_has_text_and_histograms(offline: Any, tmp_path: pathlib.Path) -> None:
    run = offline.init(project="p", dir=tmp_path)
    _written(sinks.WandB(run))
    run.finish()
    first, second = _rows(tmp_path)
    assert (first["gradients/phase"], first["gradients/grad_norm/_.bias"]) == ('"warm-up"', "0.25")
    assert "gradients/nonfinite_at" not in first
    assert (second["gradients/grad_norm"], second["gradients/grad_norm/_.bias"]) == ("Infinity", "NaN")
    assert second["gradients/nonfinite_at"] == '"p0 on rank 0, p1 on rank 1, p2 on rank 2, p3 on rank 3 and 2 more"'
    assert second["gradients/grad_histogram/values"] == "[0,3,1,0]"
    assert second["gradients/grad_histogram/bins"] == "[0,1,2,4,4]"


def test_wandb_takes_long_histograms(offline: Any, tmp_path: pathlib.Path) -> None:
    with offline.init(project="p", dir=tmp_path) as run:
        histogram = {"edges": [float(i) for i in range(1002)], "counts": [1] * 1001}
        sinks.WandB(run).open()({"step": 0, "h": histogram})
    (row,) = _rows(tmp_path)
    counts = eval(row["gradients/h/values"])
    assert (len(counts), sum(counts)) == (501, 1001)


def test_wandb_without_a_run(offline: Any) -> None:
    with pytest.raises(UsageError, match=r"WandB: no run is active: call wandb\.init\(\)"):
        _train(sinks.WandB())


def test_wandb_that_is_turned_off(offline: Any, recwarn: Any) -> None:
    with offline.init(mode="disabled"):
        _train(sinks.WandB())
    assert not [w for w in recwarn if "left out" in str(w.message)]


def test_a_run_that_was_finished_is_a_warning(offline: Any, tmp_path: pathlib.Path) -> None:
    run = offline.init(project="p", dir=tmp_path)
    opened = sinks.WandB().open()
    run.finish()
    from disthooks.grads.sinks.base import RecordWriter

    writer = RecordWriter()
    writer.add(opened)
    with pytest.warns(RuntimeWarning, match=r"WandB\(run=None, prefix='gradients/'\) failed and is left out"):
        writer.write(RECORDS[0])
    assert writer.sinks == []


def test_wandb_has_the_last_step_when_the_process_ends(offline: Any, tmp_path: pathlib.Path) -> None:
    done = _ends("dh.sinks.WandB()", "raise KeyError('batch')", tmp_path, before="import wandb; wandb.init()\n")
    assert [row["gradients/step"] for row in _rows(tmp_path)] == ["0", "1", "2"], done.stderr


# --- MLflow


@pytest.fixture
def tracked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    mlflow.set_experiment("gradients")
    return mlflow


def _history(mlflow: Any, run: Any, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)]


def test_mlflow_has_the_norms_of_a_run(tracked: Any) -> None:
    with tracked.start_run() as run:
        norms = _train(sinks.MLflow())
    found = _history(tracked, run, "gradients/grad_norm")
    assert [step for step, _ in found] == [0, 1, 2]
    assert [value for _, value in found] == pytest.approx(norms)


def test_mlflow_has_numbers_that_are_not_finite_and_names_that_it_refuses(tracked: Any) -> None:
    with tracked.start_run() as run:
        _written(sinks.MLflow(prefix=""))
        opened = sinks.MLflow(prefix="").open()
        opened({"step": 2, "saved/OnDisk('/tmp/x')/written": 5, "a" * 300: 1.0, "ok": True})
        opened({"step": 3, **{f"grad_norm/param/{i}": float(i) for i in range(2500)}})
    assert _history(tracked, run, "grad_norm") == [(0, 0.5), (50, math.inf)]
    assert math.isnan(_history(tracked, run, "grad_norm._.bias")[1][1])
    names = set(tracked.MlflowClient().get_run(run.info.run_id).data.metrics)
    assert {"saved.OnDisk__.tmp.x__.written", "ok", "nonfinite", "grad_norm.param.2499"} <= names
    assert not {"phase", "nonfinite_at", "grad_histogram", "step"} & names


def test_mlflow_keeps_to_the_run_it_began_with(tracked: Any) -> None:
    with tracked.start_run() as run:
        opened = sinks.MLflow().open()
    with tracked.start_run() as other:
        opened({"step": 7, "grad_norm": 0.5})
    assert _history(tracked, run, "gradients/grad_norm") == [(7, 0.5)]
    assert tracked.MlflowClient().get_run(other.info.run_id).data.metrics == {}


def test_mlflow_without_a_run(tracked: Any) -> None:
    with pytest.raises(UsageError, match=r"MLflow: no run is active: call mlflow\.start_run\(\)"):
        _train(sinks.MLflow())
    assert tracked.active_run() is None


# --- Accelerate


@pytest.mark.second_tier
def test_accelerate_gives_them_to_its_trackers(tmp_path: pathlib.Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    got: list[tuple[dict[str, Any], int | None]] = []

    accelerator = accelerate.Accelerator(log_with=[tracker(got)], cpu=True)
    sink = sinks.AccelerateTracker(accelerator, prefix="train/")
    with pytest.raises(UsageError, match="has no trackers, so nothing would be logged"):
        _train(sink)
    accelerator.init_trackers("run")
    norms = _train(sink)
    numbers = [(measured(values), step) for values, step in got]
    assert numbers == [({"train/grad_norm": pytest.approx(norm)}, step) for step, norm in enumerate(norms)]
    assert got[0][0]["train/loop/lr"] == 0.1
    got.clear()
    _written(sink)
    names = ["train/grad_norm", "train/grad_norm/_.bias", "train/nonfinite"]
    assert [sorted(values) for values, _ in got] == [names, names]


def test_a_file_finds_the_accelerator_that_disthooks_was_given() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from disthooks.integrations.accelerate import prepare

    config = {"watch": {"every": 1, "stats": [{"kind": "Norm"}], "sinks": [{"kind": "AccelerateTracker"}]}}
    accelerator, model = accelerate.Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(dh.errors.ConfigError, match=r"no Accelerator that disthooks knows .*accelerate\.prepare"):
        dh.prepare(model, optimizer, config)
    with pytest.raises(UsageError, match="has no trackers, so nothing would be logged"):
        prepare(accelerator, model, optimizer, config)
