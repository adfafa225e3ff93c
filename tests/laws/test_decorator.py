"""``saving`` as a decorator: one call's saved tensors go to the store, those beside it stay."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> dh.saving:
    return dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path)))


def test_a_function(saved: dh.saving) -> None:
    x = torch.randn(32, 32, dtype=torch.float64, requires_grad=True)
    svd = saved(torch.linalg.svd)
    assert svd.__name__ == "linalg_svd"

    def loss(decompose: object) -> torch.Tensor:
        y = x.sin()  # beside it: not stored
        u, s, v = decompose(y)
        return (u.abs().sum() + (s * v.diagonal()).sum()).cos()

    (truth,) = torch.autograd.grad(loss(torch.linalg.svd), x)
    (got,) = torch.autograd.grad(loss(svd), x)
    assert torch.equal(got, truth)
    assert saved.report().calls == 1
    assert saved.report().stored == 2 * x.nbytes + 32 * 8  # U, V and the singular values


def test_methods_of_all_kinds(saved: dh.saving) -> None:
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
    """The cube, by an intermediate; can be differentiated twice."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * x)  # type: ignore[attr-defined]
        return x * x * x

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        x, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        return 3 * grad * x * x


class Split(torch.autograd.Function):
    """Forward and context apart, as torch.func wants it."""

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
def test_an_autograd_function_and_its_double_backward(function: type, saved: dh.saving) -> None:
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
    function.apply(x)  # the one that was given is as it was
    assert saved.report().calls == count


def test_a_function_under_a_transform(saved: dh.saving) -> None:
    on_disk = saved(Split)
    x = torch.randn(4, 8)
    got = torch.func.vmap(torch.func.grad(lambda row: on_disk.apply(row).sum()))(x)
    assert torch.equal(got, x.exp())
    assert saved.report().passed["hooks disabled"] > 0


def test_a_decorated_function_in_a_decorated_function(saved: dh.saving, tmp_path: pathlib.Path) -> None:
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
def test_what_it_does_not_decorate(target: object, saved: dh.saving) -> None:
    with pytest.raises(dh.errors.UsageError, match="SaveWith"):
        saved(target)
