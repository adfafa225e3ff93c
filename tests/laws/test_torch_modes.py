"""Laws 1, 4, 7: modes, nested backwards, threads and copies, as torch's own tests have them, under our pairs."""

from __future__ import annotations

import contextlib
import copy
import gc
import pathlib
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import disthooks as dh
from disthooks._torch import hooks_allowed
from tests.support.stores.pairs import PAIRS, Pair, ones


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Pair:
    return Pair(request.param, tmp_path)


# -- which pair is on


def test_the_innermost_pair_alone(tmp_path: pathlib.Path) -> None:
    log: list[str] = []

    def named(name: str) -> dh.saving:
        return dh.saving(dh.Functions(lambda t: (log.append(name), t)[1], lambda t: (log.append(name.upper()), t)[1]))

    x, outer = ones(5), named("a")
    with outer:
        one = x.square()
        with named("b"):
            two = x.square()
            with contextlib.suppress(ZeroDivisionError), named("c"):
                three = x.square()
                _ = 1 / 0
            two = two + x.square()
        with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))), outer:  # the same block again
            one = one + x.square()
        one = one + x.square()
    four = x.square()
    assert "".join(log) == "abcbaa"
    log.clear()
    for y in (one, two, three, four):
        y.sum().backward()
    assert sorted(log) == list("AAABBC")
    torch.testing.assert_close(x.grad, 7 * 2 * x.detach())


def test_without_grad_nothing_is_saved(pair: Pair) -> None:
    x = ones(5)
    with torch.no_grad():
        y = pair(lambda: x.square())
        with torch.enable_grad():
            z = pair(lambda: x.exp())
    assert not y.requires_grad
    z.sum().backward()
    with torch.no_grad():
        assert not pair(lambda: x.exp()).requires_grad
    assert torch.equal(x.grad, x.exp())


def test_hooks_that_are_disabled(pair: Pair) -> None:
    x = ones(5)
    with disable_saved_tensors_hooks("not here"):
        y = pair(lambda: x.exp())  # steps back
        with disable_saved_tensors_hooks("nor here"):
            assert not hooks_allowed()
        assert not hooks_allowed()
    assert hooks_allowed()
    assert pair.packed == 0
    y.sum().backward()

    def disable() -> None:
        with disable_saved_tensors_hooks("not inside"):
            pytest.fail("hooks are on")

    with pytest.raises(RuntimeError, match="not inside"):
        pair(disable)
    assert hooks_allowed()


def test_torchs_own_contexts_on_either_side(pair: Pair) -> None:
    x = ones(5)

    def inside() -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return x.exp() + x.square()

    y = pair(inside)
    with torch.autograd.graph.save_on_cpu():
        y = y + pair(lambda: x.exp()) + x.exp()
    y.sum().backward()
    torch.testing.assert_close(x.grad, (3 * x.exp() + 2 * x).detach())


def test_mutation_allowed_inside(pair: Pair) -> None:
    """torch's context that clones what is written to is the innermost pair there."""
    x = ones(5)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        truth = x.exp()
        truth.add_(1).square().sum().backward()

    def inside() -> None:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = x.exp()
            y.add_(1).square().sum().backward()

    expected, x.grad = x.grad, None
    pair(inside)
    assert torch.equal(x.grad, expected)


# -- modes


def test_dual_numbers(pair: Pair) -> None:
    """Forward mode over backward mode: the tangents of saved tensors are autograd's to keep."""
    x, v = ones(4, 4), torch.ones(4, 4, dtype=torch.float64)

    def product(call: Callable) -> tuple:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, v)
            y = call(lambda: (dual.exp() * dual).square())
            (grad,) = torch.autograd.grad(y.sum(), dual)
            return *forward_ad.unpack_dual(y), *forward_ad.unpack_dual(grad)

    for got, truth in zip(product(pair), product(lambda f: f()), strict=True):
        assert torch.equal(got, truth)


