"""Law 13: rules and statistics never make the host wait, in a step that is logged or not; and truth on the device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.grads.stats.base import CountRows
from disthooks.grads.stats.scan import _ORDER, scan
from tests.support.engines import close, grads_of, loss_of, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RULES = [dh.SkipNonFinite(3), dh.ClipNorm(1.0), dh.only("*.bias", dh.ClipNorm(0.5)), dh.ClipValue(0.1)]
MORE = [dh.ClipAdaptive(), dh.ClipPercentile(), dh.ClipZScore(), dh.Sanitize(), dh.Scale(0.5)]
STATS = [*stats.standard(per_parameter=True), stats.MaxAbs(), stats.Weights(), stats.Updates(), stats.Spread()]


@pytest.mark.parametrize("rules", [RULES, MORE], ids=["clip", "adapt"])
def test_no_host_sync(rules: list) -> None:
    model = make("plain").cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=True)
    inputs = torch.randn(8, 6, device="cuda")
    with dh.gradients(model, optimizer, rules=rules, stats=STATS, every=2) as watch:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                model(inputs).square().mean().backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert watch.latest["step"] == 2
    assert watch.latest["step"] == 4
    assert watch.latest["nonfinite"] == 0
    assert math.isfinite(watch.latest["grad_norm"])


def test_the_device_gives_what_the_cpu_gives() -> None:
    truth = make("plain")
    loss_of(truth, 0, "plain").backward()
    model = make("plain").cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for mine, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        mine.grad = theirs.grad.cuda()
    torch.nn.utils.clip_grad_norm_(truth.parameters(), 1.0)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]):
        optimizer.step()
    assert close({name: grad.cpu() for name, grad in grads_of(model).items()}, grads_of(truth))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_reading_finds_what_it_finds_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 1000, 2048, 32_768, 1_000_003, 3_000_001)
    grads = [(torch.randn(n, generator=generator) * 10.0 ** (i - 3)).to(dtype) for i, n in enumerate(sizes)]
    grads[1][3], grads[4][::7], grads[5][-1] = math.nan, 0, -math.inf
    rows, device = CountRows([i % 2 for i in range(len(grads))], 2), torch.device("cuda", 0)
    found = scan([grad.to(device) for grad in grads], frozenset(_ORDER), device, rows)
    host = scan(grads, frozenset(_ORDER), torch.device("cpu"), rows)
    assert torch.equal(found.counts.cpu(), host.counts)
    for name in _ORDER:
        assert torch.allclose(found.facts[name].cpu(), host.facts[name], rtol=1e-6, atol=1e-6, equal_nan=True), name


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 4)).cuda()


def test_watching_adds_no_host_sync() -> None:
    model, x = _net(), torch.randn(16, 8, device="cuda")
    model(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with dh.trace(model, print=None) as traced, dh.features(model, "*", copy=True) as seen:
            model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen["0"].is_cuda
    assert {"forward_pre", "forward"} == {event.kind for event in traced.events}
