"""Found by hostile review of the statistics: each of these was wrong once."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats as S
from tests.support.engines import loss_of, make
from tests.support.ranks.harness import Ranks

STATS = (S.Norm(), S.Spread(), S.NoiseScale(decay=0.0), S.NonFinite())
ENGINES = ["ddp", "fsdp2", "hsdp", "fsdp1", "fsdp1flat"]


def _once(rank: int, engine: str) -> dict[str, Any]:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=STATS, every=1) as watch:
        loss_of(model, 0, engine, rank).backward()
        optimizer.step()
    return dict(watch.latest)


def _after_skip(rank: int, engine: str) -> dict[str, Any]:
    """A GradScaler leaves the first step out; the second one is what ``_once`` does."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with dh.gradients(model, optimizer, stats=STATS, every=1) as watch:
        for spoil in (float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 0, engine, rank) * spoil).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return dict(watch.latest)


def _after_drop(rank: int, engine: str) -> dict[str, Any]:
    """A batch is thrown away (an outlier): zero_grad, no step."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=STATS, every=1) as watch:
        (loss_of(model, 0, engine, rank) * 100).backward()
        optimizer.zero_grad()
        loss_of(model, 0, engine, rank).backward()
        optimizer.step()
    return dict(watch.latest)


@pytest.mark.dist
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", [_after_skip, _after_drop])
def test_a_step_never_made_leaves_nothing_behind(ranks: Ranks, way: Any, engine: str) -> None:
    truth = ranks(_once, engine)[0]
    found = ranks(way, engine)[0]
    for name in ("grad_norm", "grad_norm/max_rank", "grad_norm/min_rank", "noise_scale"):
        assert found[name] == pytest.approx(truth[name], rel=1e-4), (name, found[name], truth[name])
    assert found["grad_norm/outlier_rank"] is None


def _blames(rank: int, engine: str) -> list[dict[str, Any]]:
    """Rank 0's NaN was dropped with its batch; then rank 1 has one of its own."""
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[S.NonFinite()], every=1) as watch:
        for bad in (0, 1):
            optimizer.zero_grad()
            (loss_of(model, 0, engine, rank) * (float("nan") if rank == bad else 1.0)).backward()
        optimizer.step()
    return list(watch.latest["nonfinite_at"])


@pytest.mark.dist
@pytest.mark.parametrize("engine", ENGINES)
def test_nonfinite_names_the_rank_of_this_step(ranks: Ranks, engine: str) -> None:
    assert {at["rank"] for at in ranks(_blames, engine)[0]} == {1}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.b(self.a(x)) if both else self.a(x)


def test_a_dropped_batch_that_used_another_branch_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model, x = Branch(), torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[S.Norm(), S.Spread()], every=1) as watch:
        model(x, True).square().sum().mul(100).backward()
        optimizer.zero_grad()  # thrown away; now a batch that does not use b
        model(x, False).square().sum().backward()
        optimizer.step()
    assert watch.latest["grad_norm/max_rank"] == pytest.approx(watch.latest["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("kind", ["console", "tensorboard"])
def test_an_empty_histogram_does_not_end_a_sink(tmp_path: pathlib.Path, kind: str) -> None:
    """A group that this step did not use has no elements: the sink must go on."""
    lines: list[str] = []
    sink = dh.sinks.Console(lines.append) if kind == "console" else dh.sinks.TensorBoard(tmp_path)
    model, x = Branch(), torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # "failed and is left out from now on: IndexError(...)"
        with dh.gradients(model, optimizer, stats=S.standard(), groups={"b": "b.*"}, sinks=[sink], every=1):
            for both in (False, True):
                optimizer.zero_grad()
                model(x, both).sum().backward()
                optimizer.step()
    assert kind != "console" or len(lines) == 2


def _logged(grad: torch.Tensor, *stats: Any) -> dict[str, Any]:
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(grad))])
    model[0].grad = grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=stats, every=1) as watch:
        optimizer.step()
    return watch.latest


def test_two_quantiles_do_not_share_a_name() -> None:
    grad = torch.cat([torch.ones(999_990), torch.full((10,), 1e6)])
    found = _logged(grad, S.Histogram((0.9999999, 1.0, 0.5)))
    assert len([name for name in found if name.startswith("grad_abs_q")]) == 3


# --- four ranks: FSDP2 on one dimension of a mesh, with nothing that says that the other one is tensor parallelism


def _on_one_dimension(rank: int, names: str) -> float:
    """Two independent copies (names "same"), or two stages of a pipeline ("stages"), each sharded over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    key = "layer" if names == "same" else f"layer{rank // 2}"
    model = nn.Sequential()
    model.add_module(key, nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)) * (10 if rank > 1 else 1)
    with dh.gradients(model, optimizer, stats=[S.Norm()], every=1) as watch:
        model(x).square().sum().backward()
        optimizer.step()
    truth = next(model.parameters()).grad.full_tensor().norm()  # over this mesh["dp"]
    return watch.latest["grad_norm"] / float(truth)


@pytest.mark.dist
@pytest.mark.parametrize("names", ["same", "stages"])
def test_fsdp2_on_one_dimension_of_a_mesh(four: Ranks, names: str) -> None:
    """Each pair's own norm, never a mix of the two."""
    assert four(_on_one_dimension, names) == pytest.approx([1.0] * 4, rel=1e-4)
