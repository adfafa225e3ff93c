"""Statistics as they are logged: moments without cancellation, what is not finite, magnitudes in bins, and names."""

from __future__ import annotations

import itertools
import math
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import UsageError
from tests.support.engines import Fork, close

WATCHED = [stats.Moments(), stats.Extremes(), stats.Zeros(), stats.NonFinite()]
WATCHED += [stats.Norm(), stats.Norm(1.0), stats.MaxAbs(), stats.Histogram()]
NUMBERS = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-12 else 0.0)
SPECIAL = st.sampled_from([math.nan, math.inf, -math.inf, 0.0])


def logged(grads: Sequence[torch.Tensor | None], *watched: Any) -> dict[str, Any]:
    """What is logged of parameters with these gradients."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1) if g is None else torch.zeros_like(g)) for g in grads])
    for parameter, grad in zip(model, grads, strict=True):
        parameter.grad = grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=watched, every=1) as watch:
        optimizer.step()
    return watch.latest


def truth_of(whole: torch.Tensor) -> dict[str, float]:
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


@settings(max_examples=40, deadline=None)
@given(st.lists(NUMBERS | SPECIAL, min_size=1, max_size=40), st.data())
def test_however_tensors_are_split_over_parameters(numbers: list[float], data: st.DataObject) -> None:
    whole = torch.tensor(numbers)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), min_size=2, max_size=2)))
    found, truth = logged([*torch.tensor_split(whole, cuts), None], *WATCHED), truth_of(whole)
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
    found = logged([grad[: size // 3], grad[size // 3 :]], stats.Moments())
    assert close(found["grad_std"], float(exact.std(correction=0)), 1e-6)
    assert abs(found["grad_mean"] - float(exact.mean())) < 1e-7 * ratio
    naive = float(grad.square().mean() - grad.mean().square())
    assert ratio < 1e4 or not close(naive, float(exact.var(correction=0)), 0.1)


@pytest.mark.parametrize("unit", [1e18, 1e37, 1e-25])
@pytest.mark.parametrize("size", [1024, 1025, 2047, 300_001])
def test_squares_that_float32_cannot_hold_count(unit: float, size: int) -> None:
    """Of a row, and of the elements that are left over after the last whole row."""
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)) * unit
    for parts in ([grad], [grad[:1025], grad[1025:]]):
        found = logged(parts, stats.Moments())
        assert math.isclose(found["grad_std"], truth_of(grad)["grad_std"], rel_tol=1e-6)
        assert abs(found["grad_mean"] - truth_of(grad)["grad_mean"]) < 1e-7 * unit


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [3, 2000, 300_000])
def test_what_is_not_finite_is_counted_and_spreads(bad: float, size: int) -> None:
    grad = torch.ones(size)
    grad[0] = grad[-1] = bad
    found = logged([torch.zeros(5), grad], *WATCHED)
    truth = truth_of(torch.cat([grad, torch.zeros(5)]))
    assert close({name: found[name] for name in truth}, truth)
    assert found["grad_histogram"]["counts"][-1] == 2
    assert found["grad_histogram"]["edges"][-2:] == [2.0**32, math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 700, 5000])
def test_nan_of_either_sign_is_counted_last(size: int, dtype: torch.dtype) -> None:
    for nan in (torch.tensor(math.inf) - math.inf, math.inf - torch.tensor(math.inf)):
        for sign in (1, -1):
            grad = torch.full((size,), 1e-3, dtype=dtype)
            grad[size // 2] = sign * nan
            counts = logged([grad], stats.Histogram())["grad_histogram"]["counts"]
            assert (counts[-1], sum(counts)) == (1, size)


def test_nothing_at_all() -> None:
    found = logged([None, torch.zeros(0)], *WATCHED)
    assert all(math.isnan(found[name]) for name in ("grad_mean", "grad_std", "grad_min", "grad_max", "grad_zeros"))
    assert [found[name] for name in ("nonfinite", "grad_norm", "grad_norm_l1", "grad_max_abs")] == [0, 0.0, 0.0, 0.0]
    assert found["grad_histogram"] == {"edges": [], "counts": []}
    assert math.isnan(found["grad_abs_q50"])
    found = logged([torch.full((3,), -math.inf)], stats.Extremes())
    assert (found["grad_min"], found["grad_max"]) == (-math.inf, -math.inf), "minus infinity is not nothing"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    """Rows that overflow, vanish, cancel, are not finite or have zeros lie in the first block and in later ones."""
    most = torch.finfo(dtype).max
    wide = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide[:1024], wide[200_000:201_024], wide[2_500_000:2_502_000] = most, most, torch.finfo(dtype).tiny
    few = wide[1_000_000:1_500_000] + 100
    wide[100_000], wide[299_000], wide[2_150_000:2_160_000] = math.inf, math.nan, 0
    found, threads = [], torch.get_num_threads()
    for number in (threads, 3):
        torch.set_num_threads(number)
        try:
            found.append(logged([wide, few], *WATCHED, stats.Moments(per_parameter=True)))
        finally:
            torch.set_num_threads(threads)
    assert {k: repr(v) for k, v in found[0].items()} == {k: repr(v) for k, v in found[1].items()}
    assert (found[0]["nonfinite"], sum(found[0]["grad_histogram"]["counts"])) == (2, wide.numel() + few.numel())


def test_what_is_not_contiguous_complex_or_expanded() -> None:
    turned = torch.randn(70, 30, generator=torch.Generator().manual_seed(0)).t()
    spread = torch.tensor([2.0]).expand(30, 70)
    found = logged([turned, spread], *WATCHED)
    truth = truth_of(torch.cat([turned.flatten(), spread.flatten()]))
    assert close({name: found[name] for name in truth}, truth, 1e-5)
    magnitudes = [stats.Zeros(), stats.NonFinite(), stats.MaxAbs(), stats.Histogram()]
    numbers = torch.tensor([3 + 4j, 0, complex(math.nan, 0)])
    found = logged([numbers[:2]], *magnitudes)
    assert (found["grad_zeros"], found["grad_max_abs"], found["grad_abs_q99"]) == (0.5, 5.0, pytest.approx(6, rel=0.25))
    assert logged([numbers], *magnitudes)["nonfinite"] == 1
    for kind in (stats.Moments, stats.Extremes):
        with pytest.raises(UsageError, match="'0' is complex"):
            logged([numbers], kind())


# --- magnitudes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, width=32, allow_infinity=False), min_size=1, max_size=60),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.floats(0, 1),
)
def test_bins_hold_what_they_say_and_bound_the_quantiles(numbers: list[float], dtype: torch.dtype, q: float) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    found = logged([values[:7], -values[7:]], stats.Histogram((q,)))
    sizes, (edges, counts) = values.double().sort().values, found["grad_histogram"].values()
    for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True):
        assert count == int(((sizes >= low) & ((sizes < high) | (high == math.inf))).sum())
    assert sum(counts) == len(numbers)
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
    found = logged([values], stats.Histogram())
    for q in (0.01, 0.5, 0.99):
        true = float(values.abs().double().sort().values[int(q * size)])
        assert close(found[f"grad_abs_q{100 * q:g}"], true, 0.05 if size > 10_000 else 0.25)
    assert sum(found["grad_histogram"]["counts"]) == size


def test_two_quantiles_do_not_share_a_name() -> None:
    grad = torch.cat([torch.ones(999_990), torch.full((10,), 1e6)])
    found = logged([grad], stats.Histogram((0.9999999, 1.0, 0.5)))
    assert len([name for name in found if name.startswith("grad_abs_q")]) == 3


# --- what is refused


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


def test_two_statistics_that_write_the_same_names_are_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="two Spread would write the same names"):
        dh.gradients(model, optimizer, stats=[stats.Spread(), stats.Spread(3.0)])
    assert not optimizer._optimizer_step_pre_hooks


# --- Parts of a model that a step did not use


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
