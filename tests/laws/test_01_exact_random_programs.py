"""Law 1, exact, and laws 3, 5 and 6, by random programs.

A random program under hooks gives what torch gives without hooks, bit for bit, or the error that torch raises.
"""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.programs import Machine, Step
from tests.support.stores.copies import Copies

pytestmark = pytest.mark.any_device
NUMBER = st.integers(0, 999)
PROGRAM = st.lists(st.lists(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER), max_size=10), min_size=1, max_size=4)
STORES: dict[str, Callable[[object], object]] = {
    "disk, every tensor": lambda folder: pipeline(dh.OnDisk(folder), at_least=0),
    "disk": lambda folder: dh.OnDisk(folder),
    "copies": lambda folder: pipeline(Copies(), at_least=0),
    "recompute": lambda folder: pipeline(dh.Recompute(), Copies(), at_least=0),
}


@pytest.fixture(scope="module", params=STORES)
def line(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    folder: pathlib.Path = tmp_path_factory.mktemp("store")
    return STORES[request.param](folder)


def differing(dtype: int, shape: int, blocks: list[list[Step]], line: object) -> object | None:
    """The first thing in which a program under hooks differs from the same without, or None."""
    saved = dh.saving(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = Machine(dtype, shape, contextlib.nullcontext).run(blocks)
        got = Machine(dtype, shape, lambda: saved).run(blocks)
    if got != truth:
        return next((i, a, b) for i, (a, b) in enumerate(zip([*truth, "end"], [*got, "end"], strict=False)) if a != b)
    return saved.report().held or None


@settings(derandomize=True, deadline=None, max_examples=120)
@given(dtype=st.integers(0, 4), shape=st.integers(0, 7), blocks=PROGRAM)
def test_a_random_program_gives_what_it_gives_without_hooks(
    line: object, dtype: int, shape: int, blocks: list[list[Step]]
) -> None:
    assert differing(dtype, shape, blocks, line) is None


def test_a_number_that_is_a_tensor_may_be_written_after_it_was_used() -> None:
    """Recompute once took a tensor of no dimensions, which was saved outside of the hooks, for a number of Python's."""
    for dtype in (torch.float32, torch.float64):
        leaf = torch.tensor(0.5, dtype=dtype, requires_grad=True)
        factor = leaf * 1.5
        square = factor * factor  # saves `factor`, and no hooks are on
        with dh.saving(dh.Recompute(), Copies(), at_least=0):
            root = square * leaf
        with torch.no_grad():
            factor.mul_(0.5)
        (found,) = torch.autograd.grad(root, [square], retain_graph=True)
        assert found == leaf
        assert root.grad_fn is not None
        assert root.grad_fn._saved_self == 0.5625
