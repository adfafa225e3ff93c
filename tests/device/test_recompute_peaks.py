"""Recompute's memory in each step on a device: comparisons of trusted places hold no originals, whatever the lag."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.gated import Gated
from tests.support.sim import simulated

ROWS, WIDTH, STEPS = 256, 64, 17
ONE = ROWS * 3 * WIDTH * 4  # bytes of the largest saved tensor


@pytest.fixture(params=[None, 40, simulated.FOR_EVER], ids=["in step", "40 behind", "a step behind"])
def slack(device: torch.device, request: pytest.FixtureRequest) -> Iterator[int]:
    """The bytes by which peaks may differ: when a device frees memory is a matter of time if it is in step."""
    if device.type != "sim" and request.param is not None:
        pytest.skip("how far a real host runs ahead nobody decides")
    with simulated.lag(request.param) if request.param else contextlib.nullcontext():
        yield ONE if request.param else 2 * ONE


def _peaks(
    model: nn.Module, x: torch.Tensor, how: str, line: object | None, steps: int = STEPS
) -> tuple[list[int], list[int]]:
    """The peak of each step over what lay there before, and the bytes that each step dropped."""
    peaks, dropped, last = [], [], 0
    attached = dh.save_activations(model, "", line) if how == "attached" and line is not None else None
    for _ in range(steps):
        model.zero_grad()
        before = torch.accelerator.memory_allocated(x.device)
        torch.accelerator.reset_peak_memory_stats(x.device)
        with dh.saving(line) if how == "saving" and line is not None else contextlib.nullcontext() as saved:
            loss = model(x).square().sum()
        loss.backward()
        del loss
        peaks.append(torch.accelerator.max_memory_allocated(x.device) - before)
        if line is None:
            continue
        report = (attached or saved).report()
        dropped.append(report.recomputed - last)
        last = report.recomputed if attached else 0
        if attached:
            assert report.recomputed_in_steps == tuple(dropped[-16:])
    if attached:
        attached.remove()
    return peaks, dropped


CASES = [("attached", "sampled", 0), ("attached", "sampled", 2), ("saving", "sampled", 0), ("attached", "always", 0)]


@pytest.mark.parametrize(("how", "check", "products"), CASES)
def test_no_step_needs_more_memory_than_the_third(
    how: str, check: str, products: int, slack: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*[Gated(WIDTH, bias=True) for _ in range(6)]).to(device),
        torch.randn(ROWS, WIDTH).to(device),
    )
    without, _ = _peaks(model, x, how, None, 3)
    recompute = dh.Recompute(check=check, products=products)  # type: ignore[arg-type]
    line = pipeline(recompute, dh.OnDevice("1 GiB"), at_least=0)
    peaks, dropped = _peaks(model, x, how, line)
    assert dropped[0] > 6 * ONE * (1 + products)
    assert dropped == [dropped[0]] * STEPS
    assert max(peaks[1:]) <= peaks[2] + slack, peaks
    assert peaks[0] <= peaks[2] + 2 * ONE + 2 * slack, "the operators of the first proofs need room for a moment"
    if check == "sampled":  # the other computes each tensor twice in forward
        assert peaks[2] < without[2] - 6 * ONE * (1 + products) + 3 * ONE
    else:
        assert peaks[2] < without[2]


def test_a_comparison_in_forward_brings_nothing_else_back(device: torch.device) -> None:
    """A tensor that a comparison reads is no sign that backward has begun."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*[Gated(WIDTH, bias=True) for _ in range(12)]).to(device),
        torch.randn(ROWS, WIDTH).to(device),
    )
    limit, written = 4 * ONE, [0]
    tiers = dh.Tiered(dh.OnDevice(limit), dh.OnCpu())
    with dh.save_activations(model, "", pipeline(dh.Recompute(), tiers, at_least=0)) as saving:
        for step in range(STEPS):
            loss = model(x).square().sum()
            torch.accelerator.synchronize()
            nearest, host = (store.open() for store in tiers.stores)
            assert nearest.budget.of(device).held + host.device_bytes(device) <= limit, step
            loss.backward()
            written.append(saving.report().tiers[1].written)
    steps = [after - before for before, after in itertools.pairwise(written)]
    assert steps[-1] > ONE
    assert steps[2:] == steps[-1:] * (STEPS - 2), "a comparison does not change the plan"
