"""The pieces of gradients(): measures, sinks, and the life of an attachment."""

from __future__ import annotations

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
from disthooks import sinks, stats
from disthooks.engines.base import Engine
from disthooks.grads.plan import VectorLayout
from disthooks.grads.sinks import local
from disthooks.grads.stats.base import Found, Local, LocalStats
from disthooks.grads.stats.nonfinite import FirstToFail, NonFiniteCount, OwnNonFinite, ranks_in
from disthooks.grads.stats.norms import Power
from tests.support.engines import close, loss_of, make
from tests.support.logs import measured
from tests.support.rounding import of_norm

CPU = torch.device("cpu")


def _local(grads: list[torch.Tensor | None], position: int = 0, world: int = 1) -> Local:
    return Local(shards(len(grads)), grads, [LocalStats()] * len(grads), [], position, world, CPU)


def shards(count: int) -> Any:
    return Engine(nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])).shards


def layout_of(*measures: Any, parameters: int = 1) -> VectorLayout:
    return VectorLayout({measure: tuple(range(parameters)) for measure in measures}, shards(parameters))


def _merged(layout: VectorLayout, parts: list[Local]) -> dict[Any, torch.Tensor]:
    sums, peaks = zip(*(layout.pack(part) for part in parts), strict=True)
    return layout.unpack((torch.stack(sums).sum(0), torch.stack(peaks).amax(0)))


def test_the_first_rank_to_fail() -> None:
    flags = [[None, False, True], [True, False, None], [True, False, True]]
    parts = [
        _local([None] * 3, rank, 3)._replace(
            local_stats=[LocalStats(finite_probes=() if f is None else (_size(f),)) for f in row]
        )
        for rank, row in enumerate(flags)
    ]
    layout = layout_of(FirstToFail(), OwnNonFinite(), parameters=3)
    merged = _merged(layout, parts)
    assert merged[FirstToFail()].tolist() == [2, 0, 3]
    rows = {NonFiniteCount(): torch.ones(3, 1)} | {measure: row[:, None] for measure, row in merged.items()}
    found = stats.NonFinite().record(Found(["a", "b", "c"], {}, rows, [4, 5, 6]))
    assert [item["rank"] for item in found["nonfinite_at"]] == [5, None, 4]
    assert found["nonfinite_ranks"] == [4, 5, 6]


def _size(bad: bool) -> torch.Tensor:
    return torch.tensor(math.inf if bad else 1.0)


