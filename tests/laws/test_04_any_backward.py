"""Law 4, any backward.

"`retain_graph`, double backward, `torch.autograd.grad`, `grad_fn._saved_*` read any number of times, backward after
the context closed, in another thread, or never."

This file shows each of these on a small graph, then the cases of torch's own tests of saved-tensor hooks with our
pairs of hooks in place of theirs, then what `Functions` promises: torch's own contract.
"""

from __future__ import annotations

import functools
import gc
import pathlib
import weakref
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks._torch import top_hooks
from disthooks.saved.pipeline import pipeline
from tests.support.functions import Prepared
from tests.support.stores.pairs import Pair, ones, run
from tests.support.threads import together

pytestmark = pytest.mark.any_device


# --- What a graph node says of the tensors that it saved, as in torch's own tests


FREED = "after they have already been freed"


def test_a_saved_output_has_its_own_node_as_history(pair: Pair) -> None:
    """The saved output has the node that saved it as its history, and no cycle keeps it alive."""
    x = ones(5)
    y = pair(torch.exp, x)
    for _ in range(3):
        saved = y.grad_fn._saved_result
        assert torch.equal(saved, y)
        assert saved.grad_fn is y.grad_fn
    gone = weakref.ref(y)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    with pytest.raises(RuntimeError, match=FREED):
        _ = y.grad_fn._saved_result
    gc.disable()
    try:
        del y, saved
        assert gone() is None
    finally:
        gc.enable()
    assert pair.held == 0


def test_a_saved_leaf_is_the_same_leaf_to_autograd(pair: Pair) -> None:
    x = ones(5)
    y = pair(torch.square, x)
    saved = y.grad_fn._saved_self
    assert saved.is_leaf
    assert saved.requires_grad
    saved.sum().backward()
    assert torch.equal(x.grad, torch.ones(5))
    y.sum().backward()
    assert torch.equal(x.grad, 1 + 2 * x)


def test_a_saved_input_keeps_its_history(pair: Pair) -> None:
    x = ones(5)
    h = x * 3
    y = pair(torch.square, h)
    assert y.grad_fn._saved_self.grad_fn is h.grad_fn
    assert not y.grad_fn._saved_self.is_leaf
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.full((5,), 18.0))
    assert (pair.packed > 0, pair.held) == (True, 8 * 5 * (pair.store != "cpu"))
    del y, first
    assert pair.held == 0


