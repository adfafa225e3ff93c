"""``nn.DataParallel`` on one device twice, where torch does that, and on several."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.models import Tiny, identical, step, stores, tokens
from tests.support.switch import repeatable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("ids", [[0, 0], [0, 1]], ids=["one twice", "two"])
def test_replicas_in_threads(ids: list[int], kind: str, tmp_path: pathlib.Path) -> None:
    if max(ids) >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    torch.manual_seed(0)
    model, x = Tiny().cuda().eval(), tokens().cuda()  # no dropout: threads share the generator of a device
    repeatable()
    try:
        try:
            truth = step(nn.DataParallel(model, ids), x)
        except (RuntimeError, ValueError) as error:
            pytest.skip(f"torch itself cannot: {error}")
        with dh.save_activations(model, "blocks.*", stores(tmp_path)[kind]) as saving:
            got = step(nn.DataParallel(model, ids), x)
    finally:
        repeatable(False)
    report = saving.report()
    assert report.calls == 2 * len(model.blocks), "each replica opens its own"
    assert report.moved > 10_000
    assert report.held == 0
    # A reduction of two replicas adds in one order or the other.
    assert identical(got, truth) or all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, truth, strict=True))
