"""``Recompute(products=...)``: matrix products are computed again with the bits of forward and the same weights."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import MutationError, StoreError, UsageError
from disthooks.saved.pipeline import pipeline
from tests.support.gated import Gated


def _line(folder: pathlib.Path, products: int = 1, **kwargs: object) -> object:
    return pipeline(dh.Recompute(products=products, **kwargs), dh.OnDisk(folder), at_least=0)  # type: ignore[arg-type]


def _grads(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    context = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
    with context:
        loss = model(x).float().square().sum()
    return list(torch.autograd.grad(loss, [*model.parameters(), x]))


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(40, 32), (4, 10, 32)], ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_gradients_have_the_bits_of_those_without_hooks(
    kind: str, shape: tuple[int, ...], bias: bool, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(bias=bias), Gated(bias=bias)), torch.randn(shape)
    if kind == "bfloat16":
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    x.requires_grad_()
    dtype = torch.bfloat16 if kind == "autocast" else None
    truth = _grads(model, x, dtype)
    with dh.save_activations(model, "", pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saving:
        assert _same(_grads(model, x, dtype), truth)
        without = saving.report()
    assert without.rerun_flops == 0
    with dh.save_activations(model, "", _line(tmp_path)) as saving:
        for step in range(1, 10):
            assert _same(_grads(model, x, dtype), truth), step
        report = saving.report()
    product = "addmm" if bias else "mm"
    assert any(how.startswith(f"layer_norm > view > {product}") or product in how for how in report.recomputed_by)
    assert report.recomputed_in_steps == (report.recomputed // 9,) * 9
    assert report.recomputed > 9 * without.recomputed
    wide = 40 * 96 * (2 if kind == "bfloat16" else 4 if kind == "float32" else 2)
    assert report.recomputed // 9 - without.recomputed >= 2 * wide, "gate and up of two layers"
    assert report.rerun_flops > 0
    assert report.rerun_flops % (2 * 40 * 32 * 96) == 0
    assert report.differed == {}
    assert report.held == 0
    assert "flops" in str(report)


PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda x: x.sigmoid() @ x.t(),
    "bmm": lambda x: x.view(4, 6, 8).sigmoid() @ x.view(4, 6, 8).transpose(1, 2),
    "addmm": lambda x: torch.addmm(x @ x.t(), x.cos(), x.t(), beta=0.5, alpha=2),
    "baddbmm": lambda x: torch.baddbmm(x.view(4, 6, 8), x.view(4, 6, 8), torch.ones(4, 8, 8), alpha=3),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_kind_of_product(name: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 8, requires_grad=True)

    def run() -> torch.Tensor:
        y = x * 1
        return y.sin().sum() + PRODUCTS[name](y).sin().sum()

    (truth,) = torch.autograd.grad(run(), x)
    for _ in range(3):
        with dh.saving(_line(tmp_path, 2)) as saved:
            loss = run()
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad, truth)
        report = saved.report()
        assert report.differed == {}
        assert any(name in how.split(" > ") for how in report.recomputed_by), report.recomputed_by
        assert report.rerun_flops > 0


def test_no_more_products_than_asked_for(tmp_path: pathlib.Path) -> None:
    """A chain of layers is not computed from its beginning again."""
    torch.manual_seed(0)
    model = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(16, 16), nn.Tanh())])
    x, flops = torch.randn(64, 16, requires_grad=True), []
    for products in (0, 1, 2):
        with dh.save_activations(model, "", _line(tmp_path, products, steps=8)) as saving:
            _grads(model, x)
        flops.append(saving.report().rerun_flops // (2 * 64 * 16 * 16))
    assert flops[0] == 0
    assert 0 < flops[1] <= 4
    assert flops[1] <= flops[2]


def test_a_weight_that_changes_without_a_count_is_an_error(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(40, 32, requires_grad=True)
    with dh.save_activations(model, "", _line(tmp_path)):
        for _ in range(3):
            _grads(model, x)
        loss = model(x).square().sum()
        model.up.weight.data.mul_(2)
        with pytest.raises(MutationError, match="weight was changed"):
            loss.backward()
        _grads(model, x)


def test_a_weight_that_is_changed_is_an_error(tmp_path: pathlib.Path) -> None:
    model, x = Gated(), torch.randn(40, 32)  # nobody but Recompute needs the weights of `gate` and `up`
    model.norm.requires_grad_(False)
    with dh.save_activations(model, "", _line(tmp_path)) as saving:
        loss = model(x).square().sum()
        assert "mm" in str(saving.report().recomputed_by)
        with torch.no_grad():
            model.up.weight.mul_(2)
        with pytest.raises(MutationError):
            loss.backward()


def test_a_weight_that_is_gone_is_an_error_and_one_that_came_back_is_none(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(40, 32, requires_grad=True)
    truth, weight = _grads(model, x), model.up.weight
    there, storage = weight.detach().clone(), weight.untyped_storage()
    with dh.save_activations(model, "", _line(tmp_path)):
        loss = model(x).square().sum()
        storage.resize_(0)
        with pytest.raises(StoreError, match="not in memory in backward"):
            loss.backward()
        storage.resize_(there.nbytes)
        storage.copy_(there.untyped_storage())
        loss = model(x).square().sum()
        storage.resize_(0)
        storage.resize_(there.nbytes)
        storage.copy_(there.untyped_storage())
        assert _same(list(torch.autograd.grad(loss, [*model.parameters(), x])), truth)


class Unit(nn.Module):
    """Frees its weight when its forward ends, as FSDP does, and gets it again when its own backward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(32), nn.Linear(32, 48, bias=False)
        self.there: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.there is not None:
            self.gather()
        y = self.layer(self.norm(x))
        z = y.sigmoid()
        inner = y.sin()  # saves the product inside of the unit
        self.there = self.layer.weight.detach().clone()
        self.layer.weight.untyped_storage().resize_(0)
        z.register_hook(lambda _: self.gather())
        return y, z * inner

    def gather(self, *_: object) -> None:
        storage = self.layer.weight.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.there.nbytes)
            storage.copy_(self.there.untyped_storage())


def test_a_product_that_is_saved_outside_of_its_unit_is_stored(tmp_path: pathlib.Path) -> None:
    """Its reader comes in backward before the unit has its weights again."""
    torch.manual_seed(0)
    unit, x = Unit(), torch.randn(40, 32, requires_grad=True)

    def run(hooks: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
        with hooks:
            y, z = unit(x)
            loss = y.cos().sum() + z.sum() * y.sum()
        grads = list(torch.autograd.grad(loss, [x, *unit.norm.parameters()]))
        unit.gather()
        return grads

    truth = run(contextlib.nullcontext())
    for _ in range(3):
        saved = dh.saving(_line(tmp_path))
        assert _same(run(saved), truth)
    assert "mm" in str(saved.report().recomputed_by)
    assert saved.report().stored >= 40 * 48 * 4


@pytest.mark.parametrize("products", [-1, 1.5, "1", None])
def test_a_wrong_number_is_an_error(products: object) -> None:
    with pytest.raises(UsageError, match="products must be"):
        dh.Recompute(products=products)  # type: ignore[arg-type]
