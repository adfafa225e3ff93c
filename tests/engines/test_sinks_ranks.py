"""Sinks where there are several ranks: the first opens them, and what it cannot open stops all."""

from __future__ import annotations

import csv
import pathlib
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks import stats
from disthooks.errors import DisthooksError
from tests.support.engines import loss_of, make
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


class Said:
    """Notes what is done with it."""

    def __init__(self, fails: bool = False) -> None:
        self.said: list[Any] = []
        self.fails = fails

    def open(self) -> None:
        self.said.append("open")
        if self.fails:
            raise OSError("disk full")

    def __call__(self, record: dict[str, Any]) -> None:
        self.said.append(record["step"])

    def close(self) -> None:
        self.said.append("close")


def _lives(rank: int) -> tuple[list[Any], list[Any]]:
    model = make("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    whole, early = Said(), Said()
    with dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[whole], every=1):
        loss_of(model, 0, "ddp", rank).backward()
        optimizer.step()
    try:
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[early, Said(fails=True)])
    except (OSError, dh.errors.AttachError) as error:
        early.said += [type(error).__name__, str(error)]
    try:
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[early], every=rank + 1)
    except dh.errors.AttachError as error:
        early.said.append(type(error).__name__)
    return whole.said, early.said


def test_the_first_rank_alone_opens_and_closes(ranks: Ranks) -> None:
    first, second = ranks(_lives)
    assert first == (["open", 0, "close"], ["open", "close", "OSError", "disk full", "open", "close", "AttachError"])
    whole, (kind, told, last) = second
    assert (whole, kind, last) == ([], "AttachError", "AttachError")
    assert "rank 0 could not open its sinks" in told


def _monitored(rank: int, folder: str) -> list[tuple[int, float]]:
    """What DeepSpeed knows of the norm after each step, and the samples seen by then."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": False},
    }
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engines = [
        deepspeed.initialize(model=torch.nn.Linear(3, 1), config=config | more, dist_init_required=False)[0]
        for more in (monitor, {})
    ]
    with pytest.raises(dh.errors.UsageError, match="no monitor is on"):
        dh.sinks.DeepSpeedMonitor(engines[1]).open()
    engine, found = engines[0], []
    sink = dh.sinks.DeepSpeedMonitor(engine)
    if rank == 0:
        sink.open()
    for step in range(3):
        engine.backward(engine(torch.full((4, 3), float(step + rank))).square().mean())
        engine.step()
        norm = float(engine.get_global_grad_norm())
        sink({"step": step, "grad_norm": norm, "only/*.bias": float("inf"), "nonfinite_at": [{"param": "w"}]})
        found.append((engine.global_samples, norm))
    with dh.gradients(engine, stats=[dh.stats.MaxAbs()], sinks=[sink], every=1):
        engine.backward(engine(torch.full((4, 3), 3.0)).square().mean())
        engine.step()
    return found


def test_deepspeed_writes_them_where_it_writes_its_own(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    found, _ = ranks(_monitored, str(tmp_path), timeout=300)

    def read(name: str) -> list[list[str]]:
        with (tmp_path / "run" / f"{name}.csv").open() as file:
            return list(csv.reader(file))

    assert read("Train_Samples_disthooks_grad_norm") == [["step", "grad_norm"], *([str(s), str(n)] for s, n in found)]
    assert [row[1] for row in read("Train_Samples_disthooks_only__.bias")] == ["_.bias", "inf", "inf", "inf"]
    assert [row[0] for row in read("Train_Samples_lr")] == ["step", "8", "16", "24", "32"]  # DeepSpeed's own
    assert [samples for samples, _ in found] == [8, 16, 24]
    assert not list(tmp_path.glob("run/*nonfinite*"))
    (_, (samples, largest)) = read("Train_Samples_disthooks_grad_max_abs")
    assert int(samples) == 32
    assert float(largest) > 0


def _sink(rank: int) -> str:
    def full(record: dict[str, Any]) -> None:
        raise OSError("disk full")

    model = make("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = dh.gradients(model, optimizer, stats=[stats.Norm()], sinks=[full], every=1)
    said = "fine"
    try:
        for step in range(3):
            loss_of(model, step, "ddp", rank).backward()
            optimizer.step()
    except (OSError, DisthooksError) as error:  # a rank that handles its error
        said = str(error)
    watch._records._pending = None
    watch.remove()
    return said


def test_a_sink_that_fails_on_the_first_rank_stops_no_other(ranks: Ranks) -> None:
    ranks(_sink, timeout=300)
