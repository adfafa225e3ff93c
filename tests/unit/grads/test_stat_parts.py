"""The pieces of statistics: what one reading finds, moments without cancellation, magnitudes in bins."""

from __future__ import annotations

import math
import pathlib
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.engines.base import Engine
from disthooks.errors import UsageError
from disthooks.grads.plan import VectorLayout
from disthooks.grads.stats import scan as scanning
from disthooks.grads.stats.base import CountRows, Found, Local, LocalStats, Measure
from disthooks.grads.stats.elements import BINS, ExtremeValues, MagnitudeCounts, MomentSums, ZeroCount, edges, quantile
from disthooks.grads.stats.nonfinite import NonFiniteCount
from disthooks.grads.stats.norms import Power
from disthooks.testing import same_bits
from tests.support.engines import Fork, close

CPU = torch.device("cpu")
ALL = [MomentSums(), ExtremeValues(), ZeroCount(), NonFiniteCount(), Power(1.0), Power(2.0), Power(math.inf)]
NUMBERS = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-12 else 0.0)
SPECIAL = st.sampled_from([math.nan, math.inf, -math.inf, 0.0])


def _shards(count: int) -> Any:
    return Engine(nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])).shards


def _found(measures: list[Measure], ranks: list[list[torch.Tensor | None]], scopes: Any = None) -> Found:
    """What is merged of ranks that have these gradients."""
    count = len(ranks[0])
    everything = tuple(range(count))
    layout = VectorLayout({m: everything for m in measures}, _shards(count), scopes or [everything])
    parts = [
        layout.pack(Local(layout.shards, grads, [LocalStats()] * count, layout.scopes, place, len(ranks), CPU))
        for place, grads in enumerate(ranks)
    ]
    merged = torch.stack([p[0] for p in parts]).sum(0), torch.stack([p[1] for p in parts]).amax(0)
    rows = {m: row.view(len(layout.sizes[m]), -1) for m, row in layout.unpack(merged).items()}
    return Found([str(i) for i in everything], {}, rows, list(range(len(ranks))))


def _recorded(watched: list[stats.Stat], *ranks: list[torch.Tensor | None]) -> dict[str, Any]:
    found = _found([m for stat in watched for m in stat.measures()], list(ranks))
    return {name: value for stat in watched for name, value in stat.record(found).items()}


WATCHED = [stats.Moments(), stats.Extremes(), stats.Zeros(), stats.NonFinite()]
WATCHED += [stats.Norm(), stats.Norm(1.0), stats.MaxAbs()]


def _truth(whole: torch.Tensor) -> dict[str, float]:
    exact = whole.double()
    return {
        "grad_mean": float(exact.mean()),
        "grad_std": float(exact.std(correction=0)),
        "grad_min": float(exact.min()),
        "grad_max": float(exact.max()),
        "grad_zeros": float((exact == 0).double().mean()),
        "nonfinite": int((~exact.isfinite()).sum()),
        "grad_norm": float(exact.norm()),
        "grad_norm_l1": float(exact.abs().sum()),
        "grad_max_abs": float(exact.abs().max()),
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS | SPECIAL, min_size=1, max_size=40), st.data())
def test_however_tensors_are_split_over_ranks_and_parameters(numbers: list[float], data: st.DataObject) -> None:
    whole = torch.tensor(numbers)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), min_size=3, max_size=3)))
    a, b, c, d = torch.tensor_split(whole, cuts)
    found, truth = _recorded(WATCHED, [a, b, None], [c, None, d]), _truth(whole)
    size = float(whole.double().abs().max())
    for name, value in truth.items():
        near = math.isclose(found[name], value, rel_tol=1e-5, abs_tol=1e-5 * size if math.isfinite(size) else 0.0)
        assert near or close(found[name], value), name


