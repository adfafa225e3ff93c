"""Law 7, thread-local.

"Hooks are active only in the thread that is inside the wrapped forward. Replicas share a store, never a state. An
exception, `KeyboardInterrupt` included, restores what was there before."

This file shows it for threads and replicas, for pairs of hooks inside one another, for generators and for decorated
functions. Its sibling shows it under load.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Generator

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks._torch import top_hooks
from disthooks.saved.pipeline import pipeline
from tests.support.replicas import replicate
from tests.support.stores.copies import Copies
from tests.support.stores.pairs import Pair, ones
from tests.support.threads import together

pytestmark = pytest.mark.any_device


# --- Threads and replicas


class Shards(nn.Module):
    """Two layers whose forward can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if x[0, 0] > 1e6:
            raise ValueError("as asked")
        if x[0, 0] < -1e6:
            raise KeyboardInterrupt
        return y


def test_hooks_entered_outside_do_nothing_in_replicas(tmp_path: pathlib.Path) -> None:
    """This is why the wrapper is needed: a block around the call does not reach into other threads."""
    copies = replicate(Shards(), 2)
    with dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=0)) as saved:
        together([lambda c=c: c(torch.randn(8, 64)) for c in copies])
    assert saved.report().moved == 0


@pytest.mark.parametrize(("value", "kind"), [(1e7, ValueError), (-1e7, KeyboardInterrupt)])
def test_an_exception_leaves_no_hook(value: float, kind: type[BaseException], tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(Shards(), dh.OnDisk(tmp_path), at_least=0)
    bad = torch.full((8, 64), value)
    results = together([lambda c=c, x=x: c(x) for c, x in zip(replicate(model, 2), (bad, bad / value), strict=True)])
    assert isinstance(results[0], kind)
    assert isinstance(results[1], torch.Tensor)
    with pytest.raises(kind):
        model(bad)
    assert top_hooks(True) is None
    results.clear()
    model(bad / value).sum().backward()


def test_a_backward_reads_what_a_forward_saves_again() -> None:
    """One thread holds the lock of the packed value and wants that of the counters.

    Another thread wants them in the other order.
    """
    reading, go_on = threading.Event(), threading.Event()

    class Slow(Copies):
        def get(self, ticket: torch.Tensor) -> torch.Tensor:
            reading.set()
            assert go_on.wait(60)
            return super().get(ticket)

    x = torch.randn(256, 64, requires_grad=True)
    with dh.saving(Slow()) as saving:
        y = x.exp()
        z = y.sin()

        def save() -> None:
            assert reading.wait(60)
            with saving:
                y[:64].cos()

        threads = [threading.Thread(target=one, daemon=True) for one in (lambda: z.sum().backward(), save)]
        y.sum()  # the contents of y are taken
        for thread in threads:
            thread.start()
        assert reading.wait(60)
        threads[1].join(0.5)  # it saves, or waits for the reader
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert saving.report().shared > 0


# --- Which pair of hooks is on


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
        with dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=0)), outer:  # the same block again
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


def test_mutation_is_allowed_where_torch_allows_it(pair: Pair) -> None:
    """Inside, the innermost pair of hooks is torch's context that clones a saved tensor before it is written."""
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


# --- Generators: their own code runs with the hooks on, and their consumer's code with the hooks off


