"""Law 3, once: aliases of one storage at one version are stored once, and come back exactly as they were."""

from __future__ import annotations

import gc
import os
import pathlib
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import disthooks as dh
from disthooks._tensors import Layout, region_of


class Save(torch.autograd.Function):
    """Saves what it is given, so that a test can read it back from ``grad_fn.saved_tensors``."""

    @staticmethod
    def forward(ctx: object, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple:
        return (grad, *[None] * len(ctx.saved_tensors))


def _saved(folder: object, *tensors: torch.Tensor, line: object = None) -> tuple[dh.saving, tuple]:
    anchor = torch.zeros(1, requires_grad=True)
    with dh.saving(line or dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder))) as saved:
        saved.output = Save.apply(anchor, *tensors)  # older torch lets go of what a node saved when its output goes
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
    "gaps": torch.randn(10, 10)[:7, :9],
}
DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex32,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int64,
]


@pytest.mark.parametrize("name", VIEWS)
def test_layout_comes_back(name: str, tmp_path: pathlib.Path) -> None:
    view = VIEWS[name]
    saved, node = _saved(tmp_path, view)
    (back,) = node.saved_tensors
    _assert_same(back, view)
    assert saved.report().moved <= view.untyped_storage().nbytes()
    assert (saved.report().moved > 0) == (view.numel() > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    tensor = torch.randint(0, 255, (128,), dtype=torch.uint8).view(torch.uint8)
    tensor = tensor % 2 == 0 if dtype is torch.bool else tensor.view(dtype)
    saved, node = _saved(tmp_path, tensor)
    (back,) = node.saved_tensors
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert saved.report().moved == tensor.nbytes


def test_views_share_one_content(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64)
    saved, node = _saved(tmp_path, x, x.t(), x.view(-1), x[:40], x)
    report = saved.report()
    assert report.stored == x.nbytes
    assert report.shared == 3 * x.nbytes + x[:40].nbytes
    for back, view in zip(node.saved_tensors, (x, x.t(), x.view(-1), x[:40], x), strict=True):
        _assert_same(back, view)
    assert saved.report().loaded == x.nbytes  # one load for all five


def test_a_small_slice_is_compacted_and_its_views_share_it(tmp_path: pathlib.Path) -> None:
    x = torch.randn(4, 16, 3 * 32)
    q = x[..., 32:64]
    heads = q.unflatten(-1, (4, 8)).transpose(1, 2)
    saved, node = _saved(tmp_path, q, heads)
    assert saved.report().stored == q.nbytes
    assert saved.report().shared == q.nbytes
    for back, view in zip(node.saved_tensors, (q, heads), strict=True):
        _assert_same(back, view)


def test_parts_that_are_saved_together_are_stored_as_one(tmp_path: pathlib.Path) -> None:
    """Queries, keys and values: no copies out of their storage, none over all of its strides, and one read."""
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


def test_a_part_of_what_is_stored_whole_is_not_stored_again(tmp_path: pathlib.Path) -> None:
    x = torch.randn(4, 96)
    saved, node = _saved(tmp_path, x, x[:, 8:16], x[:2, 90:])
    assert saved.report().stored == x.nbytes
    for one, view in zip(node.saved_tensors, (x, x[:, 8:16], x[:2, 90:]), strict=True):
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
    line = dh.pipeline(dh.AtLeast(0), dh.Cast(torch.bfloat16), dh.OnDisk(tmp_path))
    saved, node = _saved(tmp_path, *views, line=line)
    assert saved.report().stored == x.nbytes // 2
    for one, view in zip(node.saved_tensors, views, strict=True):
        assert torch.equal(one, view.bfloat16().float())
        assert one.stride() == view.stride()


def test_a_part_that_may_be_written_uncounted_is_for_itself(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaf that is a view of what is none is written by attacks, while the rest of its storage waits for the disk."""
    go_on, write, store = threading.Event(), os.pwrite, dh.OnDisk(tmp_path)
    store.drop(store.put(torch.ones(4096)))  # the first one tries the file, in this thread
    monkeypatch.setattr(os, "pwrite", lambda *args: (go_on.wait(10), write(*args))[1])
    x = torch.ones(64, 96)
    leaf = x[:, 40:80].requires_grad_()
    with dh.saving(dh.AtLeast(0), store):
        node = Save.apply(torch.zeros(1, requires_grad=True), x[:, :40], leaf).grad_fn
    leaf.data.mul_(2)
    go_on.set()
    store.wait()
    first, second = node.saved_tensors
    assert torch.equal(second, torch.ones(64, 40))
    assert torch.equal(first, torch.ones(64, 40))


def test_a_part_that_changes_after_another_was_saved_is_another_content(tmp_path: pathlib.Path) -> None:
    x = torch.randn(4, 96)
    before = x.clone()
    line = dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))
    anchor = torch.zeros(1, requires_grad=True)
    with dh.saving(line):
        first = Save.apply(anchor, x[:, :32])
        x.data[:, 32:64] = 0  # uncounted, and no concern of what was saved
        second = Save.apply(anchor, x[:, 64:])
    assert torch.equal(first.grad_fn.saved_tensors[0], before[:, :32])
    assert torch.equal(second.grad_fn.saved_tensors[0], before[:, 64:])


def test_another_version_is_another_content(tmp_path: pathlib.Path) -> None:
    line = dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))
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


def test_sharing_reaches_across_modules(tmp_path: pathlib.Path) -> None:
    """A ReLU's output is the next layer's input: one content under one attachment."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with dh.save_activations(model, (nn.Linear, nn.ReLU), dh.OnDisk(tmp_path)) as saving:
        model(torch.randn(64, 64)).sum().backward()
    assert saving.report().stored == 2 * 64 * 64 * 4  # the input and the ReLU's output
    assert saving.report().shared == 64 * 64 * 4
    assert saving.report().loaded == 2 * 64 * 64 * 4


def test_an_address_used_again_is_not_mistaken(tmp_path: pathlib.Path) -> None:
    """Storages come and go at the same address; each saved tensor keeps its own contents."""
    anchor = torch.zeros(1, requires_grad=True)
    outputs = []
    addresses = set()
    with dh.saving(dh.AtLeast(0), dh.OnDisk(tmp_path, in_flight=0)):
        for i in range(300):
            fresh = torch.full((64,), float(i))
            addresses.add(fresh.data_ptr())
            outputs.append(Save.apply(anchor, fresh))
            anchor.exp()
            del fresh
    assert len(addresses) < 300  # it did happen
    for i, output in enumerate(outputs):
        assert torch.equal(output.grad_fn.saved_tensors[0], torch.full((64,), float(i)))


def test_what_was_brought_back_is_let_go(tmp_path: pathlib.Path) -> None:
    """The memory of a content lives until the last view that waits for it had it, not longer."""
    x = torch.randn(64, 64, requires_grad=True)
    saves, node = _saved(tmp_path, x, x.t())
    saves._site.pipeline.store.wait()  # until then it is the memory that was put
    first, second = node.saved_tensors
    assert first.data_ptr() == second.data_ptr()
    storage = first.untyped_storage()._weak_ref()
    del first, second
    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def _assert_same(back: torch.Tensor, view: torch.Tensor) -> None:
    assert (back.dtype, back.shape, back.stride()) == (view.dtype, view.shape, view.stride())
    assert (back.is_conj(), back.is_neg()) == (view.is_conj(), view.is_neg())
    assert torch.equal(back, view)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_view_of_views(data: st.DataObject) -> None:
    """Random chains of slicing, transposing, expanding: all saved together, all back exactly."""
    base = torch.arange(float(data.draw(st.sampled_from([24, 60, 120])))).reshape(2, 3, -1)
    views = [base]
    for _ in range(data.draw(st.integers(1, 4))):
        views.append(_step(data, views[-1]))
    chosen = data.draw(st.permutations(views))
    _saves, node = _saved("/tmp", *chosen)
    for back, view in zip(node.saved_tensors, chosen, strict=True):
        _assert_same(back, view)


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


def test_half_a_storage_is_kept_whole() -> None:
    x = torch.zeros(10, 10)
    assert region_of(Layout.of(x[:5]), x.nbytes) is None
    assert region_of(Layout.of(x[:4]), x.nbytes) == (torch.float32, 0, (40,), (1,))
    assert region_of(Layout.of(x[:, 2]), x.nbytes) == (torch.float32, 2, (10,), (10,))