@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("size", [900, 5000, 300_000])
def test_a_mean_far_from_zero_costs_no_digits(ratio: float, size: int) -> None:
    """The sum of squares of float32 numbers, less the square of the sum, gives anything here."""
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)) + ratio
    exact = grad.double()
    found = _recorded([stats.Moments()], [grad[: size // 3], None], [grad[size // 3 : size // 2], grad[size // 2 :]])
    assert close(found["grad_std"], float(exact.std(correction=0)), 1e-6)
    assert abs(found["grad_mean"] - float(exact.mean())) < 1e-7 * ratio
    naive = float(grad.square().mean() - grad.mean().square())
    assert ratio < 1e4 or not close(naive, float(exact.var(correction=0)), 0.1)


@pytest.mark.parametrize("unit", [1e18, 1e37, 1e-25])
@pytest.mark.parametrize("size", [1024, 1025, 2047, 300_001])
def test_squares_that_float32_cannot_hold_count(unit: float, size: int) -> None:
    """Of a row, and of the elements that are left over after the last whole row."""
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)) * unit
    for first, second in ((grad, grad[:0]), (grad[:1025], grad[1025:])):
        found = _recorded([stats.Moments()], [first, None], [None, second])
        assert math.isclose(found["grad_std"], _truth(grad)["grad_std"], rel_tol=1e-6)
        assert abs(found["grad_mean"] - _truth(grad)["grad_mean"]) < 1e-7 * unit


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [3, 2000, 300_000])
def test_what_is_not_finite_is_counted_and_spreads(bad: float, size: int) -> None:
    grad = torch.ones(size)
    grad[0] = grad[-1] = bad
    found = _recorded([*WATCHED, stats.Histogram()], [None, torch.zeros(5)], [grad, None])
    truth = _truth(torch.cat([grad, torch.zeros(5)]))
    assert close({name: found[name] for name in truth}, truth)
    assert found["grad_histogram"]["counts"][-1] == 2
    assert found["grad_histogram"]["edges"][-2:] == [2.0**32, math.inf]


def test_nothing_at_all() -> None:
    found = _recorded([*WATCHED, stats.Histogram()], [None, torch.zeros(0)], [None, None])
    assert all(math.isnan(found[name]) for name in ("grad_mean", "grad_std", "grad_min", "grad_max", "grad_zeros"))
    assert [found[name] for name in ("nonfinite", "grad_norm", "grad_norm_l1", "grad_max_abs")] == [0, 0.0, 0.0, 0.0]
    assert found["grad_histogram"] == {"edges": [], "counts": []}
    assert math.isnan(found["grad_abs_q50"])
    found = _recorded([stats.Extremes()], [torch.full((3,), -math.inf)])
    assert (found["grad_min"], found["grad_max"]) == (-math.inf, -math.inf), "minus infinity is not nothing"


def test_gradients_are_read_once_for_all_that_is_measured() -> None:
    with mock.patch.object(scanning, "scan", wraps=scanning.scan) as reading:
        _found([*ALL, MagnitudeCounts()], [[torch.ones(3), None]])
    assert reading.call_count == 1
    with mock.patch.object(scanning, "scan", wraps=scanning.scan) as reading:
        _found([Power(2.0), NonFiniteCount()], [[torch.ones(3), None]])
        assert not reading.called, "a norm that is finite tells that all elements are"
        _found([Power(2.0), NonFiniteCount()], [[torch.tensor([1.0, math.inf]), None]])
    assert reading.call_args.args[1] == {"squares", "nonfinite"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 700, 5000])
