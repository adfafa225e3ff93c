"""The kernels of the statistics in Triton's interpreter, against torch's operations.

Triton decides when it is imported whether it interprets: ``unit/test_kernels.py`` runs this in a process of its own.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from disthooks.grads.stats import fused
from disthooks.grads.stats.base import CountRows, Fact
from disthooks.grads.stats.scan import _by_kernels, _by_operations, scan

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NAMES: list[Fact] = ["count", "sum", "m2", "squares", "abs", "zeros", "nonfinite", "high", "low"]
SIZES = (1, 7, 1023, 1024, 2047, 2048, 2049, 9000, 32769)
EXACT = ("count", "zeros", "nonfinite", "high", "low")


def numbers(kind: str, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":  # infs, nans with payloads, -0.0, subnormals
        return torch.randint(0, 256, (n * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    x = torch.randn(n, generator=generator)
    if kind == "mostly zeros":
        x = torch.where(x > 2, x, 0) * (torch.arange(n) > n // 2)
    elif kind == "many octaves":
        x *= torch.logspace(-36, 30, n)
    elif kind == "far from zero":
        x += 1000
    elif kind == "infinite":
        x[n // 3], x[n // 2] = math.inf, -math.inf
    return x.to(dtype)


def exactly(grad: torch.Tensor) -> dict[str, float]:
    wide = grad.double()
    mean = wide.mean()
    return {
        "sum": float(wide.sum()),
        "m2": float((wide - mean).square().sum()),
        "squares": float(wide.square().sum()),
        "abs": float(wide.abs().sum()),
    }


KINDS = ["normal", "bits", "mostly zeros", "many octaves", "far from zero", "infinite"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_find_what_torch_finds(kind: str, dtype: torch.dtype) -> None:
    grads = [numbers(kind, n, dtype, n) for n in SIZES]
    rows = CountRows([i % 3 for i in range(len(grads))], 3)
    given = list(enumerate(grads))
    (kernels,) = _by_kernels(given, NAMES, rows)
    torchs = _by_operations(given, NAMES, rows)
    assert torch.equal(kernels.counts, torchs[-1].counts)
    assert int(kernels.counts.sum()) == sum(SIZES)
    columns = {i: part.table[:, at] for part in torchs for at, i in enumerate(part.places)}
    for i, grad in given:
        mine, theirs = dict(zip(NAMES, kernels.table[:, i], strict=True)), dict(zip(NAMES, columns[i], strict=True))
        for name in EXACT:
            assert mine[name] == theirs[name] or (mine[name].isnan() and theirs[name].isnan()), (name, len(grad))
        truth = exactly(grad)
        for name, value in truth.items():
            found = float(mine[name])
            # A sum has an error relative to the magnitudes that were added.
            scale = abs(value) if name != "sum" else truth["abs"]
            if math.isfinite(value) and math.isfinite(scale):
                assert abs(found - value) <= 1e-12 * scale, (name, len(grad), found, value)
                assert abs(float(theirs[name]) - value) <= 1e-6 * scale or name == "m2"
            else:
                assert not math.isfinite(found), (name, len(grad))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_mean_far_from_zero_costs_no_digits(dtype: torch.dtype) -> None:
    grad = numbers("far from zero", 40_000, dtype)
    facts = dict(zip(fused.FACTS, fused.read([grad]).facts[:, 0].tolist(), strict=True))
    assert math.isclose(facts["m2"], exactly(grad)["m2"], rel_tol=1e-9)


def test_a_first_element_far_from_the_rest_costs_no_digits() -> None:
    grad = torch.randn(40_000)
    grad[0] = 1e6
    facts = dict(zip(fused.FACTS, fused.read([grad]).facts[:, 0].tolist(), strict=True))
    assert math.isclose(facts["m2"], exactly(grad)["m2"], rel_tol=1e-9)


def test_the_facts_of_a_gradient_do_not_depend_on_the_others() -> None:
    """Nor on the address, on whether it is counted, and on the dtypes that are read in the same call."""
    grads = [numbers("normal", n, dtype, n) for n in (33_000, 5) for dtype in FLOATS]
    grads += [numbers("normal", 40_001, torch.float32)[1:], numbers("normal", 900, torch.float32).view(30, 30).t()]
    together = fused.read(grads, CountRows([0] * len(grads), 1))
    order = random.Random(0).sample(range(len(grads)), len(grads))
    mixed = fused.read([grads[i] for i in order])
    assert mixed.counts is None
    for at, i in enumerate(order):
        alone = fused.read([grads[i].clone()]).facts[:, 0]
        assert torch.equal(alone, together.facts[:, i])
        assert torch.equal(alone, mixed.facts[:, at])


def test_a_scan_takes_each_gradient_by_the_way_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [torch.randn(3000), None, torch.randn(50, dtype=torch.float64), torch.zeros(0), torch.randn(5).bfloat16()]
    rows = CountRows([0, 0, 1, 0, 1], 2)
    plain = scan(grads, frozenset(NAMES), torch.device("cpu"), rows)
    monkeypatch.setattr(fused, "usable", lambda grad: grad.dtype in FLOATS)
    found = scan(grads, frozenset(NAMES), torch.device("cpu"), rows)
    assert torch.equal(found.counts, plain.counts)
    for name in NAMES:
        assert torch.allclose(found.facts[name], plain.facts[name], rtol=1e-6, equal_nan=True), name
    assert torch.equal(scan(grads, frozenset(), torch.device("cpu"), rows).counts, plain.counts)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_check_of_a_device_passes(dtype: torch.dtype) -> None:
    fused.check(torch.device("cpu"), dtype)


@pytest.mark.parametrize("what", ["facts", "counts"])
def test_the_check_of_a_device_notices_wrong_numbers(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = fused.read

    def wrong(grads: list[torch.Tensor], counting: CountRows | None = None) -> fused.RowFacts:
        found = true(grads, counting)
        getattr(found, what)[0, 0] += 1
        return found

    monkeypatch.setattr(fused, "read", wrong)
    with pytest.raises(RuntimeError, match="other facts" if what == "facts" else "other magnitudes"):
        fused.check(torch.device("cpu"), torch.float32)


def test_wrong_numbers_mean_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "read", lambda grads, counting=None: fused.RowFacts(torch.zeros(8, 1), None))
    with pytest.warns(UserWarning, match="the kernel counts other magnitudes"):
        assert not fused._works(torch.device("cpu"), torch.float32)
