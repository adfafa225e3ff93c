"""The oracle counts what there is: against sums by hand, torch's MemTracker, torch's allocator and disthooks' hooks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.support import oracle, zoo

pytestmark = pytest.mark.full_tier  # a test of the tests

adam = functools.partial(torch.optim.AdamW, lr=1e-3)


def context(name: str) -> oracle.MakeContext:
    return functools.partial(zoo.context, name)


def test_saved_bytes_are_those_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    measured = oracle.measure(model, torch.ones(2, 8), tracker=False)
    assert measured.by_module == {"1": 2 * 4 * 4}  # the output of the ReLU; the loss saves it too
    assert measured.inputs_by_module == {"0": 2 * 8 * 4}
    assert (measured.saved_bytes, measured.saved_inputs) == (32, 64)


class Slice(nn.Module):
    """Saves a small view of a large storage, and makes a graph that it drops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (x * 3.0).exp()
        return (x * 2.0)[:, :1].exp().log().sum()


def test_a_view_keeps_its_storage_and_a_dropped_graph_keeps_nothing() -> None:
    measured = oracle.measure(Slice(), torch.ones(4, 100, requires_grad=True), tracker=False)
    # The results of exp, 4 elements: saved by exp itself and by log. Of x * 2.0 nothing is saved.
    assert measured.saved_bytes == 16
    measured = oracle.measure(nn.Sequential(nn.Linear(2, 100), Squares()), torch.ones(4, 2), tracker=False)
    assert measured.by_module["1"] == 4 * 100 * 4  # all of the storage of which a column is saved


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1].square().sum()


@pytest.mark.parametrize("name", ["resnet18", "lstm", "dit_autocast"])
def test_the_peak_is_that_of_memtracker(name: str) -> None:
    model, inputs = zoo.build(name)
    measured = oracle.measure(model, inputs, context(name), adam)
    assert measured.tracked_peak == measured.peak_bytes
    assert measured.by_category["Parameter"] == sum(weight.nbytes for weight in model.parameters())
    assert sum(measured.by_category.values()) == measured.peak_bytes
    moments = 2 * sum(weight.nbytes for weight in model.parameters())
    assert measured.optimizer_state == moments + 4 * len(list(model.parameters()))  # a step count for each


def test_the_allocator_gave_out_what_was_counted() -> None:
    model, inputs = zoo.build("lstm")
    with oracle.unchanged(model):
        allocated = oracle.allocated_peak(model, inputs)
    measured = oracle.measure(model, inputs, tracker=False)
    assert allocated == measured.peaks


def test_autograd_adds_in_place_where_no_mode_looks() -> None:
    """See [Note: a mode is seen] in tests/support/oracle.py."""

    class Fan(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            return sum((y * float(scale)).sum() for scale in range(1, 5))

    model, inputs = Fan(), (torch.ones(1 << 18, requires_grad=True),)
    allocated = oracle.allocated_peak(model, inputs)["backward"]
    measured = oracle.measure(model, inputs)
    # Up to the few bytes that operators take inside themselves. MemTracker sees one gradient more than there is.
    assert abs(allocated - measured.peaks["backward"]) < 1024
    assert abs(allocated + (4 << 18) - measured.tracked_peak) < 1024


def test_memory_that_is_resized_counts() -> None:
    tensor = torch.ones(1000)
    with oracle.LivingStorages(tensor) as living:
        assert living.bytes == 4000
        tensor.untyped_storage().resize_(0)
        assert (living.bytes, living.peak) == (0, 4000)
        living.begin()
        other = torch.ones(10)
        other.resize_(20)
        assert living.bytes == 80
        del other
    assert (living.bytes, living.peak) == (0, 80)


def test_the_largest_batch_is_the_largest() -> None:
    build = functools.partial(zoo.build, "mlp", seq=32)
    limit = oracle.measure(*build(batch=37), optimizer=adam, tracker=False).peak_bytes
    assert oracle.largest_batch(lambda batch: build(batch=batch), limit, optimizer=adam) == 37
    assert oracle.largest_batch(lambda batch: build(batch=batch), 1, optimizer=adam) == 0