class Steps(nn.Module):
    """Yields the output of each of its layers, as a decoder yields tokens.

    A true value that is sent to it detaches the output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.closed = False

    def forward(self, x: torch.Tensor) -> Generator[torch.Tensor, bool, str]:
        try:
            for layer in self.layers:
                try:
                    skip = yield (x := layer(x).tanh())
                except ValueError:
                    skip = yield (x := x.exp())
                x = x.detach() if skip else x
            return "done"
        finally:
            self.closed = True


def _line(folder: pathlib.Path) -> object:
    return pipeline(dh.OnDisk(folder), at_least=0)


def _consume(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total = x.sum() * 0
    for y in model(x):
        assert top_hooks(True) is None
        total = total + y.cos().sum()  # the consumer's own: it saves y without hooks
    total.backward()
    return x.grad


@pytest.mark.parametrize("how", ["wrapper", "in place", "decorator"])
def test_the_body_is_hooked_and_its_consumer_is_not(how: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = Steps()
    x = torch.randn(8, 64)
    truth = _consume(model, x.requires_grad_()).clone()
    x.grad = None
    report = None
    if how == "wrapper":
        wrapped = dh.SaveWith(model, _line(tmp_path))
        got, report = _consume(wrapped, x), wrapped.report()
    elif how == "in place":
        with dh.save_activations(model, "", _line(tmp_path)) as saving:
            got, report = _consume(model, x), saving.report()
    else:
        saved = dh.saving(_line(tmp_path))
        got, report = _consume(saved(model.forward), x), saved.report()
    assert torch.equal(got, truth)
    # the three layers' inputs, and the last tanh's output, which the consumer saves too but not under ours
    assert report.stored == 4 * x.nbytes
    assert report.held == 0
    assert report.calls == 5 if how != "in place" else report.calls >= 4


def test_what_is_sent_thrown_and_returned_passes(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(Steps(), _line(tmp_path))
    body = model(torch.randn(8, 64))
    first = next(body)
    second = body.throw(ValueError())
    assert torch.equal(second, first.exp())
    third = body.send(True)
    assert third.grad_fn is not None
    next(body)
    with pytest.raises(StopIteration) as stop:
        next(body)
    assert stop.value.value == "done"
    assert model.unwrapped.closed
    failing = model(torch.randn(8, 64))
    next(failing)
    model.unwrapped.closed = False
    with pytest.raises(KeyError):
        failing.throw(KeyError())
    assert model.unwrapped.closed
    assert top_hooks(True) is None


def test_a_generator_that_is_left_is_closed(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(Steps(), _line(tmp_path))
    body = model(torch.randn(8, 64))
    y = next(body)
    assert model.report().held > 0
    del body
    assert model.unwrapped.closed
    assert top_hooks(True) is None
    del y
    assert model.report().held == 0


def test_an_asynchronous_forward_is_refused(tmp_path: pathlib.Path) -> None:
    class Later(nn.Linear):
        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(dh.errors.AttachError, match="asynchronous"):
        dh.save_activations(Later(2, 2), "", dh.OnDisk(tmp_path))
    with pytest.raises(dh.errors.UsageError, match="asynchronous"):
        dh.SaveWith(Later(2, 2), dh.OnDisk(tmp_path))
    with pytest.raises(dh.errors.UsageError, match="asynchronous"):
        dh.saving(dh.OnDisk(tmp_path))(Later(2, 2).forward)


# --- `saving` as a decorator: what the function saves goes to the store, and what is saved beside it stays


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> dh.saving:
    return dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=0))


def test_a_decorated_function_stores_what_it_saves_alone(saved: dh.saving) -> None:
    x = torch.randn(32, 32, dtype=torch.float64, requires_grad=True)
    svd = saved(torch.linalg.svd)
    assert svd.__name__ == "linalg_svd"

    def loss(decompose: object) -> torch.Tensor:
        y = x.sin()  # not inside the decorated function, so not stored
        u, s, v = decompose(y)
        return (u.abs().sum() + (s * v.diagonal()).sum()).cos()

    (truth,) = torch.autograd.grad(loss(torch.linalg.svd), x)
    (got,) = torch.autograd.grad(loss(svd), x)
    assert torch.equal(got, truth)
    assert saved.report().calls == 1
    assert saved.report().stored == 2 * x.nbytes + 32 * 8  # U, V and the singular values


def test_methods_of_all_kinds_can_be_decorated(saved: dh.saving) -> None:
    class Model:
        @saved
        def method(self, x: torch.Tensor, *, power: int = 2) -> torch.Tensor:
            """Its doc."""
            return x.sin() ** power

        @saved
        @staticmethod
        def static(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @saved
        @classmethod
        def of_class(cls, x: torch.Tensor) -> torch.Tensor:
            assert cls is Model
            return x.sin()

        @property
        @saved
        def value(self) -> torch.Tensor:
            return x.sin()

    x = torch.randn(8, 8, requires_grad=True)
    model = Model()
    assert model.method.__doc__ == "Its doc."
    before = 0
    for call in (
        lambda: model.method(x, power=3),
        lambda: Model.static(x),
        lambda: model.of_class(x),
        lambda: model.value,
    ):
        call().sum().backward()
        assert saved.report().stored - before >= x.nbytes
        before = saved.report().stored
    bound = saved(model.static)
    assert torch.equal(bound(x), x.sin())


class Cube(torch.autograd.Function):
    """Computes the cube and saves an intermediate; can be differentiated twice."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * x)  # type: ignore[attr-defined]
        return x * x * x

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        x, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        return 3 * grad * x * x


class Split(torch.autograd.Function):
    """Has forward and setup_context apart, as torch.func wants it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: object, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [Cube, Split])
def test_an_autograd_function_can_be_decorated(function: type, saved: dh.saving) -> None:
    on_disk = saved(function)
    assert issubclass(on_disk, function)
    assert on_disk.__name__ == function.__name__
    x = torch.randn(32, 32, dtype=torch.float64, requires_grad=True)

    def gradients(apply: object) -> list[torch.Tensor]:
        first = torch.autograd.grad(apply(x.sin()).cos().sum(), x, create_graph=True)[0]
        return [first, torch.autograd.grad(first.square().sum(), x)[0]]

    truth, got = gradients(function.apply), gradients(on_disk.apply)
    assert all(map(torch.equal, truth, got))
    assert saved.report().stored == (2 if function is Cube else 1) * x.nbytes
    few = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(on_disk.apply, (few,))  # these write through .data, which is not counted
    assert torch.autograd.gradgradcheck(on_disk.apply, (few,))
    count = saved.report().calls
    function.apply(x)  # the Function that was given is unchanged
    assert saved.report().calls == count


def test_a_decorated_function_steps_back_under_a_transform(saved: dh.saving) -> None:
    on_disk = saved(Split)
    x = torch.randn(4, 8)
    got = torch.func.vmap(torch.func.grad(lambda row: on_disk.apply(row).sum()))(x)
    assert torch.equal(got, x.exp())
    assert saved.report().passed["hooks disabled"] > 0


def test_a_decorated_function_calls_a_decorated_function(saved: dh.saving, tmp_path: pathlib.Path) -> None:
    inner = dh.saving(dh.OnDisk(tmp_path))
    x = torch.randn(64, 64, requires_grad=True)

    @saved
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(torch.sin)(x.cos()).cos()

    outer(x).sum().backward()
    assert saved.report().stored == 2 * x.nbytes
    assert inner.report().stored == x.nbytes
    assert saved.report().inner == 1


def test_the_function_is_named_in_an_error(saved: dh.saving) -> None:
    @saved
    def layer(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    y = layer(torch.randn(8, 8, requires_grad=True))
    y.mul_(2)
    with pytest.raises(dh.errors.MutationError, match=r"layer' is at version 1"):
        y.sum().backward()


@pytest.mark.parametrize("target", [nn.Linear(2, 2), nn.Linear, 3])
def test_modules_are_not_decorated(target: object, saved: dh.saving) -> None:
    with pytest.raises(dh.errors.UsageError, match="SaveWith"):
        saved(target)
