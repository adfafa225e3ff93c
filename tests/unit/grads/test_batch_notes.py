"""What the loop notes of its batches: kept, written for steps that stand out, and read by the report."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.grads.batch_notes import BatchNotes, notes_file, stands_out
from disthooks.report.log import read
from disthooks.report.sentences import verdict
from disthooks.report.timeline import timeline
from tests.support.ranks.harness import Ranks


def train(log: pathlib.Path, rank: int = 0, bad: tuple[int, ...] = (2,), steps: int = 5, model: Any = None) -> None:
    """Two micro-batches a step; those of ``bad`` steps have a NaN on the last rank."""
    model = nn.Linear(4, 2) if model is None else model
    optimizer, is_last = torch.optim.SGD(model.parameters(), lr=0.1), rank == 1 or not hasattr(model, "module")
    sinks = [dh.sinks.Jsonl(log)]
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=[dh.stats.Norm()], sinks=sinks) as watch:
        for step in range(steps):
            for micro in range(2):
                watch.note_data({"rows": [10 * step + micro, rank]})
                x = torch.full((3, 4), math.nan if step in bad and is_last else 1.0)
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def said(log: pathlib.Path) -> list[str]:
    run = read(log).runs[-1]
    return [text for text in verdict(run, timeline(run)) if "batch of step" in text]


def test_only_a_step_that_stands_out_is_written(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "deep" / "a[1].jsonl"
    train(log, bad=(2,))
    (line,) = notes_file(log, 0).read_text().splitlines()
    assert {key: json.loads(line)[key] for key in ("step", "data")} == {
        "step": 2,
        "data": [{"rows": [20, 0]}, {"rows": [21, 0]}],
    }
    assert said(log) == ['The batch of step 2 on rank 0: {"rows": [20, 0]}, {"rows": [21, 0]}.']


def test_without_a_bad_step_there_is_no_file(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "log.jsonl", bad=())
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    assert said(tmp_path / "log.jsonl") == []


def test_a_half_line_and_notes_of_another_run_are_left_out(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log.jsonl"
    train(log)
    with notes_file(log, 0).open("a") as file:
        file.write('{"step": 3, "time": 1.0, "data": ["old"]}\n{"step": 4, "ti')
    assert len(said(log)) == 1


def test_what_no_rank_wrote_is_left_out(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log.jsonl"
    train(log)
    notes_file(log, 1).mkdir()
    notes_file(log, "x").write_text('{"step": 2, "time": 1.0, "data": []}\n')
    notes_file(log, 2).write_bytes(b"\xff\xfe\n")
    assert len(said(log)) == 1


def test_a_norm_that_is_not_finite_stands_out() -> None:
    assert [stands_out({"step": 1, "grad_norm": norm}) for norm in (math.nan, math.inf, 0.5, None)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_loop_that_makes_no_step_keeps_the_newest_notes(tmp_path: pathlib.Path) -> None:
    notes = BatchNotes([dh.sinks.Jsonl(tmp_path / "log.jsonl")], 0)
    for row in range(10_000):
        notes.note(row)
    notes.take(1)
    notes.write({"step": 1, "skipped": 1.0})
    (line,) = notes_file(tmp_path / "log.jsonl", 0).read_text().splitlines()
    assert json.loads(line)["data"] == list(range(10_000 - 4096, 10_000))


def test_what_cannot_be_noted_is_an_error(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()])
    with watch, pytest.raises(UsageError, match=r"give the sink dh\.sinks\.Jsonl"):
        watch.note_data(1)
    sinks = [dh.sinks.Jsonl(tmp_path / "log.jsonl")]
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=[dh.stats.Norm()], sinks=sinks) as watch:
        for value, why in (
            (torch.ones(1), "cannot hold Tensor"),
            (math.nan, "cannot hold float"),
            ("x" * 5000, "5002 by"),
        ):
            with pytest.raises(UsageError, match=why):
                watch.note_data(value)


def test_a_file_that_cannot_be_written_does_not_end_training(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log.jsonl"
    notes_file(log, 0).mkdir()
    with pytest.warns(UserWarning, match="cannot be written: Is a directory; training goes on"):
        train(log)


def _on_ranks(rank: int, log: str) -> None:
    train(pathlib.Path(log), rank, model=nn.parallel.DistributedDataParallel(nn.Linear(4, 2)))


@pytest.mark.dist
def test_each_rank_writes_its_own_and_the_report_shows_that_of_the_blamed_one(
    ranks: Ranks, tmp_path: pathlib.Path
) -> None:
    log = tmp_path / "log.jsonl"
    ranks(_on_ranks, str(log))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log.jsonl",
        "log.jsonl.rank-0.data",
        "log.jsonl.rank-1.data",
    ]
    assert said(log) == ['The batch of step 2 on rank 1: {"rows": [20, 1]}, {"rows": [21, 1]}.']