@pytest.mark.parametrize("world", [1, 2, 52, 53, 4096])
def test_the_ranks_that_failed_in_one_number(world: int) -> None:
    """A sum of float64, on any number of ranks: exact up to 52, beyond that of one and of all."""
    ranks, last = range(100, 100 + world), world - 1

    def told(bad: list[int]) -> tuple[int, ...] | None:
        seen = [LocalStats(finite_probes=(_size(True),))]
        marks = [OwnNonFinite().local(_local([None], place, world)._replace(local_stats=seen)) for place in bad]
        return ranks_in(float(torch.stack(marks).sum()) if marks else 0.0, ranks)

    assert told([]) == ()
    assert told([last]) == (100 + last,)
    assert told(list(range(world))) == tuple(ranks)
    several = sorted({0, world // 2, last})
    if 1 < len(several) < world:
        assert told(several) == (tuple(100 + place for place in several) if world <= 52 else None)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_of_every_size(p: float, dtype: torch.dtype) -> None:
    for size in (0, 1, 4096, 4097, 9000):
        grad = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
        grad = grad.view(90, 100).t() if size == 9000 else grad  # not contiguous
        found = Power(p).norm(Power(p).local(_local([grad, None])), dim=0)
        truth = torch.linalg.vector_norm(grad.double(), p) if size else torch.zeros(())
        # One gradient alone is summed by torch: of up to 4,096 elements in float32.
        is_summed_in_float32 = p in (1.0, 2.0) and dtype != torch.float64
        tolerance = of_norm(min(size, 4096), p) if is_summed_in_float32 else 1e-6
        assert close(float(found), float(truth), tolerance), size


# --- sinks


def test_jsonl_is_strict_and_appends(tmp_path: pathlib.Path) -> None:
    sink = sinks.Jsonl(tmp_path / "deep" / "er" / "log.jsonl")
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
    sink = sinks.Jsonl(tmp_path / "log.jsonl")
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
    elsewhere = sinks.Jsonl(tmp_path / "other.jsonl").open()
    elsewhere({"step": 0})
    elsewhere.close()
    records = [json.loads(line) for name in ("log", "other") for line in (tmp_path / f"{name}.jsonl").open()]
    name = records[0]["run"]
    assert [record["run"] for record in records] == [name, name, f"{name}.1", "mine"]
    assert {record["restart"] for record in records} == {2}


RUNS = """
import os
from disthooks.grads.sinks import local
print(local.run(), local.restart())
"""


def test_a_restart_of_the_launcher_is_the_same_run(tmp_path: pathlib.Path) -> None:
    """Workers of one launcher, here this process, have one name; another process without a launcher its own."""
    script = tmp_path / "runs.py"
    script.write_text(RUNS)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC_", "DISTHOOKS_RUN"))}
    env = kept | {"PYTHONPATH": str(pathlib.Path(dh.__file__).parents[1])}
    said = []
    for more in ({}, {}, {"TORCHELASTIC_RESTART_COUNT": "0"}, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        under = {"TORCHELASTIC_RUN_ID": "none"} if more else {}
        done = subprocess.run(
            [sys.executable, script], env=env | more | under, capture_output=True, text=True, check=True
        )
        said.append(done.stdout.split())
    assert len({name for name, _ in said}) == 3
    assert said[2][0] == said[3][0]
    assert [restart for _, restart in said] == ["0", "0", "0", "1"]


def test_a_loss_that_is_known_is_in_the_record() -> None:
    model, records = make("plain"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, stats=[stats.Norm()], sinks=[records.append], every=1) as watch:
        for step in range(2):
            loss_of(model, step, "plain").backward()
            optimizer.step()
            watch.flush(loss=0.5 + step, grad_norm=-1.0)
        watch.flush(loss=7.0)  # nothing is left to be read
    assert [record["loss"] for record in records] == [0.5, 1.5]
    assert all(record["grad_norm"] > 0 for record in records)
    assert watch.latest == measured(records[-1])


def test_jsonl_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dh.errors.UsageError, match="cannot be written"):
        dh.gradients(model, optimizer, stats=[stats.Norm()], sinks=[sinks.Jsonl(tmp_path)])
    assert not optimizer._optimizer_step_pre_hooks


def test_console_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    at = [{"param": f"p{i}", "count": 1, "rank": None if i else 3} for i in range(6)]
    sinks.Console()({"step": 7, "grad_norm": 123.456789, "nonfinite": 6, "nonfinite_at": at})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith(
        "step 7  grad_norm 123.5  nonfinite 6  nonfinite_at p0 on rank 3, p1 (finite on every rank when measured)"
    )
    assert out.endswith("and 2 more\n")


# --- the attachment


def run(steps: int, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    model, records = make("plain"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = dh.gradients(model, optimizer, stats=[stats.Norm()], sinks=[records.append], **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, "plain").backward()
        optimizer.step()
    return watch, records


def test_on_gradient_takes_everything_off() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    model = make("plain")
    for at in ("local", "final"):
        dh.on_gradient(model, "*", torch.zeros_like, at).remove()
    assert not _global_optimizer_pre_hooks
    assert not model._forward_pre_hooks
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_two_rules_of_a_kind_write_different_names() -> None:
    rules = [dh.ClipNorm(10.0), dh.ClipNorm(1.0), dh.only("head.*", dh.ClipNorm(0.1))]
    watch, _ = run(1, rules=rules)
    watch.flush()
    assert set(watch.latest) == {
        *("step", "grad_norm", "grad_norm_clipped", "clip_ratio"),
        *("grad_norm_clipped/1", "clip_ratio/1", "grad_norm_clipped/head.*", "clip_ratio/head.*"),
    }
    assert watch.report().rounds == 3


def test_a_rule_for_some_beside_a_statistic_of_all() -> None:
    rules = [dh.only(["head.*", "embed.weight"], dh.ClipNorm(0.1))]
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model, 0, "plain").backward()
    clipped = [model.embed.weight.grad.clone(), model.head.weight.grad.clone()]
    norm = float(torch.nn.utils.get_total_norm(clipped))
    with dh.gradients(model, optimizer, rules=rules, stats=[stats.Norm()]) as watch:
        optimizer.step()
    assert close(watch.latest["grad_norm/head.*,embed.weight"], norm)
    after = torch.nn.utils.get_total_norm([model.embed.weight.grad, model.head.weight.grad])
    assert close(float(after), 0.1, 1e-5)


def test_data_parallel_is_the_module_inside() -> None:
    model = make("dp")
    with dh.on_gradient(model, "head.weight", torch.zeros_like, at="local") as hook:
        loss_of(model, 0, "dp").backward()
    assert hook.report() == {"head.weight": 1}
    assert not model.module.head.weight.grad.any()


def test_a_compiled_model() -> None:
    model = torch.compile(make("plain"), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        dh.on_gradient(model, "head.weight", lambda grad: grad * 0, at="local"),
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[stats.Norm(per_parameter=True)]) as watch,
    ):
        loss_of(model, 0, "plain").backward()
        optimizer.step()
    assert watch.latest["grad_norm/param/head.weight"] == 0
    assert watch.latest["grad_norm"] > 0