@pytest.mark.parametrize("options", [{}, {"vectorize": True}, {"create_graph": True}])
@pytest.mark.parametrize("name", ["jacobian", "hessian"])
def test_functional(name: str, options: dict, pair: Pair) -> None:
    x = ones(3, 3).detach()
    function = {"jacobian": lambda x: x.exp() @ x.sin(), "hessian": lambda x: (x.exp() @ x.sin()).square().sum()}[name]
    call = getattr(torch.autograd.functional, name)
    truth = call(function, x, **options)
    assert torch.equal(pair(lambda: call(function, x, **options)), truth)
    assert torch.equal(call(lambda x: pair(function, x), x, **options), truth)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode(pair: Pair) -> None:
    x = ones(5)
    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        warnings.simplefilter("ignore")
        pair(lambda: x.exp().square()).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach().exp().square())
        y = pair(lambda: (x * 0).sqrt() * 0)
        with pytest.raises(RuntimeError, match="returned nan values"):
            y.sum().backward()


@pytest.mark.filterwarnings("ignore:disthooks stepped back")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_and_around(reentrant: bool, pair: Pair) -> None:
    x = ones(5)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: x.exp().square(), x, use_reentrant=reentrant)

    for call in (lambda: pair(inner, x), lambda: checkpoint(lambda x: pair(inner, x), x, use_reentrant=reentrant)):
        (grad,) = torch.autograd.grad(call().sum(), x) if not reentrant else _grad(call(), x)
        torch.testing.assert_close(grad, 2 * x.detach().exp().square())
    gc.collect()
    assert pair.held == 0


def _grad(y: torch.Tensor, x: torch.Tensor) -> tuple:
    """Reentrant checkpoints refuse ``autograd.grad``."""
    x.grad = None
    y.sum().backward()
    return (x.grad,)


def test_a_backward_inside_a_backward(pair: Pair) -> None:
    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = pair(lambda: ctx.x.exp().square())
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                ctx.y.backward(grad)
            return ctx.x.grad

    x = ones(5)
    pair(lambda: Reentrant.apply(x) * x).sum().backward()
    torch.testing.assert_close(x.grad, ((1 + 2 * x) * x.exp().square()).detach())


def test_hooks_of_other_kinds(pair: Pair) -> None:
    x, log = ones(5), []
    y = pair(lambda: x.exp().square())
    y.register_hook(lambda grad: log.append("tensor"))
    y.grad_fn.register_prehook(lambda grads: log.append("before"))
    y.grad_fn.register_hook(lambda ins, outs: log.append("after"))
    x.register_post_accumulate_grad_hook(lambda leaf: log.append("leaf"))
    torch.autograd.graph.register_multi_grad_hook((x, y), lambda grads: log.append("all"))
    y.retain_grad()
    y.sum().backward()
    assert sorted(log) == ["after", "all", "before", "leaf", "tensor"]
    assert torch.equal(y.grad, torch.ones_like(y))


# -- threads, copies, cycles


def test_backward_in_other_threads(pair: Pair) -> None:
    x = ones(64)
    y = pair(lambda: (x.exp() * x).square().sum())
    (truth,) = torch.autograd.grad(y, x, retain_graph=True)
    found: list[torch.Tensor] = []

    def read(y: torch.Tensor) -> None:
        found.extend(torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(20))

    threads = [threading.Thread(target=read, args=(y,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(grad, truth) for grad in found)
    del y
    assert pair.held == 0


COPIES = [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]


@pytest.mark.parametrize("way", COPIES)
def test_wrappers_are_copied(way: Callable, tmp_path: pathlib.Path) -> None:
    """A copy counts from zero, and what the original saved stays its own."""
    x, original = torch.ones(2, 4), dh.SaveToDisk(torch.nn.Linear(4, 4), tmp_path, at_least=0)
    first = original(x)
    twin = way(original)
    twin(x).sum().backward()
    assert twin.report().stored == original.report().held == x.nbytes
    first.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(original.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("way", COPIES)
def test_blocks_are_copied(way: Callable, tmp_path: pathlib.Path) -> None:
    """A model that keeps its block as an attribute is copied and pickled with it, as with torch's own contexts."""
    x, original = ones(5), dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path)))
    with original:
        first = x.exp()
        with way(original) as twin:
            second = x.exp()
    assert twin.report().held == original.report().held == x.nbytes
    (first + second).sum().backward()
    assert torch.equal(x.grad, 2 * x.exp())


def test_a_cycle_goes_with_the_collector(pair: Pair) -> None:
    y = pair(torch.exp, ones(5))
    y.me = y
    del y
    gc.collect()
    assert pair.held == 0