def test_nan_of_either_sign_is_counted_last(size: int, dtype: torch.dtype) -> None:
    for nan in (torch.tensor(math.inf) - math.inf, math.inf - torch.tensor(math.inf)):
        for sign in (1, -1):
            grad = torch.full((size,), 1e-3, dtype=dtype)
            grad[size // 2] = sign * nan
            counts = scanning.scan([grad], frozenset({"high", "low"}), CPU, CountRows([0], 1)).counts[0]
            assert counts[-1] == 1
            assert counts.sum() == size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bits_depend_neither_on_blocks_nor_on_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that overflow, vanish, cancel, are not finite or have zeros lie in the first block and in later ones."""
    most = torch.finfo(dtype).max
    wide = torch.randn(300_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide[:1024], wide[200_000:201_024], wide[250_000:252_000] = most, most, torch.finfo(dtype).tiny
    wide[100_000], wide[299_000], wide[150_000:160_000] = math.inf, math.nan, 0
    grads = [wide, *torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)).to(dtype) + 100, wide[:1500]]
    facts, rows = frozenset(scanning._ORDER), CountRows([i % 2 for i in range(len(grads))], 2)
    found = []
    threads = torch.get_num_threads()
    for block, number in ((2**20, threads), (2**13, threads), (2**16, 3)):
        monkeypatch.setitem(scanning._BLOCK, "cpu", block)
        torch.set_num_threads(number)
        try:
            found.append(scanning.scan(grads, facts, CPU, rows))
        finally:
            torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(other.counts, found[0].counts)
        for name in facts:
            assert same_bits(other.facts[name], found[0].facts[name]), name
    assert found[0].counts.sum() == sum(grad.numel() for grad in grads)
    assert found[0].facts["zeros"][0] == 10_000
    assert found[0].facts["nonfinite"].tolist() == [2] + [0] * 41


def test_what_is_not_contiguous_complex_or_expanded() -> None:
    generator = torch.Generator().manual_seed(0)
    turned = torch.randn(70, 30, generator=generator).t()
    spread = torch.tensor([2.0]).expand(30, 70)
    found = _recorded(WATCHED, [turned, spread])
    truth = _truth(torch.cat([turned.flatten(), spread.flatten()]))
    assert close({name: found[name] for name in truth}, truth, 1e-5)
    magnitudes = [stats.Zeros(), stats.NonFinite(), stats.MaxAbs(), stats.Histogram()]
    numbers = torch.tensor([3 + 4j, 0, complex(math.nan, 0)])
    found = _recorded(magnitudes, [numbers[:2]])
    assert (found["grad_zeros"], found["grad_max_abs"], found["grad_abs_q99"]) == (0.5, 5.0, pytest.approx(6, rel=0.25))
    assert _recorded(magnitudes, [numbers])["nonfinite"] == 1


@pytest.mark.parametrize("kind", [stats.Moments, stats.Extremes])
def test_signed_statistics_refuse_complex_parameters(kind: Any) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(UsageError, match="'0' is complex"):
        dh.gradients(model, torch.optim.SGD(model.parameters()), stats=[kind()])


# --- magnitudes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, width=32, allow_infinity=False), min_size=1, max_size=60),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.floats(0, 1),
)
def test_bins_hold_what_they_say_and_bound_the_quantiles(numbers: list[float], dtype: torch.dtype, q: float) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    found = _recorded([stats.Histogram((q,))], [values[:7], -values[7:]])
    sizes, ends = values.double().sort().values, edges()
    expected = torch.histogram(sizes.clamp(max=2.0**33), torch.cat([ends[:-1], torch.tensor([2.0**34])])).hist
    counts = torch.zeros(BINS, dtype=torch.float64)
    start = ends.tolist().index(found["grad_histogram"]["edges"][0])
    counts[start : start + len(found["grad_histogram"]["counts"])] = torch.tensor(
        found["grad_histogram"]["counts"], dtype=torch.float64
    )
    assert counts.tolist() == expected.tolist()
    true = float(sizes[max(0, math.ceil(q * len(numbers)) - 1)])
    ours = found[f"grad_abs_q{100 * q:.12g}"]
    if true < 2.0**-64:
        assert ours == 0
    elif true >= 2.0**32:
        assert ours == math.inf
    else:
        assert abs(ours - true) <= 0.25 * true


@pytest.mark.parametrize("size", [1000, 70_000, 400_000])
def test_quantiles_of_many(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-6
    found = _recorded([stats.Histogram()], [values])
    for q in (0.01, 0.5, 0.99):
        true = float(values.abs().double().sort().values[int(q * size)])
        assert close(found[f"grad_abs_q{100 * q:g}"], true, 0.05 if size > 10_000 else 0.25)
    assert sum(found["grad_histogram"]["counts"]) == size


def test_groups_share_what_they_count() -> None:
    grads = [torch.full((n,), 2.0**n) for n in (1, 2, 3, 4)]
    scopes = [(0, 1, 2, 3), (0, 1), (1, 2)]
    rows = _found([MagnitudeCounts()], [grads], scopes).rows[MagnitudeCounts()]
    each = _found([MagnitudeCounts(True)], [grads], scopes).rows[MagnitudeCounts(True)]
    assert torch.equal(rows, torch.stack([each[list(scope)].sum(0) for scope in scopes]))
    assert each.sum(1).tolist() == [1, 2, 3, 4]


def test_a_quantile_of_one_bin_lies_inside_it() -> None:
    counts = torch.zeros(2, BINS, dtype=torch.float64)
    counts[0, 257] = 4
    assert [float(quantile(counts, q)[0]) for q in (0.0, 0.5, 1.0)] == [1.0, 1.125, 1.25]
    assert math.isnan(quantile(counts, 0.5)[1])


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        (stats.Histogram, {"quantiles": ("half",)}, "from 0 to 1"),
        (stats.NoiseScale, {"batch_size": True}, "batch_size"),
        (stats.NoiseScale, {"decay": 1.0}, "decay"),
        (stats.NoiseScale, {"decay": "fast"}, "decay"),
        (stats.Spread, {"outlier": 0}, "above 0"),
    ],
)
def test_arguments_are_checked(kind: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        kind(**arguments)


def test_a_statistic_that_is_gone_says_what_to_use() -> None:
    with pytest.raises(AttributeError, match=r"'Agreement': it went in 0\.2; Spread"):
        stats.Agreement  # noqa: B018
    with pytest.raises(dh.errors.ConfigError, match=r"'Agreement' cannot be a stat here; it went in 0\.2: Spread"):
        dh.config.from_config({"watch": {"stats": [{"kind": "Agreement"}]}})


def test_two_statistics_that_write_the_same_names_are_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="two Spread would write the same names"):
        dh.gradients(model, optimizer, stats=[stats.Spread(), stats.Spread(3.0)])
    assert not optimizer._optimizer_step_pre_hooks


# --- Parts of a model that a step did not use, and names


def test_a_dropped_batch_that_used_another_branch_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model, x = Fork(), torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[stats.Norm(), stats.Spread()], every=1) as watch:
        model(x, True).square().sum().mul(100).backward()
        optimizer.zero_grad()  # thrown away; now a batch that does not use `left`
        model(x, False).square().sum().backward()
        optimizer.step()
    assert watch.latest["grad_norm/max_rank"] == pytest.approx(watch.latest["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("kind", ["console", "tensorboard"])
def test_an_empty_histogram_does_not_end_a_sink(tmp_path: pathlib.Path, kind: str) -> None:
    """A group that this step did not use has no elements: the sink must go on."""
    lines: list[str] = []
    sink = dh.sinks.Console(lines.append) if kind == "console" else dh.sinks.TensorBoard(tmp_path)
    model, x = Fork(), torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # "failed and is left out from now on: IndexError(...)"
        with dh.gradients(model, optimizer, stats=stats.standard(), groups={"left": "left.*"}, sinks=[sink], every=1):
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
    found = _logged(grad, stats.Histogram((0.9999999, 1.0, 0.5)))
    assert len([name for name in found if name.startswith("grad_abs_q")]) == 3


def test_zeros_in_some_gradients_only() -> None:
    """Whether a block has zeros is known from its counts, also if nobody asks how many."""
    grads, rows = [torch.ones(2000), torch.zeros(1500)], CountRows([0, 1], 2)
    found = scanning.scan(grads, frozenset({"sum"}), CPU, rows)
    assert found.facts["sum"].tolist() == [2000, 0]
    assert found.counts.sum(1).tolist() == [2000, 1500]
    assert scanning.scan(grads, frozenset({"zeros"}), CPU, rows).facts["zeros"].tolist() == [0, 1500]
