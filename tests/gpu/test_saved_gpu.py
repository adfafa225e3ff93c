"""Saved tensors of a GPU under autocast, with accumulated gradients."""

from __future__ import annotations

import pathlib

import pytest
import torch

import disthooks as dh
from tests.support.models import build, identical
from tests.support.switch import repeatable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def deterministic() -> object:
    """cuDNN and scatter-adds may differ from themselves; what is compared must not."""
    repeatable()
    yield
    repeatable(False)


def test_autocast_and_accumulation(tmp_path: pathlib.Path) -> None:
    model, x = build("transformer")
    model, x = model.cuda().eval(), x.cuda()

    def run() -> list:
        model.zero_grad()
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    truth = run()
    with dh.save_activations(model, "blocks.*", dh.OnCpu()) as saving:
        for _ in range(2):  # what the device had not said by the end of one forward is settled in a later one
            assert identical(run(), truth)
            torch.cuda.synchronize()
    assert saving.report().recast > 0
