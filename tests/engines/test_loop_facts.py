"""What the loop itself set is in each record: of the first rank, without a collective, and without a wait."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.report.log import read
from disthooks.report.loop import changes
from disthooks.report.sentences import verdict
from disthooks.report.timeline import timeline
from tests.support.engines import FIRST
from tests.support.ranks.harness import Ranks

EVERY_STEP = {"loop/lr", "loop/weight_decay", "loop/trained", "loop/training", "loop/inputs", "loop/micro_batches"}


def _records(rank: int, engine: str, folder: str, arguments: dict[str, Any], happens: str = "") -> list[dict[str, Any]]:
    """The log of a training whose first layer begins to train in step 20, and whose rank 0 may have a NaN in 33."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1)
    net: nn.Module = nn.Sequential(first, last)
    optimizer = torch.optim.AdamW([{"params": last.parameters()}, {"params": first.parameters(), "lr": 0.0}], lr=0.1)
    first.requires_grad_(True)  # DDP takes the parameters that train
    if engine == "ddp":
        net = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    first.requires_grad_(False)
    file = pathlib.Path(folder, f"rank-{rank}.jsonl")
    given = {"stats": [stats.Norm(), stats.NonFinite()], "sinks": [dh.sinks.Jsonl(file)], **arguments}
    with dh.gradients(net, optimizer, **given):
        for step in range(40):
            if step == 20:
                first.requires_grad_(True)
                optimizer.param_groups[1]["lr"] = 1e-3
            for _ in range(2):
                x = torch.randn(3, 4)
                if happens and step == 33 and rank == 0:
                    x[0, 0] = math.nan
                net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.parametrize("engine", ["plain", "ddp"])
def test_each_record_says_what_the_loop_set(ranks: Ranks, engine: str, tmp_path: pathlib.Path) -> None:
    """The logged steps, one that is recorded because it was not finite, and recent ones."""
    for arguments in ({"every": 7}, {"every": 16, "recent": 12, "rules": [dh.SkipNonFinite()]}):
        folder = tmp_path / str(len(arguments))
        folder.mkdir()
        if engine == "plain":
            found = _records(0, engine, str(folder), arguments, "nan")
        else:
            found, rest = ranks(_records, engine, str(folder), arguments, "nan")
            assert rest == []
        assert 33 in [record["step"] for record in found]
        for record in found:
            has_begun = record["step"] >= 20
            assert record.keys() >= EVERY_STEP
            assert record["loop/lr"] == [0.1, 1e-3 if has_begun else 0.0]
            assert record["loop/weight_decay"] == [0.01, 0.01]
            assert (record["loop/trained"], record["loop/training"]) == (4 if has_begun else 2, True)
            assert (record["loop/micro_batches"], record["loop/inputs"]) == (2, 24)
            assert record["step"] == 0 or 0 < record["loop/seconds"] < 60
        began = {record["step"]: record["loop/began"] for record in found if "loop/began" in record}
        assert set(map(tuple, began.values())) == {("0.weight", "0.bias")}
        assert min(began) == min(record["step"] for record in found if record["step"] >= 20)
        (run,) = read(folder / "rank-0.jsonl").runs
        told = [(change.first <= 20 <= change.step, change.kind, change.names) for change in changes(run)]
        assert told == [(True, kind, ("0.weight", "0.bias")) for kind in ("began", "learning rate")]
        said = verdict(run, timeline(run))
        assert any("2 parameters began to train: 0.weight, 0.bias." in sentence for sentence in said)
        assert any("the learning rate of group 1 went from 0 to 0.001." in sentence for sentence in said)


def test_a_forward_that_trains_nothing_and_a_step_that_is_kept_back_do_not_count() -> None:
    """Evaluations between steps; and a GradScaler's step whose gradients overflowed, which halves the scale."""
    net, records = nn.Linear(2, 1), list[dict[str, Any]]()
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with dh.gradients(net, optimizer, stats=[stats.Norm()], sinks=[records.append], every=1):
        for step in range(4):
            scaler.scale(net(torch.full((3, 2), math.inf if step == 1 else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            with torch.no_grad():
                net.eval()(torch.ones(100, 2))
            net.train(step < 2)
    of = {name: [record[f"loop/{name}"] for record in records] for name in ("scale", "inputs", "micro_batches", "lr")}
    assert of == {"scale": [8.0, 4.0, 4.0], "inputs": [6] * 3, "micro_batches": [1] * 3, "lr": [[0.5]] * 3}
    assert [record["loop/training"] for record in records] == [True, True, False]


def test_a_number_on_a_device_is_left_out() -> None:
    net, records = nn.Linear(2, 1), list[dict[str, Any]]()
    optimizer = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.2}], lr=0.1)
    with dh.gradients(net, optimizer, stats=[stats.Norm()], sinks=[records.append], every=1):
        net(torch.ones(1, 2)).sum().backward()
        rate, optimizer.param_groups[0]["lr"] = 0.1, torch.ones((), device="meta")
        optimizer.register_step_pre_hook(lambda *args: optimizer.param_groups[0].update(lr=rate))
        optimizer.step()
    assert records[0]["loop/lr"] in ([None, 0.2], [0.1, 0.2])  # by the order of the hooks
