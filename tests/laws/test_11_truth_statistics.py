"""Law 11, truth, for statistics: the same however the tensors are split, and what float64 by hand gives."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.grads.stats.base import Found, Local, LocalStats
from tests.support.engines import ENGINES, FIRST, close, first_of, grads_of, is_fsdp1, loss_of, make, train
from tests.support.optimizers import small
from tests.support.ranks.harness import Ranks
from tests.support.rounding import drawn, of_norm, within

# --- In one process


# A new statistic is proven by one more line.
STATS: list[Any] = [
    stats.Norm(),
    stats.Norm(1.0),
    stats.Norm(3.0, per_parameter=True),
    stats.Norm(math.inf, per_parameter=True),
    stats.MaxAbs(),
    stats.NonFinite(),
    stats.Moments(),  # of some parameters here the mean is zero but for rounding
    stats.Extremes(per_parameter=True),
    stats.Zeros(per_parameter=True),
    stats.Histogram(),
    stats.Weights(per_parameter=True),
    stats.Updates(per_parameter=True),
]


def test_statistics_equal_float64_by_hand() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model, 0, "plain").backward()
    elements = [abs(float(x)) for grad in grads_of(model).values() for x in grad.flatten()]
    with dh.gradients(model, optimizer, stats=STATS) as watch:
        optimizer.step()
    assert close(watch.latest["grad_norm"], math.sqrt(sum(x * x for x in elements)))
    assert close(watch.latest["grad_norm_l1"], sum(elements))
    assert close(watch.latest["grad_norm_l3"], sum(x**3 for x in elements) ** (1 / 3))
    assert watch.latest["grad_max_abs"] == watch.latest["grad_norm_linf"] == max(elements)
    assert watch.latest["update_norm"] == watch.latest["update_ratio"] == 0
    assert sum(watch.latest["grad_histogram"]["counts"]) == len(elements)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_of_elements_equal_float64_by_hand(dtype: torch.dtype) -> None:
    """The parameters have many sizes: less than a row, rows and a rest, more than a block.

    One is empty, and one has no gradient.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = [(3,), (3,), (1,), (40, 50), (0, 4), (5,), (300, 1000), (7000,), (7000,), (4096,), (7000,)]
    weights = nn.ParameterList([nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes])
    for i, weight in enumerate(weights):
        if i != 5:
            grad = (torch.randn(weight.shape, generator=generator) + i % 3).to(dtype)
            weight.grad = grad.where(torch.rand(weight.shape, generator=generator) > 0.1, 0)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.5)
    before = [weight.detach().double().clone() for weight in weights]
    with dh.gradients(
        weights, optimizer, stats=[*STATS, stats.Moments(per_parameter=True)], groups={"few": ["3", "7"]}
    ) as watch:
        optimizer.step()
    scopes = {"": range(len(sizes)), "/group/few": [3, 7]} | {f"/param/{i}": [i] for i in (2, 3, 6, 7, 10)}
    for suffix, scope in scopes.items():
        there = [i for i in scope if weights[i].grad is not None]
        grad = torch.cat([weights[i].grad.double().flatten() for i in there])
        theta = torch.cat([before[i].flatten() for i in scope])
        moved = torch.cat([weights[i].detach().double().flatten() for i in scope]) - theta
        truth = {
            "grad_mean": grad.mean(),
            "grad_std": grad.std(correction=0),
            "grad_min": grad.min(),
            "grad_max": grad.max(),
            "grad_zeros": (grad == 0).double().mean(),
            "param_norm": theta.norm(),
            "update_norm": moved.norm(),
            "update_ratio": moved.norm() / theta.norm(),
        }
        # The terms of a mean near zero are as large as ever, and rows of 1,024 of them are summed in float32.
        room = float(grad.abs().mean()) * of_norm(1024, 1.0)
        for name, value in truth.items():
            if name == "grad_mean" and dtype != torch.float64:
                assert watch.latest[name + suffix] == pytest.approx(float(value), rel=0, abs=room), name + suffix
            else:
                assert close(watch.latest[name + suffix], float(value), 1e-6), name + suffix
    assert watch.latest["grad_norm"] > 0
    assert math.isnan(watch.latest["grad_mean/param/5"])
    assert math.isnan(watch.latest["grad_min/param/4"])


