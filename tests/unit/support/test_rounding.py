"""What float32 may be off in the tests of engines is room for float32, and for no fault."""

from __future__ import annotations

import math

import pytest
import torch

import disthooks as dh
from tests.support.engines import train
from tests.support.rounding import drawn, of_norm, within

RULES = [dh.ClipNorm(1.0)]


def test_float32_is_within_and_a_fault_of_a_ten_thousandth_is_not() -> None:
    draws = drawn(RULES)
    records, grads = train(0, "plain", RULES, dtype=torch.float64)
    found = train(0, "plain", RULES)
    assert within(found, (records, grads), draws)
    for name in grads:
        wrong = {**found[1], name: found[1][name] * 1.0001}
        assert not within((found[0], wrong), (records, grads), draws), name
    for name in records[1].keys() - {"step"}:
        wrong = [found[0][0], {**found[0][1], name: found[0][1][name] * 1.0001}]
        assert not within((wrong, found[1]), (records, grads), draws), name


@pytest.mark.parametrize(
    ("found", "is_within"),
    [(1.0, True), (1.0099, True), (0.9901, True), (1.02, False), (math.nan, False), (math.inf, False)],
)
def test_a_number_is_within_the_farthest_draw(found: float, is_within: bool) -> None:
    assert within(found, 1.0, [1.01, 1.0]) is is_within
    assert within([{"a": found}], [{"a": 1.0}], [[{"a": 1.01}], [{"a": 1.0}]]) is is_within
    assert within(torch.tensor([0.0, found]), torch.tensor([0.0, 1.0]), [torch.tensor([0.0, 1.01])]) is is_within


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("elements", [1, 100, 4096, 2**15])
def test_torch_is_as_far_off_in_float32_as_is_derived(elements: int, p: float) -> None:
    off = []
    for seed in range(20):
        vector = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
        truth = torch.linalg.vector_norm(vector.double(), p)
        off.append(float((torch.linalg.vector_norm(vector, p).double() - truth).abs() / truth))
    assert max(off) <= of_norm(elements, p)
    assert of_norm(elements, p) < 5e-5, "what is compared by it means something"
