"""Law 3, once.

"Aliases of one storage at one version are stored once; strides, offset, memory format, conj/neg bits and `expand`
come back as they were, and nothing is materialised on the way. The key is the storage itself (held weakly, so its
address cannot be reused) and its version, never a data pointer."

This file shows layouts, sharing, parts of storages, versions, and readers that share a content. Its sibling counts
what thousands of views cost.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import disthooks as dh
from disthooks._tensors import Layout
from disthooks.saved.codecs import Codec
from disthooks.saved.pipeline import pipeline
from tests.support.functions import Prepared, Save
from tests.support.stores.copies import Copies

pytestmark = pytest.mark.any_device


# --- A layout comes back as it was


def _saved(folder: object, *tensors: torch.Tensor, line: object = None) -> tuple[dh.saving, tuple]:
    anchor = torch.zeros(1, requires_grad=True)
    with dh.saving(line or pipeline(dh.OnDisk(folder), at_least=0)) as saved:
        # Older torch releases what a node saved when the node's output goes.
        saved.output = Save.apply(anchor, *tensors)
    return saved, saved.output.grad_fn


BASE = torch.arange(512.0).reshape(8, 64)
VIEWS = {
    "same": BASE,
    "transposed": BASE.t(),
    "offset": BASE[1:],
    "strided": BASE[:, ::2],
    "small slice": BASE[2:4, 5:9],
    "column": BASE[:, 3],
    "expanded": BASE[:1].expand(8, 64),
    "expanded scalar": BASE[0, 0].expand(5, 5),
    "windows": BASE.flatten().unfold(0, 8, 4),
    "few windows": BASE.flatten()[:32].unfold(0, 8, 4),
    "zero-dim": BASE[2, 2],
    "empty": BASE[:0],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conj": torch.randn(16, 4, dtype=torch.complex64).conj(),
    "conj of a slice": torch.randn(16, 4, dtype=torch.complex64).conj()[2:4],
    "neg": torch.randn(16, 4, dtype=torch.complex64).conj().imag,
    "a stride of a dimension of one that a copy would not have": BASE.as_strided((8, 1, 64), (64, 7, 1)),
    "gaps": torch.randn(10, 10)[:7, :9],
}


def _assert_same(back: torch.Tensor, view: torch.Tensor) -> None:
    assert (back.dtype, back.shape, back.stride()) == (view.dtype, view.shape, view.stride())
    assert (back.is_conj(), back.is_neg()) == (view.is_conj(), view.is_neg())
    assert torch.equal(back, view)


@pytest.mark.parametrize("name", VIEWS)
def test_a_layout_comes_back(name: str, tmp_path: pathlib.Path) -> None:
    view = VIEWS[name]
    saved, node = _saved(tmp_path, view)
    (back,) = node.saved_tensors
    _assert_same(back, view)
    assert saved.report().moved <= view.untyped_storage().nbytes()
    assert (saved.report().moved > 0) == (view.numel() > 0)


def _step(data: st.DataObject, x: torch.Tensor) -> torch.Tensor:
    kind = data.draw(st.sampled_from(["slice", "transpose", "expand", "unfold", "flatten"]))
    dim = data.draw(st.integers(0, x.dim() - 1)) if x.dim() else 0
    if kind == "slice" and x.dim() and x.shape[dim] > 1:
        start = data.draw(st.integers(0, x.shape[dim] - 1))
        index = [slice(None)] * x.dim()
        index[dim] = slice(start, data.draw(st.integers(start + 1, x.shape[dim])), data.draw(st.integers(1, 3)))
        return x[tuple(index)]
    if kind == "transpose" and x.dim() > 1:
        return x.transpose(0, dim)
    if kind == "expand":
        return x.unsqueeze(0).expand(data.draw(st.integers(1, 3)), *x.shape)
    if kind == "unfold" and x.dim() and x.dim() < 5 and x.shape[dim] > 2:
        return x.unfold(dim, 2, 1)
    return x.flatten() if kind == "flatten" and x.is_contiguous() else x


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_view_of_views_comes_back(data: st.DataObject) -> None:
    """Random chains of slicing, transposing and expanding make views.

    All are saved together, and each comes back exactly.
    """
    base = torch.arange(float(data.draw(st.sampled_from([24, 60, 120])))).reshape(2, 3, -1)
    views = [base]
    for _ in range(data.draw(st.integers(1, 4))):
        views.append(_step(data, views[-1]))
    chosen = data.draw(st.permutations(views))
    _saves, node = _saved("/tmp", *chosen)
    for back, view in zip(node.saved_tensors, chosen, strict=True):
        _assert_same(back, view)


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


def test_a_layout_does_not_lengthen_its_storage() -> None:
    """``set_`` would lengthen it, with bytes that nobody wrote."""
    layout = Layout.of(torch.zeros(4, 4))
    with pytest.raises(dh.errors.StoreError, match="was taken away"):
        layout.over(torch.zeros(3).untyped_storage())


# --- Aliases share one content


def test_views_share_one_content(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64)
    saved, node = _saved(tmp_path, x, x.t(), x.view(-1), x[:40], x)
    report = saved.report()
    assert report.stored == x.nbytes
    assert report.shared == 3 * x.nbytes + x[:40].nbytes
    for back, view in zip(node.saved_tensors, (x, x.t(), x.view(-1), x[:40], x), strict=True):
        _assert_same(back, view)
    assert saved.report().loaded == x.nbytes  # one load for all five


def test_sharing_reaches_across_modules(tmp_path: pathlib.Path) -> None:
    """The output of a ReLU is the input of the next layer: it is one content under one attachment."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with dh.save_activations(model, (nn.Linear, nn.ReLU), dh.OnDisk(tmp_path)) as saving:
        model(torch.randn(64, 64)).sum().backward()
    assert saving.report().stored == 2 * 64 * 64 * 4  # the input and the ReLU's output
    assert saving.report().shared == 64 * 64 * 4
    assert saving.report().loaded == 2 * 64 * 64 * 4


