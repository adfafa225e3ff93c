"""What is found after the last logged step is in the log too, and the steps of a resumed run are those of the run."""

from __future__ import annotations

import gc
import json
import pathlib
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks import stats
from disthooks.grads.attach import gradients
from disthooks.report.log import read
from disthooks.report.timeline import timeline
from tests.support.engines import FIRST, loss_of, make
from tests.support.ranks.harness import Ranks


def _log(
    rank: int, engine: str, folder: str, steps: range, every: int, compares: int, spoiled: int
) -> list[dict[str, Any]]:
    """The log of a training that goes on at ``steps``, in which a weight of rank 1 changes before a step."""
    model, file = make(engine), pathlib.Path(folder, "run.jsonl")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = {"every": every, "stats": [{"kind": "NonFinite"}, {"kind": "Norm"}]}
    config = {"watch": {**watch, "sinks": [{"kind": "Jsonl", "path": str(file)}]}, "check_replicas": compares}
    prepared = dh.prepare(model, optimizer, config)
    prepared.load_state_dict({**prepared.state_dict(), "steps": steps.start})
    for step in steps:
        if step == spoiled and rank == 1:
            next(model.parameters()).data.view(-1)[0] += 1.0
        factor = 100.0 if step == steps[-4] else 1.0
        (factor * loss_of(model, step % 4, engine, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.remove()
    return [json.loads(line) for line in file.read_text().splitlines()] if rank == 0 else []


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
def test_what_was_found_after_the_last_logged_step_is_in_the_log(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    records = ranks(_log, "ddp", str(tmp_path), range(100), 50, 100, 95)[0]
    assert [record["step"] for record in records] == [0, 50, 99]
    last = records[-1]
    assert (last["replicas/differ"], last["replicas/steps"], last["replicas/ranks"]) == (1, 100, [0, 1])
    assert last["grad_norm/peak_step"] == 96
    assert last["loop/lr"] == [1e-3]
    (run,) = read(tmp_path / "run.jsonl").runs
    (found,) = [culprit for culprit in timeline(run).culprits if culprit.kind == "replicas"]
    assert found.first <= 95 <= found.step


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
def test_a_resumed_run_counts_the_steps_of_the_run(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    records = ranks(_log, "ddp", str(tmp_path), range(60, 80), 5, 16, 75)[0]
    assert {record["replicas/steps"] for record in records if record.get("replicas/differ") == 0} == {61, 64, 68}
    assert {record["replicas/steps"] for record in records if record.get("replicas/differ")} == {76}
    (run,) = read(tmp_path / "run.jsonl").runs
    (found,) = [culprit for culprit in timeline(run).culprits if culprit.kind in ("replicas", "weights")]
    assert (found.kind, found.first, found.step) == ("replicas", 68, 75)


def test_the_end_of_a_log_is_written_once(tmp_path: pathlib.Path) -> None:
    """One step after the last logged one; a log whose last step is logged has no more; what is not removed has it."""
    for steps, wanted in ((12, [0, 10, 11]), (11, [0, 10])):
        model, records = make("plain"), list[dict[str, Any]]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        watch = gradients(model, optimizer, stats=[stats.NonFinite()], sinks=[records.append], every=10)
        for step in range(steps):
            loss_of(model, step, "plain").backward()
            optimizer.step()
        if steps == 11:
            watch.leave_to(lambda unwritten: unwritten.write())
            del watch, model, optimizer
            gc.collect()
        else:
            watch.end_log()
            watch.remove()
        assert [record["step"] for record in records] == wanted
        assert ("grad_norm/peak" in records[-1], "nonfinite" in records[-1]) == (True, steps == 11)


def test_a_step_that_has_a_record_gets_the_rest_in_another_one(tmp_path: pathlib.Path) -> None:
    """The last step was not finite: its second line, which counts, says that too."""
    model, records = make("plain"), list[dict[str, Any]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with gradients(model, optimizer, stats=[stats.NonFinite()], sinks=[records.append], every=10) as watch:
        for step in range(5):
            (loss_of(model, step, "plain") * (float("nan") if step == 4 else 1.0)).backward()
            optimizer.step()
        watch.flush()
    assert [record["step"] for record in records] == [0, 4, 4]
    assert records[-1]["nonfinite_params"] == records[1]["nonfinite_params"] > 0
    assert records[-1]["grad_norm/peak_step"] in (1, 2, 3)
