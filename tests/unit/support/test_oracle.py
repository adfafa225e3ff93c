"""The oracle counts what there is: against sums by hand, torch's MemTracker and torch's allocator."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.support import oracle, zoo

pytestmark = pytest.mark.full_tier  # a test of the tests

adam = functools.partial(torch.optim.AdamW, lr=1e-3)


class Slice(nn.Module):
    """Saves a small view of a large storage, and makes a graph that it drops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (x * 3.0).exp()
        return (x * 2.0)[:, :1].exp().log().sum()


def test_saved_bytes_are_those_counted_by_hand() -> None:
    measured = oracle.measure(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.ones(2, 8))
    assert measured.by_module == {"1": 2 * 4 * 4}  # the output of the ReLU; the loss saves it too
    assert measured.inputs_by_module == {"0": 2 * 8 * 4}
    assert (measured.saved_bytes, measured.saved_inputs) == (32, 64)
    # The results of exp, 4 elements: saved by exp itself and by log. Of x * 2.0 nothing is saved.
    assert oracle.measure(Slice(), torch.ones(4, 100, requires_grad=True)).saved_bytes == 16


@pytest.mark.parametrize("name", ["resnet18", "lstm", "dit_autocast"])
def test_the_peak_is_that_of_memtracker(name: str) -> None:
    model, inputs = zoo.build(name)
    context = functools.partial(zoo.context, name)
    with oracle.unchanged(model):
        tracked, by_category = oracle.tracked(model, inputs, context, adam)
    assert tracked == oracle.measure(model, inputs, context, adam).peak_bytes == sum(by_category.values())


def test_the_allocator_gave_out_what_was_counted() -> None:
    model, inputs = zoo.build("lstm")
    with oracle.unchanged(model):
        allocated = oracle.allocated_peak(model, inputs)
    assert allocated == oracle.measure(model, inputs).peaks


def test_autograd_adds_in_place_where_no_mode_looks() -> None:
    """See [Note: a mode is seen] in tests/support/oracle.py."""

    class Fan(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            return sum((y * float(scale)).sum() for scale in range(1, 5))

    model, inputs = Fan(), (torch.ones(1 << 18, requires_grad=True),)
    allocated = oracle.allocated_peak(model, inputs)["backward"]
    # Up to the few bytes that operators take inside themselves. MemTracker sees one gradient more than there is.
    assert abs(allocated - oracle.measure(model, inputs).peaks["backward"]) < 1024


def test_the_largest_batch_is_the_largest() -> None:
    build = functools.partial(zoo.build, "mlp", seq=32)
    limit = oracle.measure(*build(batch=37), optimizer=adam).peak_bytes
    assert oracle.largest_batch(lambda batch: build(batch=batch), limit, optimizer=adam) == 37
    assert oracle.largest_batch(lambda batch: build(batch=batch), 1, optimizer=adam) == 0
