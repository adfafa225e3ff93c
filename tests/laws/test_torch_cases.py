"""Laws 1, 4, 5, 7: the cases of torch's own tests of saved-tensor hooks, with each of our pairs in place of theirs."""

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
from tests.support.stores.pairs import LINES, PAIRS, Pair, ones, run

FREED = "after they have already been freed"
CHANGED = "modified by an inplace operation"


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Pair:
    return Pair(request.param, tmp_path)


@pytest.fixture(params=["saving", "SaveWith"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=LINES)
def line(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Any:
    return LINES[request.param](tmp_path)


# -- what is saved, read through the graph node


def test_a_saved_output(pair: Pair) -> None:
    """Its history is the node that saved it, and no cycle keeps it."""
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


def test_a_saved_input_with_a_history(pair: Pair) -> None:
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


def test_a_saved_constant_needs_no_gradient(pair: Pair) -> None:
    x, c = ones(5), torch.arange(5.0, dtype=torch.float64)
    y = pair(torch.mul, x, c)
    assert not y.grad_fn._saved_other.requires_grad
    y.sum().backward()
    assert torch.equal(x.grad, c)


def test_retain_graph_then_freed(pair: Pair) -> None:
    x = ones(5)
    y = pair(lambda: (x.exp() * x).sum())
    first, second = (torch.autograd.grad(y, x, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match=FREED):
        y.backward()
    assert pair.held == 0


def test_double_backward_inside_and_outside(pair: Pair) -> None:
    x = ones(5)

    def inside() -> torch.Tensor:
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    (first,) = torch.autograd.grad(pair(lambda: x**3).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())
    torch.testing.assert_close(pair(inside), 6 * x.detach())


def test_hooks_cannot_be_put_on_a_packed_tensor(pair: Pair) -> None:
    y = pair(torch.square, ones(5))
    with pytest.raises(RuntimeError, match="already been set"):
        y.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: t)
    assert not isinstance(y.grad_fn._raw_saved_self.data, torch.Tensor)


def test_a_pair_on_one_saved_tensor_alone(tmp_path: pathlib.Path) -> None:
    """A store is a pair of functions, so it can also be put on what torch saved by itself."""
    x, store = ones(5), dh.OnDisk(tmp_path)
    y = x.square()
    y.grad_fn._raw_saved_self.register_hooks(store.put, store.get)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_outputs_keep_their_number(pair: Pair) -> None:
    x = ones(4, 4)
    values, vectors = pair(lambda: torch.linalg.eigh(x + x.mT))
    node = values.grad_fn
    assert (node._saved_eigenvalues.output_nr, node._saved_eigenvectors.output_nr) == (0, 1)
    assert node._saved_eigenvectors.grad_fn is vectors.grad_fn


# -- the pair itself: Functions, whose contract is torch's


@pytest.mark.parametrize("read", [0, 1, 4])
def test_pack_once_unpack_at_every_reading(read: int, way: str) -> None:
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
    """Of a kind that nobody else raises."""


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


def test_functions_need_no_name(way: str) -> None:
    class Nameless:
        def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    x = ones(5)
    run(dh.Functions(Nameless(), functools.partial(torch.mul, 1)), way, torch.square, x).sum().backward()
    assert torch.equal(x.grad, 2 * x)