def test_long_sums_keep_their_digits() -> None:
    """torch's own float32 norm on the CPU is about 1e-4 off here."""
    weight = nn.Parameter(torch.zeros(5_000_003))
    weight.grad = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with dh.gradients(nn.ParameterList([weight]), optimizer, stats=[stats.Norm(), stats.Norm(1.0)]) as watch:
        optimizer.step()
    assert close(watch.latest["grad_norm"], float(weight.grad.double().norm()), 1e-7)
    assert close(watch.latest["grad_norm_l1"], float(weight.grad.double().norm(1)), 1e-7)


def test_watching_changes_no_number() -> None:
    model = make("plain")
    loss_of(model, 0, "plain").backward()
    assert close(train(0, "plain", [], STATS, 1)[1], grads_of(model), 0.0)


def test_watching_scaled_gradients_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from disthooks.engines.base import Engine

    monkeypatch.setattr(Engine, "gradient_scale", lambda self: 1000.3)  # as of an engine with a loss scale of its own
    model = nn.ParameterList([nn.Parameter(torch.zeros(10_000))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    model[0].grad = before.clone()
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=[stats.Norm()], every=1) as watch:
        optimizer.step()
    assert torch.equal(model[0].grad, before)
    assert watch.latest["grad_norm"] == pytest.approx(float(before.norm()) / 1000.3, rel=1e-5)


# --- On engines


GROUPS = {"mid": "mid.*", "biases": ["*.bias", "scale"]}


def spoil(model: nn.Module, step: int, rank: int) -> None:
    """In step 1 the first element of one gradient is not a number, wherever that element lives."""
    if is_fsdp1(model):
        first = first_of(model, "mid.1.weight")
        if step == 1 and first is not None:
            first[0] = math.nan
        return
    model = getattr(model, "module", model)
    grad = model.mid[1].weight.grad
    local = getattr(grad, "_local_tensor", grad)
    if step == 1 and (local is grad or grad.device_mesh.get_coordinate()[-1] == 0):
        local[0, 0] = math.nan


@functools.cache
def _drawn() -> list[Any]:
    return [records for records, _ in drawn([], STATS, 2, spoil=spoil, groups=GROUPS)]


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.full_tier(engine=("fsdp1hybrid", "fsdp1none", "fsdp1flatnone"))
@pytest.mark.parametrize("engine", [*ENGINES, "hsdp12", "fsdp1hybrid", "fsdp1none", "fsdp1flatnone"])
def test_every_engine_equals_one_process(ranks: Ranks, engine: str, dtype: torch.dtype) -> None:
    truth = train(0, "plain", [], STATS, 2, spoil, torch.float64, GROUPS)[0]
    assert truth[0]["nonfinite"] == 0
    (at,) = truth[1]["nonfinite_at"]
    assert at == {"param": "mid.1.weight", "count": 1, "rank": None, "before": "mid.1.bias"}
    assert math.isnan(truth[1]["grad_norm"])
    assert math.isnan(truth[1]["grad_max_abs"])  # a MAX over ranks alone may lose it
    assert math.isnan(truth[1]["grad_std/group/mid"])
    assert not math.isnan(truth[1]["grad_std/group/biases"])
    for records, _ in ranks(train, engine, [], STATS, 2, spoil, dtype, GROUPS):
        leads = [{n: record.pop(n) for n in list(record) if "lead_rank" in n} for record in records]
        assert close(records, truth, 1e-10) if dtype == torch.float64 else within(records, truth, _drawn())
        assert {*leads[0].values()} <= {0, 1, None}
        assert "update_norm/lead_rank/param/embed.weight" in leads[0]


# --- Statistics of the ranks' own gradients, with accumulation


MICRO = 2
MID = {"mid": "mid.*"}
RANKS: list[Any] = [
    stats.Spread(per_parameter=True),
    stats.RankMaxAbs(per_parameter=True),
    stats.NoiseScale(4, decay=0.5, per_parameter=True),
]


def _loss(model: nn.Module, step: int, micro: int, engine: str, rank: int) -> torch.Tensor:
    return loss_of(model, 10 * step + micro, engine, rank, scale=1.0 + 2 * rank)


def _watched(rank: int, engine: str, scale: float = 1.0, steps: int = 3, every: int = 1) -> list[dict[str, Any]]:
    """The records of three steps of two micro-batches with everything watched, under a loss scale if asked for."""
    model, records = make(engine, torch.float64), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    with dh.gradients(model, optimizer, stats=RANKS, groups=MID, every=every) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(MICRO):
                last = micro == MICRO - 1
                quiet = model.no_sync() if engine == "ddp" and not last else contextlib.nullcontext()
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
                with quiet:
                    scaler.scale(_loss(model, step, micro, engine, rank)).backward()
            scaler.step(optimizer)
            scaler.update()
            watch.flush()
            records.append(dict(watch.latest))
    return records


def _gradients(model: nn.Module, step: int, rank: int, micro: int, engine: str) -> dict[str, torch.Tensor]:
    model.zero_grad()
    _loss(model, step, micro, engine, rank).backward()
    return grads_of(model)


def _scopes(names: list[str]) -> dict[str, list[str]]:
    return {"": names, "/group/mid": [n for n in names if n.startswith("mid")]} | {f"/param/{n}": [n] for n in names}


def _square(grads: dict[str, torch.Tensor], names: list[str]) -> float:
    return sum(float(grads[name].square().sum()) for name in names)


def _spread(norms: list[float], suffix: str) -> dict[str, Any]:
    mean = sum(norms) / len(norms)
    found = {
        "min_rank": min(norms),
        "max_rank": max(norms),
        "mean_rank": mean,
        "std_rank": math.sqrt(sum((n - mean) ** 2 for n in norms) / len(norms)),
        "argmin_rank": norms.index(min(norms)),
        "argmax_rank": norms.index(max(norms)),
        "outlier_rank": None,
    }
    if not suffix and len(norms) > 1:
        found["of_ranks"] = {str(rank): norm for rank, norm in enumerate(norms)}
    return {f"grad_norm/{name}{suffix}": value for name, value in found.items()}


def _noise(average: list[float], small: float, large: float, parts: int, suffix: str) -> dict[str, Any]:
    """McCandlish et al. (2018), equations A.2 and A.3, with micro-batches of 4 examples."""
    b, many = 4, 4 * parts
    norm2 = (many * large - b * small) / (many - b)
    trace = (small - large) / (1 / b - 1 / many)
    average[:] = [old / 2 + new / 2 for old, new in zip(average, (norm2, trace, 1.0), strict=True)]
    norm2, trace = average[0] / average[2], average[1] / average[2]
    ratio = trace / norm2 if norm2 > 0 else None
    found = {"": ratio, "_trace": trace, "_norm2": norm2}
    return {f"noise_scale{name}{suffix}": value for name, value in found.items()}


def _truth(ranks: int, engine: str = "ddp") -> list[dict[str, Any]]:
    """The same in one process, from each rank's and micro-batch's gradient."""
    model, records = make("plain", torch.float64), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    grads = [name for name, _ in model.named_parameters()]
    average = {suffix: [0.0, 0.0, 0.0] for suffix in _scopes(grads)}
    for step in range(3):
        own = [[_gradients(model, step, rank, micro, engine) for micro in range(MICRO)] for rank in range(ranks)]
        final = {name: sum(sum(g[name] for g in micro) for micro in own) / ranks for name in grads}
        record: dict[str, Any] = {"step": step}
        for suffix, names in _scopes(grads).items():
            squares = [MICRO * sum(_square(g, names) for g in micro) for micro in own]
            record |= _spread([math.sqrt(x) for x in squares], suffix)
            largest = [max(float(g[n].abs().max()) for g in micro for n in names) for micro in own]
            record[f"grad_max_abs/max_rank{suffix}"] = max(largest)
            record[f"grad_max_abs/argmax_rank{suffix}"] = largest.index(max(largest))
            record |= _noise(average[suffix], sum(squares) / ranks, _square(final, names), ranks * MICRO, suffix)
        records.append(record)
        for name, parameter in model.named_parameters():
            parameter.grad = final[name]
        optimizer.step()
    return records


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.parametrize(("engine", "scale"), [("ddp", 1.0), ("fsdp2", 1.0), ("hsdp", 1.0), ("ddp", 1024.0)])
def test_statistics_of_ranks_equal_float64_by_hand(ranks: Ranks, engine: str, scale: float) -> None:
    truth = _truth(2)
    for records in ranks(_watched, engine, scale):
        assert close(records, truth, 1e-9)


def test_statistics_of_one_rank_equal_float64_by_hand() -> None:
    for found, truth in zip(_watched(0, "plain"), _truth(1, "plain"), strict=True):
        deviations = [name for name in truth if "std_rank" in name]  # a root of what is zero but for rounding
        assert all(abs(found.pop(name) - truth.pop(name)) < 1e-6 for name in deviations)
        assert close(found, truth, 1e-9)


def _row(norms: list[float]) -> dict[str, Any]:
    """What Spread says of ranks with these norms."""
    spread = stats.Spread()
    locals_ = []
    for place, norm in enumerate(norms):
        seen = [LocalStats(norms=(torch.tensor(norm, dtype=torch.float64),))]
        locals_.append(Local([], [], seen, [[0]], place, len(norms), torch.device("cpu")))
    sums, peaks, each = spread.measures()
    rows = {
        each: torch.stack([each.local(part) for part in locals_]).sum(0)[None],
        sums: torch.stack([sums.local(part) for part in locals_]).sum(0)[None],
        peaks: torch.stack([peaks.local(part) for part in locals_]).amax(0)[None],
    }
    found = spread.record(Found(["w"], {}, rows, list(range(10, 10 + len(norms)))))
    return {name.removeprefix("grad_norm/").removesuffix("_rank"): value for name, value in found.items()}


def test_an_outlier_is_measured_by_the_others() -> None:
    even = [1.0, 1.1, 0.9, 1.05]
    assert _row(even)["outlier"] is None
    assert _row([*even, 5.0, 0.95])["outlier"] == 14
    assert _row([*even, 0.01])["outlier"] == 14
    assert _row([1.0, 1.0, 1.01])["outlier"] is None  # others without any deviation
    assert _row([1.0, 100.0])["outlier"] is None  # which of the two?
    assert _row([1.0])["outlier"] is None
    assert _row([1.0] * 50 + [1.6])["outlier"] == 60
    assert _row(even)["of_ranks"] == {str(10 + place): norm for place, norm in enumerate(even)}
    assert "of_ranks" not in _row([1.0] * 17)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_rank_that_is_not_finite_is_named(bad: float) -> None:
    found = _row([1.0, 2.0, bad, 3.0])
    assert (found["argmax"], found["outlier"]) == (12, 12)
    assert math.isnan(found["max"]) if math.isnan(bad) else found["max"] == math.inf
    assert math.isnan(found["min"]) if math.isnan(bad) else (found["min"], found["argmin"]) == (1.0, 10)
    assert _row([1.0, bad])["outlier"] == 11
    assert _row([1.0, bad, bad, 3.0])["outlier"] is None  # which of the two?
    assert _row([bad, bad])["outlier"] is None


def test_of_equal_ranks_the_first_is_named() -> None:
    found = _row([2.0, 1.0, 2.0, 1.0])
    assert (found["argmax"], found["argmin"]) == (10, 11)


def test_the_noise_scale_of_known_noise_is_right() -> None:
    """Gradients g + noise / sqrt(b): the averages of 3000 steps of 4 ranks are within four of their own errors."""
    generator, size, b, world, steps = torch.Generator().manual_seed(0), 50, 8, 4, 3000
    g = torch.randn(size, generator=generator, dtype=torch.float64)
    sigma = 3.0
    noise = torch.randn(steps, world, size, generator=generator, dtype=torch.float64) * sigma / math.sqrt(b)
    own = g + noise
    small, large = own.square().sum(-1).mean(-1), own.mean(1).square().sum(-1)
    norm2, trace = stats.NoiseScale.estimates(small, large, b, b * world)
    for found, true in ((norm2, float(g.square().sum())), (trace, sigma**2 * size)):
        assert abs(float(found.mean()) - true) < 4 * float(found.std()) / math.sqrt(steps)
    assert float(small.mean()) > 1.2 * float(g.square().sum())  # which says how much there is to take off
    stat, state = stats.NoiseScale(b, decay=0.999), stats.NoiseScale(b).start(1)
    sums, power = stat.measures()
    for step in range(steps):
        ranks = torch.tensor([[world, world, 0.0, float(small[step]) * world]], dtype=torch.float64)
        record = stat.record(Found(["w"], {}, {sums: ranks, power: large[step].view(1, 1)}, range(world)), state)
    truth = sigma**2 * size / float(g.square().sum())
    assert record["noise_scale"] == pytest.approx(truth, rel=0.05)


def test_one_batch_size_gives_no_noise_scale_and_one_warning() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with dh.gradients(model, optimizer, stats=[stats.NoiseScale()], every=1) as watch:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step, "plain").backward()
                optimizer.step()
    assert watch.latest == {"step": 2}
    assert [str(w.message)[:10] for w in caught if "NoiseScale" in str(w.message)] == ["NoiseScale"]


