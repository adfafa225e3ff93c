"""Laws 3 and 4: many handles on one content, read in any order and any number of times, are right and load once."""

from __future__ import annotations

import gc
import os
import pathlib
import threading

import pytest
import torch

import disthooks as dh
from tests.support.stores.copies import Copies

ALL = dh.AtLeast(0)


class Reads(torch.autograd.Function):
    """Multiplies by what it saved, read twice."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*saved)  # type: ignore[attr-defined]
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first = ctx.saved_tensors  # type: ignore[attr-defined]
        second = ctx.saved_tensors  # type: ignore[attr-defined]
        for tensor in (*first, *second):
            grad = grad * tensor
        return (grad, *[None] * len(first))


def test_a_function_that_reads_twice_loads_once(tmp_path: pathlib.Path) -> None:
    x, factor = (torch.full((64, 64), value, requires_grad=True) for value in (1.0, 3.0))
    store = dh.OnDisk(tmp_path)
    with dh.saving(store) as saved:
        y = Reads.apply(x, factor)
    store.wait()  # while it is in memory, it is found there
    for count in (1, 2):
        x.grad = None
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, torch.full((64, 64), 9.0))
        assert saved.report().loaded == count * factor.nbytes


def test_two_views_of_one_content_load_once_in_every_backward(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(dh.OnDisk(tmp_path)) as saved:
        hidden = x.exp()
        y = hidden.sin() + hidden.t().cos() + hidden.view(-1).tanh().view(64, 64)
    for count in (1, 2, 3):
        before = saved.report().loaded
        (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert saved.report().loaded - before == 2 * x.nbytes, count  # hidden, and what tanh gave
    plain = x.detach().requires_grad_()
    exp = plain.exp()
    (exp.sin() + exp.t().cos() + exp.view(-1).tanh().view(64, 64)).sum().backward()
    assert torch.equal(got, plain.grad)


def test_what_one_reader_writes_no_other_sees(tmp_path: pathlib.Path) -> None:
    kept = torch.rand(64, 64)
    content = kept.clone()
    x = torch.ones(64, 64, requires_grad=True)
    with dh.saving(dh.OnDisk(tmp_path)):
        nodes = [Reads.apply(x, view).grad_fn for view in (kept, kept, kept.t(), kept[:40])]
    for node, expected in zip(nodes, (content, content, content.t(), content[:40]), strict=True):
        (got,) = node.saved_tensors
        assert torch.equal(got, expected)
        got.zero_()
        assert torch.equal(node.saved_tensors[0], expected)
    assert torch.equal(kept, content)


@pytest.mark.parametrize("shape", [(1, 32, 32), (32, 1, 32), (32, 32, 1)])
def test_the_stride_of_a_dimension_of_one_comes_back(shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    """A dimension of one may have any stride, and the tensor still is contiguous: a copy has another."""
    dense = torch.randn(32, 32)
    dim = shape.index(1)
    odd = dense.as_strided(
        shape, [7 if n == 1 else s for n, s in zip(shape, dense.unsqueeze(dim).stride(), strict=True)]
    )
    assert odd.is_contiguous()
    for store in (dh.OnDisk(tmp_path), Copies()):
        with dh.saving(ALL, store):
            node = Reads.apply(torch.ones(1, requires_grad=True), odd).grad_fn
        (got,) = node.saved_tensors
        assert (got.shape, got.stride()) == (odd.shape, odd.stride())
        assert torch.equal(got, odd)


def test_a_codec_that_leaves_it_and_a_store_that_does_too() -> None:
    """Then it is in memory as it is, and what is made of it later must not reach the user's tensor."""

    class Prepared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gradient)  # type: ignore[attr-defined]
            return (x * gradient).sum()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return ctx.saved_tensors[0], None  # type: ignore[attr-defined]

    gradient = torch.rand(64, 64).bfloat16()
    content = gradient.clone()
    x = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with dh.saving(dh.Cast(torch.bfloat16), dh.OnCpu()) as saved:
        loss = Prepared.apply(x, gradient)
    assert saved.report().kept_by == {"in place": gradient.nbytes}
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(gradient, content)
    assert torch.equal(x.grad, content + content)


def test_memory_that_is_exchanged_uncounted_is_not_mistaken(tmp_path: pathlib.Path) -> None:
    """``x.data = ...`` counts no change: the same tensor at the same version, and other contents."""
    x = torch.zeros(64, 64)
    anchor = torch.zeros(1, requires_grad=True)
    nodes = []
    with dh.saving(ALL, dh.OnDisk(tmp_path)) as saved:
        for i in range(50):
            x.data = torch.full((64, 64) if i % 2 else (32, 128), float(i))
            nodes.append(Reads.apply(anchor, x).grad_fn)
            nodes.append(Reads.apply(anchor, x).grad_fn)
            anchor.exp()
    assert saved.report().shared >= 50 * x.nbytes
    for i, node in enumerate(nodes):
        (got,) = node.saved_tensors
        assert torch.equal(got, torch.full((64, 64) if i // 2 % 2 else (32, 128), float(i // 2)))


def test_what_is_found_again_does_not_grow() -> None:
    """A long training keeps no memory of tensors that are gone."""
    saved = dh.saving(ALL, Copies())
    x = torch.ones(8, 8, requires_grad=True)
    for _ in range(40):
        with saved:
            y = x
            for _ in range(100):
                y = y.sin()
        y.sum().backward()
    index = saved._site.ledger.index
    assert saved.report().stored >= 40 * 100 * x.nbytes
    assert len(index._packed) + len(index._seen) < 2200
    assert not saved._site.ledger._changes
    del y
    gc.collect()
    assert saved.report().held == 0


def test_a_content_shared_by_very_many_keeps_no_list_of_those_that_are_gone() -> None:
    saved = dh.saving(ALL, Copies())
    x = torch.ones(8, 8, requires_grad=True).exp()
    with saved:
        stays = x.sin()
        for _ in range(1000):
            x.cos()
    (packed,) = {reference() for reference in saved._site.ledger.index._packed.values()} - {None}
    assert len(packed.handles) <= 130
    stays.sum().backward()


def test_what_is_written_uncounted_is_stored_as_it_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves, as attacks write them, and constant vectors, as batch norm does; also while they wait to be written."""
    go_on, write, store = threading.Event(), os.pwrite, dh.OnDisk(tmp_path)
    store.drop(store.put(torch.ones(4096)))  # the first one tries the file, in this thread
    monkeypatch.setattr(os, "pwrite", lambda *args: (go_on.wait(10), write(*args))[1])
    for tensor in (torch.ones(64, 64, requires_grad=True), torch.ones(4096)):
        go_on.clear()
        with dh.saving(ALL, store):
            node = Reads.apply(torch.ones(1, requires_grad=True), tensor).grad_fn
        tensor.data.mul_(2)
        go_on.set()
        store.wait()
        assert torch.equal(node.saved_tensors[0], torch.ones_like(tensor))