def test_a_small_slice_is_compacted_and_its_views_share_it(tmp_path: pathlib.Path) -> None:
    x = torch.randn(4, 16, 3 * 32)
    q = x[..., 32:64]
    heads = q.unflatten(-1, (4, 8)).transpose(1, 2)
    saved, node = _saved(tmp_path, q, heads)
    assert saved.report().stored == q.nbytes
    assert saved.report().shared == q.nbytes
    for back, view in zip(node.saved_tensors, (q, heads), strict=True):
        _assert_same(back, view)
    assert saved.report().loaded == q.nbytes


def test_parts_that_are_saved_together_are_stored_as_one(tmp_path: pathlib.Path) -> None:
    """Queries, keys and values are stored as the one storage that they are parts of, and read back once."""
    qkv = torch.randn(4, 16, 3 * 32, requires_grad=True).exp()
    thirds = [third.unflatten(-1, (4, 8)).transpose(1, 2) for third in qkv.chunk(3, dim=-1)]
    saved, node = _saved(tmp_path, *thirds)
    assert saved.report().stored == qkv.nbytes
    assert saved.report().shared == 2 * thirds[0].nbytes
    back = node.saved_tensors
    assert saved.report().loaded == qkv.nbytes
    assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 1
    for one, view in zip(back, thirds, strict=True):
        _assert_same(one, view)


def test_parts_that_are_little_of_their_storage_do_not_pull_the_rest_along(tmp_path: pathlib.Path) -> None:
    x = torch.randn(16, 96)
    views = [x[:, 8:24], x[:, 40:56], x[:2]]
    saved, node = _saved(tmp_path, *views)
    assert saved.report().stored == sum(view.nbytes for view in views)
    for one, view in zip(node.saved_tensors, views, strict=True):
        _assert_same(one, view)


def test_parts_go_through_a_codec_as_one(tmp_path: pathlib.Path) -> None:
    x = torch.randn(16, 96)
    views = (x[:, :40], x[:, 40:80], x[:, 80:])
    line = pipeline(dh.Cast(torch.bfloat16), dh.OnDisk(tmp_path), at_least=0)
    saved, node = _saved(tmp_path, *views, line=line)
    assert saved.report().stored == x.nbytes // 2
    for one, view in zip(node.saved_tensors, views, strict=True):
        assert torch.equal(one, view.bfloat16().float())
        assert one.stride() == view.stride()


# --- Another version is another content, and so is other memory


def test_another_version_is_another_content(tmp_path: pathlib.Path) -> None:
    line = pipeline(dh.OnDisk(tmp_path), at_least=0)
    x, anchor = torch.zeros(100), torch.zeros(1, requires_grad=True)
    with dh.saving(line) as saved:
        first = Save.apply(anchor, x)
        anchor.exp()
        x.add_(1)
        second = Save.apply(anchor, x)
    assert saved.report().stored >= 2 * x.nbytes
    assert second.grad_fn.saved_tensors[0].sum() == 100
    with pytest.raises(dh.errors.MutationError):
        _ = first.grad_fn.saved_tensors


def test_an_address_used_again_is_not_mistaken(tmp_path: pathlib.Path) -> None:
    """Storages come and go at the same address; each saved tensor keeps its own contents."""
    anchor = torch.zeros(1, requires_grad=True)
    outputs = []
    addresses = set()
    with dh.saving(dh.OnDisk(tmp_path, in_flight=0), at_least=0):
        for i in range(300):
            fresh = torch.full((64,), float(i))
            addresses.add(fresh.data_ptr())
            outputs.append(Save.apply(anchor, fresh))
            anchor.exp()
            del fresh
    assert len(addresses) < 300  # an address was used again
    for i, output in enumerate(outputs):
        assert torch.equal(output.grad_fn.saved_tensors[0], torch.full((64,), float(i)))


