"""Law 1, exact.

"A lossless pipeline gives gradients bit-identical to none, for every differentiable op torch ships and every engine."

This file shows it on whole models with every lossless pipeline, on kinds of tensors, on torch's modes, and on the
programs that broke it once. Its siblings show it for compositions with other tools, compiled code, codecs, Recompute,
random programs, and every operator, module and dtype of torch; tests/engines shows it on every engine.
"""

from __future__ import annotations

import contextlib
import copy
import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.models import CASES, build, identical, step, stores
from tests.support.stores.pairs import Pair, ones
from tests.support.switch import KIND

pytestmark = pytest.mark.any_device


# --- Whole models, with every lossless pipeline


KINDS = list(stores("/tmp"))


def _really_happened(kind: str, report: object) -> None:
    if kind == "cpu" and KIND == "cpu":  # the tensors are in CPU memory already
        assert report.kept_by["in place"] > 0
        assert report.moved == 0
    else:
        assert report.stored > 1000
        assert report.loaded > 1000
        if kind == "tiers":  # what stays in the first tiers has not moved; a store has the figures of all its users
            gone = sum(tier.written + tier.never_written + tier.in_flight for tier in report.tiers[1:])
            assert report.moved <= gone
            assert (report.moved > 0) == (gone > 0)
        else:  # what a user's functions do is not known
            assert report.moved == (0 if kind == "functions" else report.stored)
    assert report.held == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_in_a_block_of_code_are_exact(case: str, kind: str, tmp_path: pathlib.Path) -> None:
    model, x = build(case)
    truth = step(model, x)
    saved = dh.saving(stores(tmp_path)[kind])
    assert identical(step(model, x, saved), truth)
    _really_happened(kind, saved.report())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_modules_attached_in_place_are_exact(case: str, kind: str, tmp_path: pathlib.Path) -> None:
    model, x = build(case)
    truth = step(model, x)
    with dh.save_activations(model, "*", stores(tmp_path)[kind]) as saving:
        assert identical(step(model, x), truth)
    _really_happened(kind, saving.report())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_wrapped_modules_are_exact(kind: str, tmp_path: pathlib.Path) -> None:
    model, x = build("transformer")
    truth = step(model, x)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = dh.SaveWith(block, stores(tmp_path)[kind])
    assert identical(step(model, x), truth)
    for block in model.blocks:
        _really_happened(kind, block.report())


def test_training_in_lower_precision_with_accumulation_has_the_same_losses(tmp_path: pathlib.Path) -> None:
    """Autocast, gradient accumulation and an optimizer: the same losses over three steps."""

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for i in range(6):
            torch.manual_seed(i)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    model, x = build("transformer")
    plain = train(copy.deepcopy(model))
    with dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path)) as saving:
        assert train(model) == plain
    assert saving.report().moved > 0
    assert saving.report().recast > 0


# --- Every kind of tensor, and torch's modes


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
def test_every_kind_of_tensor_is_exact(function: Callable, pair: Pair) -> None:
    x = ones(4, 4)
    (truth,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(torch.autograd.grad(pair(function, x).sum(), x)[0], truth)


def test_dual_numbers_keep_their_tangents(pair: Pair) -> None:
    """Forward mode runs over backward mode, and autograd itself keeps the tangents of saved tensors."""
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
def test_jacobians_and_hessians_are_exact(name: str, options: dict, pair: Pair) -> None:
    x = ones(3, 3).detach()
    function = {"jacobian": lambda x: x.exp() @ x.sin(), "hessian": lambda x: (x.exp() @ x.sin()).square().sum()}[name]
    call = getattr(torch.autograd.functional, name)
    truth = call(function, x, **options)
    assert torch.equal(pair(lambda: call(function, x, **options)), truth)
    assert torch.equal(call(lambda x: pair(function, x), x, **options), truth)


# --- Programs that gave other gradients once


Run = Callable[[contextlib.AbstractContextManager[object]], list]


def _exact(run: Run, folder: pathlib.Path) -> bool:
    truth = run(contextlib.nullcontext())
    return identical(run(dh.saving(pipeline(dh.OnDisk(folder), at_least=0))), truth)


def test_running_statistics_that_change_without_a_version_are_saved_as_they_were(tmp_path: pathlib.Path) -> None:
    """Batch norm writes its running statistics in place, and torch does not count that as a change."""

    def run(context: contextlib.AbstractContextManager[object]) -> list:
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(16), torch.randn(8, 16, requires_grad=True)
        with context:
            before = norm.eval()(x)
            during = norm.train()(x.detach() * 3 + 1)
            after = norm.eval()(x)
        (after.square().sum() + before.detach().sum() + during.sum()).backward()
        return [x.grad, norm.weight.grad]

    assert _exact(run, tmp_path)


def test_chunks_with_versions_of_their_own_are_told_apart(tmp_path: pathlib.Path) -> None:
    """``unsafe_chunk`` gives chunks of one storage, and each chunk has a version counter of its own."""

    def run(context: contextlib.AbstractContextManager[object]) -> list:
        torch.manual_seed(0)
        x = torch.randn(4, 16, requires_grad=True)
        with context:
            a, b = (x * 1.5).unsafe_chunk(2, 1)
            a = a.sigmoid_()
            c = a.square()
            y = (b.tanh_() * c).sum()
        y.backward()
        return [x.grad]

    assert _exact(run, tmp_path)


def _channels_last(weight: nn.Parameter) -> torch.Tensor:
    return weight.to(torch.bfloat16, memory_format=torch.channels_last)


def _rounded(weight: nn.Parameter) -> torch.Tensor:
    copy = weight.to(torch.bfloat16)
    with torch.no_grad():
        copy.mul_(4).round_()
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", [_channels_last, _rounded, lambda w: w.to(torch.bfloat16, copy=True)])
def test_a_cast_that_is_not_autocasts_is_not_taken_for_one(
    cast: Callable, dtype: torch.dtype, tmp_path: pathlib.Path
) -> None:
    """Only autocast's own copy of a weight may be dropped and cast again; other narrow copies hold other values."""

    def run(context: contextlib.AbstractContextManager[object]) -> list:
        torch.manual_seed(0)
        flat = torch.randn(1000).to(dtype)
        weight = nn.Parameter(flat[100 : 100 + 288].view(8, 4, 3, 3))  # as in a flat buffer
        x = torch.randn(2, 4, 8, 8, dtype=torch.bfloat16, requires_grad=True)
        with context:
            y = F.conv2d(x, cast(weight))
        y.float().square().sum().backward()
        return [x.grad, weight.grad]

    assert _exact(run, tmp_path)
