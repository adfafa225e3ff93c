"""Laws 1, 4, 5: custom functions, in-place changes and kinds of tensors, from torch's own tests, under our pairs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

import disthooks as dh
from tests.support.stores.pairs import PAIRS, Pair, ones

CHANGED = "modified by an inplace operation"


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Pair:
    return Pair(request.param, tmp_path)


# -- functions of one's own


class Own(torch.autograd.Function):
    """x³ · c, which saves an input, an output, something in between, nothing, and a constant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        square = x * x
        y = square * x * c
        ctx.save_for_backward(x, y, square, None, c)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        for _ in range(2):
            x, y, square, nothing, c = ctx.saved_tensors
        assert nothing is None
        assert torch.equal(y, square * x * c)
        return grad * 3 * square * c, None


def test_inputs_outputs_and_what_is_between(pair: Pair) -> None:
    x, c = ones(5), torch.full((5,), 2.0, dtype=torch.float64)
    y = pair(Own.apply, x, c)
    assert [t is None for t in y.grad_fn.saved_tensors] == [False, False, False, True, False]
    assert y.grad_fn.saved_tensors[1].grad_fn is y.grad_fn
    assert len(y.grad_fn._raw_saved_tensors) == 5
    for keep in (True, False):
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x, retain_graph=keep)[0], (6 * x * x).detach())
    with pytest.raises(RuntimeError, match="freed"):
        _ = y.grad_fn.saved_tensors
    del y
    assert pair.held == 0


class Twice(torch.autograd.Function):
    """x², differentiable again through the input that it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.exp())  # the last call counts
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 * ctx.saved_tensors[0]


class Once(Twice):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return grad * 2 * ctx.saved_tensors[0]


def test_differentiable_once_and_twice(pair: Pair) -> None:
    x = ones(5)
    assert torch.autograd.gradcheck(lambda x: pair(Twice.apply, x), (x,))
    assert torch.autograd.gradgradcheck(lambda x: pair(Twice.apply, x), (x,))
    y = pair(Once.apply, x)
    (first,) = torch.autograd.grad(y, x, torch.ones_like(y).requires_grad_(), create_graph=True)
    assert torch.equal(first, 2 * x)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Dirty(torch.autograd.Function):
    """Doubles in place and saves what it wrote; its second output is an integer mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple:
        ctx.set_materialize_grads(False)
        x.mul_(2)
        mask = (x > 0.5).long()
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(x, mask)
        return x, mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, none: None) -> torch.Tensor | None:
        x, mask = ctx.saved_tensors
        assert none is None
        return None if grad is None else grad * 2 * mask * x.sign()


def test_dirty_and_not_differentiable(pair: Pair) -> None:
    x = ones(5)
    h = x.clone()
    y, mask = pair(Dirty.apply, h)
    assert y is h
    assert not mask.requires_grad
    y.sum().backward()
    assert torch.equal(x.grad, 2.0 * mask)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place"):
        pair(torch.Tensor.mul_, ones(5), 2)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, 3)
        return x.clone()


def test_only_tensors_are_saved(pair: Pair) -> None:
    with pytest.raises(TypeError, match="save_for_backward"):
        pair(Wrong.apply, ones(5))
    with torch.inference_mode():
        c = torch.ones(5)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        pair(torch.mul, ones(5), c)


class Scribble(torch.autograd.Function):
    """Writes into what it saved, in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors[0].mul_(0)
        return grad


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_backward_that_writes_into_what_it_saved(before: bool, closed: bool, tmp_path: pathlib.Path) -> None:
    """Whoever else saved it gets what was saved, or the error that torch raises without hooks; never other values."""
    x = ones(5)
    h = x * 3

    def both() -> torch.Tensor:
        one = h.square() if before else Scribble.apply(h)
        two = Scribble.apply(h) if before else h.square()
        return (one + two).sum() if closed else torch.autograd.grad((one + two).sum(), x, retain_graph=True)[0]

    with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))) as saved:
        try:
            y = both()
            found = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)] if closed else [y]
        except dh.errors.MutationError:
            found = []
    for grad in found:
        torch.testing.assert_close(grad, (18 * x + 3).detach())
    assert saved.report().stored > 0


# -- changed in place


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


@pytest.mark.parametrize("case", [_output, _view_of_output, _input, _detached, _leaf])
def test_a_change_after_saving(case: Callable, pair: Pair) -> None:
    y, saved = pair(case, ones(5))
    node = y.grad_fn
    loss = y.sum()
    with torch.no_grad():
        saved.add_(1)
    if not pair.checked:  # torch's contract: under hooks nothing is checked
        loss.backward()
        return
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    with pytest.raises(RuntimeError, match=CHANGED):
        _ = node._saved_result if hasattr(node, "_saved_result") else node._saved_self


def test_what_is_saved_after_a_change(pair: Pair) -> None:
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


def test_detached_in_place(pair: Pair) -> None:
    """torch refuses it without hooks only because it kept the tensor itself; under hooks the contents are right."""
    x = ones(5)
    y = pair(torch.exp, x)
    y.sum()
    loss = y.sum()
    y.detach_()
    loss.backward()
    assert torch.equal(x.grad, y)


# -- all kinds of tensors


def _sparse(x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(4, dtype=x.dtype).to_sparse(), x.exp()) @ torch.sparse.mm(x.to_sparse(), x)


def _jagged(x: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]))
    return (nested.sin() * nested).values()


def _conjugate(x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, x.exp())
    return (z.conj() * z.mT.conj() * z.conj().imag).real + torch._neg_view(z.imag).sin() + z.abs()


def _indices(x: torch.Tensor) -> torch.Tensor:
    values, order = x.sort(0)
    return values.gather(0, order) * x[torch.tensor([3, 3, 0, 1])] + x.cummax(0)[0] + x[x > 0.3].prod()


def _nothing(x: torch.Tensor) -> torch.Tensor:
    return x[:0].exp().sum() + x[0, 0].square() + x.new_ones(()).expand(4, 4) * x * x[:1].expand(4, 4)


@pytest.mark.parametrize("function", [_sparse, _jagged, _conjugate, _indices, _nothing])
def test_kinds_of_tensors(function: Callable, pair: Pair) -> None:
    x = ones(4, 4)
    (truth,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(torch.autograd.grad(pair(function, x).sum(), x)[0], truth)
