"""Law 5, mutation is caught.

"A tensor changed in place after it was saved raises what torch raises without hooks, naming the module; it never
passes silently. And a tensor that its operator fills only *after* saving it (`rrelu`) is right: contents are taken
late, never inside pack."

This file shows both; its sibling shows that contents are those at the end of the operator, whoever writes later.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.stores.pairs import Pair, ones

pytestmark = pytest.mark.any_device


def test_the_module_is_named(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Tanh()))
    with dh.save_activations(model, "1.0", dh.OnDisk(tmp_path)):
        y = model(torch.randn(64, 64))
        y.mul_(2)
        with pytest.raises(dh.errors.MutationError, match=r"'1\.0'.*version 1; expected version 0"):
            y.sum().backward()


@pytest.mark.parametrize("alone", [True, False])
def test_a_tensor_that_is_filled_after_it_was_saved_is_right(alone: bool, tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    torch.manual_seed(3)
    (truth,) = torch.autograd.grad(F.rrelu(x, training=True).sum().mul(1 if alone else 2), x)
    torch.manual_seed(3)
    with dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=0)) as saved:
        y = F.rrelu(x, training=True)
        y = y.sum() if alone else y.sum().mul(2)
    (got,) = torch.autograd.grad(y, x)
    assert saved.report().moved >= x.nbytes
    assert torch.equal(got, truth)


# --- Changes in place, as in torch's own tests


CHANGED = "modified by an inplace operation"


def _output(x: torch.Tensor) -> tuple:
    y = x.exp()
    return y, y


def _view_of_output(x: torch.Tensor) -> tuple:
    y = x.exp()
    return y, y[1:3]


def _input(x: torch.Tensor) -> tuple:
    h = x * 2
    return h.square(), h


def _detached(x: torch.Tensor) -> tuple:
    y = x.exp()
    return y, y.detach()


def _leaf(x: torch.Tensor) -> tuple:
    return x.square(), x


def _constant(x: torch.Tensor) -> tuple:
    other = torch.ones_like(x)
    return other * x, other


def _own_tensor_is_gone(x: torch.Tensor) -> tuple:
    y = x.exp()
    return y * 1, y.detach()


@pytest.mark.parametrize("size", [(5,), (64, 64)], ids=["small", "large"])
@pytest.mark.parametrize("case", [_output, _view_of_output, _input, _detached, _leaf, _constant, _own_tensor_is_gone])
def test_a_change_after_saving_raises(case: Callable, size: tuple[int, ...], pair: Pair) -> None:
    """What torch raises without hooks; a small tensor is kept by some stores."""
    y, saved = pair(case, ones(*size))
    node = y.grad_fn.next_functions[0][0] if case is _own_tensor_is_gone else y.grad_fn
    loss = y.sum()
    with torch.no_grad():
        saved.add_(1)
    if not pair.checked:  # torch's contract: under hooks nothing is checked
        loss.backward()
        return
    with pytest.raises(RuntimeError, match=CHANGED) as caught:
        loss.backward()
    assert isinstance(caught.value, dh.errors.MutationError)
    with pytest.raises(RuntimeError, match=CHANGED):
        _ = node._saved_result if hasattr(node, "_saved_result") else node._saved_self


def test_what_is_saved_after_a_change_is_right(pair: Pair) -> None:
    x = ones(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        h[0].mul_(3)
        h.neg_()
        y = h.t().sigmoid_()
        return y * h.t() + h[1:].sum() * h

    def derivatives(call: Callable) -> tuple:
        (first,) = torch.autograd.grad(call(function, x).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.sum(), x)

    for got, truth in zip(derivatives(pair), derivatives(lambda f, x: f(x)), strict=True):
        assert torch.equal(got, truth)


def test_a_tensor_detached_in_place_is_right(pair: Pair) -> None:
    """Without hooks torch refuses it, only because it kept the tensor itself. Under hooks the contents are right."""
    x = ones(5)
    y = pair(torch.exp, x)
    y.sum()
    loss = y.sum()
    y.detach_()
    loss.backward()
    assert torch.equal(x.grad, y)