def _tensor_parallel(rank: int, kind: Any) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for shards in (False, True):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if shards:
            fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pytest.raises(dh.errors.UsageError, match="tensor parallelism"):
            dh.gradients(model, optimizer, stats=[kind()])
    return True


@pytest.mark.dist
@pytest.mark.parametrize("kind", [stats.Spread, stats.NoiseScale])
def test_ranks_that_share_data_are_refused(ranks: Ranks, kind: Any) -> None:
    assert ranks(_tensor_parallel, kind) == [True] * 2


def _unused(rank: int) -> dict[str, Any]:
    """Rank 1 does not use the second layer."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inner.forward = lambda x: inner[0](x) if rank else inner[1](inner[0](x))
    model = nn.parallel.DistributedDataParallel(inner, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[stats.Spread(per_parameter=True)]) as watch:
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return watch.latest


@pytest.mark.dist
def test_a_rank_without_a_gradient_takes_part(ranks: Ranks) -> None:
    for found in ranks(_unused):
        assert (found["grad_norm/min_rank/param/1.weight"], found["grad_norm/argmin_rank/param/1.weight"]) == (0, 1)
        assert found["grad_norm/max_rank/param/1.weight"] > 0


NAN = math.nan


def _scaled(rank: int, engine: str) -> float:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    watched = [stats.Spread(), stats.Norm()]
    with dh.gradients(model, optimizer, stats=watched, every=1, scaler=scaler) as watch:
        for factor in (1.0, NAN, 1.0):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 0, engine, rank) * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return watch.latest["grad_norm/max_rank"]


def test_a_micro_batch_that_was_thrown_away_is_not_in_the_spread() -> None:
    model, optimizer = small()
    x = torch.ones(1, 2)
    with dh.gradients(model, optimizer, stats=[stats.Spread(), stats.Norm()], every=1) as watch:
        optimizer.zero_grad()
        (model(x).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        (model(x).sum() * 100).backward()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert math.isclose(watch.latest["grad_norm/max_rank"], watch.latest["grad_norm"], rel_tol=1e-6)


@pytest.mark.dist
@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1"])
def test_a_step_that_the_scaler_skipped_is_not_in_the_spread(ranks: Ranks, engine: str) -> None:
    for value in (_scaled(0, "plain"), *ranks(_scaled, engine)):
        assert math.isfinite(value)
