"""Every model of the zoo runs a step for real, and saves as much as a test can see."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from tests.support import oracle, zoo


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.first_tier(name=zoo.FEW)
@pytest.mark.parametrize("name", zoo.names())
def test_every_model_runs_a_step(name: str) -> None:
    if name not in zoo.FEW:
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    model, inputs = zoo.build(name)
    measured = oracle.measure(model, inputs, functools.partial(zoo.context, name), tracker=False)
    assert 512 << 10 < measured.saved_bytes + measured.saved_inputs < 50 << 20
    assert model.training
    oracle.forward(model, inputs, functools.partial(zoo.context, name)).backward()
    without = [each for each, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not without
