"""What is logged besides gradients."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.grads.sinks import local
from disthooks.saved.pipeline import pipeline


def _model() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(128, 64)


def test_what_became_of_saved_tensors_stands_in_the_log_of_the_run(tmp_path: pathlib.Path) -> None:
    model, optimizer, x = _model()
    numbers = iter(range(10))
    file = tmp_path / "run.jsonl"
    with (
        dh.save_activations(model, "", pipeline(dh.OnDisk(tmp_path), at_least=0)) as saving,
        dh.gradients(
            model,
            optimizer,
            stats=[dh.stats.Norm()],
            sinks=[dh.sinks.Jsonl(file)],
            every=1,
            also=[saving, lambda: {"number": next(numbers)}],
        ) as watch,
    ):
        totals = []
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            totals.append(saving.report().stored)
            assert saving.report().held == 0
        watch.flush()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2]
    versions = lines[0]["about"].pop("versions")
    assert versions["torch"] == torch.__version__
    assert lines[0]["about"] == {
        "engine": "a plain module",
        "ranks": 1,
        "parameters": 4,
        "every": 1,
        "rules": [],
        "stats": ["Norm(per_parameter=False, norm_type=2.0)"],
        "schema": 2,
    }
    assert not any("about" in line for line in lines[1:])
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["saved/stored"] for line in lines] == totals, "each record has the totals of its own step"
    assert lines[0]["saved/moved_per_step"] == lines[0]["saved/moved"] > 0
    for before, line in itertools.pairwise(lines):
        grown = line["saved/moved"] - before["saved/moved"]
        assert line["saved/moved_per_step"] == grown > 0
    place = f"saved/OnDisk({str(tmp_path)!r})"
    assert f"{place}/written" in lines[-1]
    assert [(line[f"{place}/held"], line[f"{place}/peak_held"]) for line in lines] == [(0, totals[0])] * 3
    assert watch.latest["saved/stored"] == totals[-1]


def test_what_has_nothing_to_log_is_refused() -> None:
    model, optimizer, _ = _model()
    with pytest.raises(
        UsageError, match=r"also='loss': give an object whose report\(\) has a record\(\), or a function"
    ):
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], also=["loss"])
    with dh.gradients(model, optimizer, stats=[dh.stats.Norm()]) as watch, pytest.raises(UsageError, match="record"):
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], also=[watch])  # its report has no record()


def test_what_fails_is_left_out_and_no_rank_waits_for_it() -> None:
    model, optimizer, x = _model()

    def fails() -> dict[str, float]:
        calls.append(1)
        raise OSError("gone")

    calls: list[int] = []
    also = [fails, lambda: {"grad_norm": -1.0}, lambda: {"lr": 0.1}]

    def train() -> dict[str, Any]:
        with dh.gradients(model, optimizer, stats=[dh.stats.Norm()], every=1, also=also) as watch:
            for _ in range(3):
                model(x).sum().backward()
                optimizer.step()
        return watch.latest

    with pytest.warns(RuntimeWarning, match="left out") as said:
        latest = train()
    assert len(calls) == 1
    assert len(said) == 2
    assert "grad_norm" in str(said[1].message)
    assert latest["grad_norm"] > 0
    assert latest["lr"] == 0.1


def test_numbers_of_all_parameters_are_columns_and_their_names_are_written_once(tmp_path: pathlib.Path) -> None:
    model, optimizer, x = _model()
    file, records = tmp_path / "run.jsonl", []
    watched = [dh.stats.Norm(per_parameter=True), dh.stats.Histogram(per_parameter=True), dh.stats.Activations()]
    sinks = [dh.sinks.Jsonl(file), records.append]
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=watched, sinks=sinks, every=2):
        for step in range(5):
            optimizer.zero_grad()
            (model(x).sum() * (float("nan") if step == 4 else 1.0)).backward()
            optimizer.step()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert [[name for name in ("about", "names", "edges") if name in line] for line in lines] == [
        ["about", "names", "edges"],
        [],
        [],
    ]
    names, edges = lines[0]["names"], lines[0]["edges"]
    assert names["param"] == [name for name, _ in model.named_parameters()]
    for line, record in zip(lines, records, strict=True):
        for of in ("param", "module"):
            for name, column in line[of].items():
                for which, value in zip(names[of], column, strict=True):
                    truth = record[f"{name}/{of}/{which}"]
                    if isinstance(truth, dict):
                        counts = dict(zip(truth["edges"], truth["counts"], strict=False))
                        assert [edges[place] for place in value["bins"]] == [e for e, count in counts.items() if count]
                        assert sum(value["counts"]) == sum(truth["counts"])
                    elif truth is None:
                        assert value is None
                    else:
                        assert float(value) == pytest.approx(truth, rel=1e-6, nan_ok=True)
    assert lines[2]["param"]["grad_norm"][0] == "nan"
    assert "/" not in "".join(lines[0]["param"])


# --- lines of Jsonl and of the console


def test_jsonl_is_strict_and_appends(tmp_path: pathlib.Path) -> None:
    sink = dh.sinks.Jsonl(tmp_path / "deep" / "er" / "log.jsonl")
    before = time.time()
    opened = sink.open()
    opened({"step": 0, "a": math.nan, "b": [{"c": -math.inf}]})
    opened({"step": 1, "a": 1.5})
    lines = pathlib.Path(sink.path).read_text().splitlines()
    assert lines[0].startswith('{"step": 0, "a": "nan", "b": [{"c": "-inf"}], "run": ')
    record = json.loads(lines[1])
    assert before - 1e-3 <= record.pop("time") <= time.time() + 1e-3  # rounded to milliseconds
    assert record == {"step": 1, "a": 1.5, "run": local.run(), "restart": 0}


def test_lines_tell_runs_apart(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attachments that write at the same time are one run; one that comes when all of them are gone is the next."""
    sink = dh.sinks.Jsonl(tmp_path / "log.jsonl")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    first, beside = sink.open(), sink.open()
    first({"step": 0})
    first.close()
    beside({"step": 0, "optimizer": 1})
    beside.close()
    second = sink.open()
    second({"step": 0})
    second.close()
    monkeypatch.setenv("DISTHOOKS_RUN", "mine")
    elsewhere = dh.sinks.Jsonl(tmp_path / "other.jsonl").open()
    elsewhere({"step": 0})
    elsewhere.close()
    records = [json.loads(line) for name in ("log", "other") for line in (tmp_path / f"{name}.jsonl").open()]
    name = records[0]["run"]
    assert [record["run"] for record in records] == [name, name, f"{name}.1", "mine"]
    assert {record["restart"] for record in records} == {2}


