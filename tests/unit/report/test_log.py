"""What is read of a log, whole or not, of this version or an older one."""

from __future__ import annotations

import math
import pathlib
import random

import pytest
import torch

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.report.log import Tail, file_of, read
from disthooks.report.moved import values_of
from tests.support.logs import log


def test_what_was_written_is_read(tmp_path: pathlib.Path) -> None:
    file, records = tmp_path / "run.jsonl", []
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sinks = [dh.sinks.Jsonl(file), records.append]
    with dh.gradients(model, optimizer, stats=dh.stats.full(), sinks=sinks, every=1):
        for step in range(5):
            optimizer.zero_grad()
            (model(torch.ones(2, 3)).sum() * (float("nan") if step == 3 else 1.0)).backward()
            optimizer.step()
    (run,) = read(file).runs
    assert run.steps == [0, 1, 2, 3, 4]
    assert run.about["engine"] == "a plain module"
    assert run.names["param"] == [name for name, _ in model.named_parameters()]
    assert run.names["module"] == ["0", "1", "2"]
    for of, statistic in (("param", "grad_norm"), ("param", "update_ratio"), ("module", "activation_rms")):
        values = values_of(run, of, statistic)
        assert values is not None
        for at, record in enumerate(records):
            for place, name in enumerate(run.names[of]):
                truth = record[f"{statistic}/{of}/{name}"]
                found = float(values[at, place])
                assert found == pytest.approx(truth, rel=1e-6) if math.isfinite(truth) else found == math.inf
    assert run.column("grad_norm")[0] == records[0]["grad_norm"]


def test_a_run_that_is_killed_at_any_byte_loses_a_line_at_most(tmp_path: pathlib.Path) -> None:
    whole = log(tmp_path / "whole.jsonl", steps=40, layers=6).read_bytes()
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    chance = random.Random(0)
    for _ in range(50):
        cut = chance.randrange(1, len(whole))
        part = tmp_path / "part.jsonl"
        part.write_bytes(whole[:cut])
        found = read(part)
        written = sum(end < cut for end in ends)
        steps = found.runs[0].steps if found.runs else []
        assert steps[:written] == list(range(written))
        assert len(steps) - written in (0, 1)  # the last line may lack its end alone
        assert found.half == (len(steps) == written and whole[cut - 1] != ord("\n"))


def test_the_log_of_a_folder_is_found(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"has no \.jsonl file"):
        file_of(tmp_path)
    (tmp_path / "a").mkdir()
    log(tmp_path / "a" / "gradients.jsonl", 2, 1)
    log(tmp_path / "other.jsonl", 2, 1)
    assert file_of(tmp_path) == tmp_path / "a" / "gradients.jsonl"
    log(tmp_path / "gradients.jsonl", 2, 1)
    with pytest.raises(UsageError, match=r"has 2 logs: .*; give the file"):
        file_of(tmp_path)


def test_a_log_that_grows_is_followed(tmp_path: pathlib.Path) -> None:
    whole = log(tmp_path / "whole.jsonl", steps=30, layers=4).read_bytes()
    growing = tmp_path / "growing.jsonl"
    growing.write_bytes(b"")
    tail = Tail(growing, most=10)
    assert tail.read() is None
    for end in (*range(0, len(whole), 700), len(whole)):
        growing.write_bytes(whole[:end])
        found = tail.read()
        written = whole[:end].count(b"\n")
        if written:
            assert found.steps == list(range(max(0, written - 10), written))
            assert len(found.names["param"]) == 4, "the names are in the first line alone"
    growing.write_bytes(whole[: whole.index(b"\n") + 1])  # it was written anew
    found = tail.read()
    assert found.steps == [0]
    with growing.open("a") as file:
        file.write('{"step": 0, "run": "another", "loss": 1.0}\n')
    found = tail.read()
    assert (found.name, found.names["param"]) == ("another", [])
