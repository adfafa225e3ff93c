"""Laws 1, 3 and 4: what a review found where contents are shared, each against torch without hooks."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.codecs import Codec
from disthooks.saved.stores.base import Store


class Prepared(torch.autograd.Function):
    """Computes its gradient in forward, as fused losses do, and returns what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return (x.detach() * gradient).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class Memory(Store):
    """Clones what it is given, and gives that clone's conjugate of the conjugate: the same values, lazily."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.conj().resolve_conj() if tensor.is_complex() else tensor.clone()

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket.clone().conj() if ticket.is_complex() else ticket.clone()

    def drop(self, ticket: torch.Tensor) -> None:
        """Nothing."""


class Round(Codec):
    """Leaves dtype and shape, and so decodes to the very tensor that the store holds."""

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], None]:
        return (tensor.round(decimals=2),), None

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: None) -> torch.Tensor:
        return tensors[0]


def two_parameters(hooks: Any) -> list:
    gradient = torch.full((64, 64), 3.0)
    a, b = (torch.ones(64, 64, requires_grad=True) for _ in range(2))
    with hooks:
        loss = Prepared.apply(a, gradient) + Prepared.apply(b, gradient)
    loss.backward(retain_graph=True)
    assert a.grad.data_ptr() != b.grad.data_ptr()
    loss.backward()
    twice = [a.grad.clone(), b.grad.clone()]
    a.grad = b.grad = None
    with hooks:
        loss = Prepared.apply(a, gradient) + Prepared.apply(b, gradient)
    loss.backward()
    nn.utils.clip_grad_norm_([a, b], 1.0)
    return [*twice, a.grad, b.grad, gradient]


def gradient_zeroed_uncounted(hooks: Any) -> list:
    a = torch.ones(64, 64, requires_grad=True)
    with hooks:
        loss = Prepared.apply(a, torch.full((64, 64), 3.0))
    loss.backward(retain_graph=True)
    a.grad.data.zero_()
    loss.backward()
    return [a.grad]


def becomes_a_leaf(hooks: Any) -> list:
    x, w = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)
    with hooks:
        keep = (w * x).sum()
    x.requires_grad_()
    x.data.mul_(2)
    with hooks:
        loss = (x * x).sum()
    return [*torch.autograd.grad(loss, x), keep]


def becomes_a_running_statistic(hooks: Any) -> list:
    w, x, var, losses = torch.ones(4096, requires_grad=True), torch.randn(8, 4096), torch.ones(4096), []
    with hooks:
        mean = w * 1.0
        keep = (mean * mean).sum()
        mean.detach_()
        for _ in range(2):
            losses.append((w * mean).sum())
            nn.functional.batch_norm(x, mean, var, training=True)
    return [*torch.autograd.grad(losses[1], w), keep]


def leaf_that_is_a_view(hooks: Any) -> list:
    v = torch.ones(65, 64)[1:].requires_grad_()
    with hooks:
        first = (v * v).sum()
    v.data.mul_(2)
    with hooks:
        second = (v * v).sum()
    return [*torch.autograd.grad(second, v), first]


def backward_in_inference_mode(hooks: Any) -> list:
    x = torch.randn(64, 64, requires_grad=True)
    with hooks:
        hidden = x.exp()
        y = hidden[:, :20].sin().sum() + hidden.t().cos().sum()
    with torch.inference_mode():
        return [grad.clone() for grad in torch.autograd.grad(y, x)]


def complex_by_two_dtypes(hooks: Any) -> list:
    x = torch.randn(64, 64, dtype=torch.complex64, requires_grad=True)
    with hooks:
        hidden = x.exp()
        y = (hidden * hidden).real.sum() + torch.view_as_real(hidden).pow(2).sum()
    return list(torch.autograd.grad(y, x))


def swapped_when_all_is_gone(hooks: Any) -> list:
    a, b, w = torch.ones(64, 64), torch.zeros(64, 64), torch.ones(64, 64, requires_grad=True)
    with hooks:
        loss = (w * a).sum()
    loss.backward()
    del loss
    torch.utils.swap_tensors(a, b)
    return [a, b]


PROGRAMS: list[Callable[[Any], list]] = [
    two_parameters,
    gradient_zeroed_uncounted,
    becomes_a_leaf,
    becomes_a_running_statistic,
    leaf_that_is_a_view,
    backward_in_inference_mode,
    complex_by_two_dtypes,
    swapped_when_all_is_gone,
]


@pytest.mark.parametrize("late", [False, True], ids=["in flight", "written"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_without_hooks(program: Callable[[Any], list], late: bool, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    expected = program(contextlib.nullcontext())
    for store in (dh.OnDisk(tmp_path, in_flight=0 if late else "64 MiB"), Memory()):
        torch.manual_seed(0)
        found = program(dh.saving(dh.AtLeast(0), store))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), program.__name__


@pytest.mark.parametrize("width", [64, 640])
def test_readers_of_one_content_load_it_once(width: int, tmp_path: pathlib.Path) -> None:
    """All of a storage, or a tenth of it that lies apart."""
    part = torch.randn(64, width, requires_grad=True).exp()[:, :64]
    with dh.saving(dh.OnDisk(tmp_path)) as saved:
        y = part.sin().sum() + part.cos().sum() + part.atan().sum()
    y.backward()
    assert saved.report().loaded == saved.report().stored


def test_what_a_codec_leaves_is_not_written_to_by_a_reader() -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(y)
            return x * 1

    with dh.saving(Round(), dh.OnCpu()):
        node = Save.apply(torch.ones(1, requires_grad=True), torch.full((64, 64), 3.0)).grad_fn
    node.saved_tensors[0].zero_()
    assert node.saved_tensors[0][0, 0] == 3


def test_what_a_codec_made_never_becomes_a_gradient() -> None:
    """Of what has a history, too: a backward that returns it would have the next one add to what is stored."""
    a, w = (torch.ones(64, 64, requires_grad=True) for _ in range(2))
    with dh.saving(dh.AtLeast(0), Round(), dh.OnDevice()):
        loss = Prepared.apply(a, w * 1.234)
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert torch.equal(a.grad, torch.full((64, 64), 1.23) * 3)