def test_a_retained_graph_is_freed_by_its_last_backward(pair: Pair) -> None:
    x = ones(5)
    y = pair(lambda: (x.exp() * x).sum())
    first, second = (torch.autograd.grad(y, x, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match=FREED):
        y.backward()
    assert pair.held == 0


def test_a_double_backward_runs_inside_and_outside(pair: Pair) -> None:
    x = ones(5)

    def inside() -> torch.Tensor:
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    (first,) = torch.autograd.grad(pair(lambda: x**3).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())
    torch.testing.assert_close(pair(inside), 6 * x.detach())


def test_a_store_can_be_put_on_one_saved_tensor_alone(tmp_path: pathlib.Path) -> None:
    """The methods ``put`` and ``get`` of a store are a pair of hooks.

    They can be put on a tensor that torch saved without hooks.
    """
    x, store = ones(5), dh.OnDisk(tmp_path)
    y = x.square()
    y.grad_fn._raw_saved_self.register_hooks(store.put, store.get)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_a_graph_is_read_in_many_threads(pair: Pair) -> None:
    x = ones(64, 64)
    y = pair(lambda: (x.exp() * x).square().sum())
    (truth,) = torch.autograd.grad(y, x, retain_graph=True)
    found: list[torch.Tensor] = []

    def read(y: torch.Tensor) -> None:
        found.extend(torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(50))

    assert set(together([functools.partial(read, y)] * 4)) == {None}
    assert len(found) == 200
    assert all(torch.equal(grad, truth) for grad in found)
    del y
    assert pair.held == 0


# --- Custom autograd Functions


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


def test_a_function_saves_inputs_outputs_and_what_is_between(pair: Pair) -> None:
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


def test_a_function_marks_tensors_dirty_and_not_differentiable(pair: Pair) -> None:
    x = ones(5)
    h = x.clone()
    y, mask = pair(Dirty.apply, h)
    assert y is h
    assert not mask.requires_grad
    y.sum().backward()
    assert torch.equal(x.grad, 2.0 * mask)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place"):
        pair(torch.Tensor.mul_, ones(5), 2)


# --- A saved tensor that backward returns becomes a gradient, which is added to; nobody else sees that


STORES = {
    "disk": lambda folder: pipeline(dh.OnDisk(folder), at_least=0),
    "kept": lambda folder: pipeline(dh.OnDisk(folder), at_least="1 GiB"),
    "in place": lambda folder: dh.OnCpu(),
}


@pytest.mark.parametrize("store", STORES)
def test_three_losses_may_return_what_they_share(store: str, tmp_path: pathlib.Path) -> None:
    gradient = torch.rand(64, 64)
    content = gradient.clone()
    x = torch.ones(64, 64, requires_grad=True)
    with dh.saving(STORES[store](tmp_path)) as saved:
        losses = [Prepared.apply(x, gradient) for _ in range(3)]
        losses.pop(0).backward()  # inside: not all of it is stored yet
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(x.grad, 3 * content)
    assert torch.equal(gradient, content)
    del loss, losses
    assert saved.report().held == 0


# --- Functions(pack, unpack): torch's own contract


@pytest.fixture(params=["saving", "SaveWith"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("read", [0, 1, 4])
def test_pack_is_called_once_and_unpack_at_every_reading(read: int, way: str) -> None:
    calls: list[str] = []
    store = dh.Functions(lambda t: (calls.append("pack"), t)[1], lambda t: (calls.append("unpack"), t)[1])
    x, c = ones(5), torch.ones(5)
    y = run(store, way, lambda: x * c + (x * x).detach())
    assert calls == ["pack", "pack", "pack"]  # x is not needed for the product with a constant
    for _ in range(read):
        _ = y.grad_fn.next_functions[0][0]._saved_other
    y.sum().backward()
    assert calls == ["pack"] * 3 + ["unpack"] * (read + 1)


def test_pack_gets_the_tensor_itself(way: str) -> None:
    x, seen = ones(5), []
    h = x * 2
    y = run(dh.Functions(lambda t: seen.append(t) or len(seen) - 1, lambda i: seen[i]), way, lambda: x * h)
    assert {id(t) for t in seen} == {id(x), id(h)}
    y.sum().backward()
    assert torch.equal(x.grad, 4 * x)


@pytest.mark.parametrize(("pack", "unpack"), [(2, 1), (1, 3), (2, 3)])
def test_what_the_functions_do_to_values_counts(pack: int, unpack: int, way: str) -> None:
    x = ones(5)
    y = run(dh.Functions(lambda t: t * pack, lambda t: t * unpack), way, torch.square, x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), 2 * pack * unpack * x.detach())
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], torch.full_like(x, 2))


@pytest.mark.parametrize("form", [tuple, list, str, int])
def test_pack_may_return_anything(form: type, way: str) -> None:
    kept: dict[str, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> Any:
        kept[str(len(kept))] = tensor
        return form([len(kept) - 1]) if form in (tuple, list) else form(len(kept) - 1)

    def unpack(packed: Any) -> torch.Tensor:
        assert isinstance(packed, form)
        return kept[str(packed[0] if form in (tuple, list) else packed)]

    x = ones(5)
    run(dh.Functions(pack, unpack), way, lambda: x.square().exp()).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * x.detach().square().exp())


@pytest.mark.parametrize("wrong", [None, 1, "a tensor", [torch.ones(5)]])
def test_unpack_must_return_a_tensor(wrong: object, way: str) -> None:
    y = run(dh.Functions(lambda t: t, lambda t: wrong), way, torch.square, ones(5))
    for read in (y.sum().backward, lambda: y.grad_fn._saved_self):
        with pytest.raises(TypeError, match="unpack_hook expected to be a Tensor"):
            read()


def test_pack_must_not_write(way: str) -> None:
    c = torch.ones(5)
    with pytest.raises(RuntimeError, match="pack hook is modifying its input in place"):
        run(dh.Functions(lambda t: t.add_(1), lambda t: t), way, lambda: ones(5) * c)
    assert top_hooks(True) is None


class OwnError(Exception):
    """An error that nothing else raises."""


def _fail(*_: object) -> Any:
    raise OwnError("as asked")


def test_errors_of_the_functions_come_through(way: str) -> None:
    with pytest.raises(OwnError, match="as asked"):
        run(dh.Functions(_fail, _fail), way, torch.square, ones(5))
    assert top_hooks(True) is None
    y = run(dh.Functions(lambda t: t, _fail), way, torch.square, ones(5))
    for read in (y.sum().backward, lambda: y.grad_fn._saved_self, y.sum().backward):  # the graph is there still
        with pytest.raises(OwnError, match="as asked"):
            read()