@pytest.mark.second_tier
def test_a_restart_of_the_launcher_is_the_same_run() -> None:
    """Workers of one launcher, here this process, have one name; another process without a launcher its own."""
    script = "from disthooks.grads.sinks import local; print(local.run(), local.restart())"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC_", "DISTHOOKS_RUN"))}
    env = kept | {"PYTHONPATH": str(pathlib.Path(dh.__file__).parents[1])}
    said = []
    for more in ({}, {}, {"TORCHELASTIC_RESTART_COUNT": "0"}, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        under = {"TORCHELASTIC_RUN_ID": "none"} if more else {}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=env | more | under, capture_output=True, text=True, check=True)
        said.append(done.stdout.split())
    assert len({name for name, _ in said}) == 3
    assert said[2][0] == said[3][0]
    assert [restart for _, restart in said] == ["0", "0", "0", "1"]


def test_jsonl_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    model, optimizer, _ = _model()
    with pytest.raises(UsageError, match="cannot be written"):
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[dh.sinks.Jsonl(tmp_path)])
    assert not optimizer._optimizer_step_pre_hooks


def test_console_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    at = [{"param": f"p{i}", "count": 1, "rank": None if i else 3} for i in range(6)]
    dh.sinks.Console()({"step": 7, "grad_norm": 123.456789, "nonfinite": 6, "nonfinite_at": at})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith(
        "step 7  grad_norm 123.5  nonfinite 6  nonfinite_at p0 on rank 3, p1 (finite on every rank when measured)"
    )
    assert out.endswith("and 2 more\n")