def test_memory_that_is_exchanged_uncounted_is_not_mistaken(tmp_path: pathlib.Path) -> None:
    """``x.data = ...`` counts no change: the tensor and its version are the same, and its contents are others."""
    x = torch.zeros(64, 64)
    anchor = torch.zeros(1, requires_grad=True)
    outputs = []
    with dh.saving(dh.OnDisk(tmp_path), at_least=0) as saved:
        for i in range(50):
            x.data = torch.full((64, 64) if i % 2 else (32, 128), float(i))
            outputs.append(Reads.apply(anchor, x))
            outputs.append(Reads.apply(anchor, x))
            anchor.exp()
    assert saved.report().shared >= 50 * x.nbytes
    for i, output in enumerate(outputs):
        (got,) = output.grad_fn.saved_tensors
        assert torch.equal(got, torch.full((64, 64) if i // 2 % 2 else (32, 128), float(i // 2)))


def test_an_entry_that_is_going_is_not_found(tmp_path: pathlib.Path) -> None:
    """A thread that saves a tensor while another drops the last handle of it must not revive the dropped bytes."""
    dropping, packed = threading.Event(), threading.Event()

    class Slow(dh.OnDisk):
        def drop(self, ticket: object) -> None:
            super().drop(ticket)
            if not dropping.is_set():
                dropping.set()
                packed.wait(120)

    x = torch.randn(64, 64, requires_grad=True)
    saved = dh.saving(Slow(tmp_path))
    with saved:
        first = x.sin()
    graphs = [first]
    del first
    thread = threading.Thread(target=graphs.clear)
    thread.start()
    assert dropping.wait(120)
    with saved:
        again = x.sin()
        junk = torch.ones(64, 64, requires_grad=True) * torch.randn(64, 64)
    packed.set()
    thread.join()
    again.sum().backward()
    assert junk is not None
    assert torch.equal(x.grad, x.detach().cos())


class Conjugates(Copies):
    """Complex tensors come back as the lazy conjugate of their conjugate: the same values."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().put(tensor.conj().resolve_conj() if tensor.is_complex() else tensor)

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        return super().get(ticket).conj() if ticket.is_complex() else super().get(ticket)


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
    becomes_a_leaf,
    becomes_a_running_statistic,
    leaf_that_is_a_view,
    backward_in_inference_mode,
    complex_by_two_dtypes,
    swapped_when_all_is_gone,
]


@pytest.mark.parametrize("late", [False, True], ids=["in flight", "written"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_that_change_what_they_share_are_as_without_hooks(
    program: Callable[[Any], list], late: bool, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    expected = program(contextlib.nullcontext())
    for store in (dh.OnDisk(tmp_path, in_flight=0 if late else "64 MiB"), Conjugates()):
        torch.manual_seed(0)
        found = program(dh.saving(store, at_least=0))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), program.__name__


# --- Readers of one content load it once, and none sees what another wrote


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
        outputs = [Reads.apply(x, view) for view in (kept, kept, kept.t(), kept[:40])]
    for output, expected in zip(outputs, (content, content, content.t(), content[:40]), strict=True):
        (got,) = output.grad_fn.saved_tensors
        assert torch.equal(got, expected)
        got.zero_()
        assert torch.equal(output.grad_fn.saved_tensors[0], expected)
    assert torch.equal(kept, content)


def test_what_is_found_again_does_not_grow() -> None:
    """A long training keeps no memory of tensors that are gone."""
    saved = dh.saving(Copies(), at_least=0)
    x = torch.ones(8, 8, requires_grad=True)
    for _ in range(40):
        with saved:
            y = x
            for _ in range(100):
                y = y.sin()
        y.sum().backward()
    index = saved._site.pipeline.contents
    assert saved.report().stored >= 40 * 100 * x.nbytes
    assert max(len(index._by_key), len(index.by_owner), len(index.alive)) < 1300
    del y
    gc.collect()
    assert saved.report().held == 0


class Round(Codec):
    """Changes neither dtype nor shape, so it decodes to the tensor that the store holds."""

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], None]:
        return (tensor.round(decimals=2),), None

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: None) -> torch.Tensor:
        return tensors[0]


def test_what_a_codec_leaves_is_not_written_to_by_a_reader() -> None:
    with dh.saving(Round(), dh.OnCpu()):
        output = Save.apply(torch.ones(1, requires_grad=True), torch.full((64, 64), 3.0))
    output.grad_fn.saved_tensors[0].zero_()
    assert output.grad_fn.saved_tensors[0][0, 0] == 3


def test_what_a_codec_made_never_becomes_a_gradient() -> None:
    """This holds for tensors with a history, too.

    If a backward returned the stored tensor, the next backward would add to it.
    """
    a, w = (torch.ones(64, 64, requires_grad=True) for _ in range(2))
    with dh.saving(Round(), dh.OnDevice(), at_least=0):
        loss = Prepared.apply(a, w * 1.234)
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert torch.equal(a.grad, torch.full((64, 64), 1.23) * 3)


def test_what_was_brought_back_is_let_go(tmp_path: pathlib.Path) -> None:
    """A restored content stays in memory until the last view that waits for it was read, and not longer."""
    x = torch.randn(64, 64, requires_grad=True)
    saves, node = _saved(tmp_path, x, x.t())
    saves._site.pipeline.store.wait()  # until it is written, the memory that was put is given back
    first, second = node.saved_tensors
    assert first.data_ptr() == second.data_ptr()
    storage = first.untyped_storage()._weak_ref()
    del first, second
    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
