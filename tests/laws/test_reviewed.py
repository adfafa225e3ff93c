"""Found by hostile review: each of these was wrong once. The laws they belong to are named in each."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks._tensors import Layout
from disthooks.saved.hooks import Frame
from tests.support.models import identical

Run = Callable[[contextlib.AbstractContextManager[object]], list]


def _exact(run: Run, folder: pathlib.Path) -> bool:
    truth = run(contextlib.nullcontext())
    return identical(run(dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder)))), truth)


def test_running_statistics_change_without_a_version(tmp_path: pathlib.Path) -> None:
    """Batch norm writes its buffers and torch does not count it: law 1, law 3."""

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


def test_chunks_with_versions_of_their_own(tmp_path: pathlib.Path) -> None:
    """``unsafe_chunk``: one storage, a version counter for each chunk: law 1, law 3."""

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
def test_a_cast_that_is_not_autocasts(cast: Callable, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    """``Recast`` takes every narrow copy of a weight for autocast's plain one: law 1."""

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


def test_memory_taken_away_before_the_copy(tmp_path: pathlib.Path) -> None:
    """FSDP2 frees a gathered weight before the forward ends; ``weight.detach()`` was not copied by then: laws 1, 2."""
    weight, x = torch.randn(64, 64), torch.randn(8, 64, requires_grad=True)
    content = weight.clone()
    with dh.saving(dh.OnDisk(tmp_path)):
        y = x @ weight.detach()
        weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(content.nbytes)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(content)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(8, 64) @ content.t())


def test_an_entry_that_is_going_is_not_found(tmp_path: pathlib.Path) -> None:
    """A thread that saves a tensor while another drops the last handle of it must not revive the dropped bytes."""
    dropping, packed = threading.Event(), threading.Event()

    class Slow(dh.OnDisk):
        def drop(self, ticket: object) -> None:
            super().drop(ticket)
            if not dropping.is_set():
                dropping.set()
                packed.wait(5)

    x = torch.randn(64, 64, requires_grad=True)
    saved = dh.saving(Slow(tmp_path))
    with saved:
        first = x.sin()
    graphs = [first]
    del first
    thread = threading.Thread(target=graphs.clear)
    thread.start()
    dropping.wait(5)
    with saved:
        again = x.sin()
        junk = torch.ones(64, 64, requires_grad=True) * torch.randn(64, 64)
    packed.set()
    thread.join()
    again.sum().backward()
    assert junk is not None
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.parametrize("pattern", ["blocks*", "blocks", nn.ModuleList])
def test_a_container_that_is_never_called(pattern: object, tmp_path: pathlib.Path) -> None:
    """Attaching to a ModuleList does nothing, and takes the place of the blocks inside: law 15."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).relu()
            return x

    model = Model()
    try:
        saving = dh.save_activations(model, pattern, dh.OnDisk(tmp_path))
    except dh.errors.AttachError:
        return
    model(torch.randn(32, 64)).sum().backward()
    assert saving.report().stored > 0


def test_a_wrapper_around_a_container_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(dh.errors.UsageError):
        dh.SaveToDisk(nn.ModuleList([nn.Linear(64, 64)]), tmp_path)


def test_a_trace_does_not_poison_the_arena(tmp_path: pathlib.Path) -> None:
    """``torch.jit.trace`` makes ``numel()`` a tensor, and the file of the process keeps it."""
    store = dh.OnDisk(tmp_path)
    model = dh.SaveWith(nn.Linear(64, 64), store)
    torch.jit.trace(model, torch.randn(64, 64))
    gc.collect()
    assert isinstance(store.account.held, int)
    model(torch.randn(64, 64)).sum().backward()


def test_versions_of_what_is_inside_reach_its_loading(tmp_path: pathlib.Path) -> None:
    """``_metadata`` of a checkpoint: without it a module takes a new checkpoint for an old one: law 8."""

    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *rest: object) -> None:
            if metadata.get("version", 1) < 2:
                state[prefix + "weight"] = -state[prefix + "weight"]
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    plain, wrapped = nn.Sequential(Versioned(3, 3)), nn.Sequential(dh.SaveToDisk(Versioned(3, 3), tmp_path))
    checkpoint = plain.state_dict()
    names, versions = list(checkpoint), dict(checkpoint._metadata)
    for _ in range(2):
        wrapped.load_state_dict(checkpoint)
        assert torch.equal(wrapped[0].weight, plain[0].weight)
        assert (list(checkpoint), dict(checkpoint._metadata)) == (names, versions)  # the user's, and left as it was


def test_an_outer_hook_without_a_module(tmp_path: pathlib.Path) -> None:
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        dh.SaveToDisk(nn.Linear(64, 64), tmp_path)(torch.randn(32, 64)).sum().backward()


@pytest.mark.parametrize("own", [{}, {"__call__": lambda self, x: self.forward(x)}], ids=["inherits", "has its own"])
@pytest.mark.parametrize("sealed", [None, "__call__", "__reduce_ex__"])
def test_nothing_is_attached_when_a_class_cannot_be_changed(
    tmp_path: pathlib.Path, sealed: str | None, own: dict[str, Any]
) -> None:
    """A class that takes some of the functions and not the others is given its own again."""

    class Sealed(type):
        def __setattr__(cls, name: str, value: object) -> None:
            if sealed is None or (name == sealed and value is not own.get(name)):
                raise TypeError("sealed")
            super().__setattr__(name, value)

    Fixed: Any = Sealed("Fixed", (nn.Linear,), own)

    class Registered(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise ValueError("registered already")

    class Mine(nn.Linear):
        pass

    model = nn.Sequential(Mine(64, 64), Fixed(64, 64), Registered(64, 64))
    before = [dict(vars(type(part))) for part in model]
    with pytest.raises(dh.errors.AttachError, match=r"Fixed .*sealed.*SaveWith"):
        dh.save_activations(model, ["0", "1"], dh.OnDisk(tmp_path))
    assert [dict(vars(type(part))) for part in model] == before
    assert not any("disthooks" in key for part in model for key in vars(part))
    with dh.save_activations(model, "2", dh.OnDisk(tmp_path)) as saving:  # a class that refuses to be derived from
        model(torch.randn(64, 64)).sum().backward()
    assert saving.report().moved > 0


def test_a_file_is_not_many_times_the_limit(tmp_path: pathlib.Path) -> None:
    """Freed extents of other sizes are neither joined nor given back: law 10."""
    import os

    store = dh.OnDisk(tmp_path, "1 MiB")
    for nbytes in range(4096, 1 << 20, 4096):  # one at a time
        ticket = store.put(torch.zeros(nbytes, dtype=torch.uint8))
        store.wait()  # one that is dropped while a thread writes it gives its place back when that is done
        store.drop(ticket)
    assert os.fstat(store._mover.arenas[0]._fd).st_blocks * 512 <= 2 << 20


def test_frames_are_no_cycles(tmp_path: pathlib.Path) -> None:
    """Training loops switch the collector off; a frame for each call must go by itself."""
    model = dh.SaveToDisk(nn.Linear(8, 8), tmp_path)

    def alive() -> int:
        return sum(type(thing) is Frame for thing in gc.get_objects())

    gc.collect()
    before = alive()  # the compiler's caches, of tests before, hold some
    gc.disable()
    try:
        for _ in range(20):
            model(torch.ones(1, 8))
        assert alive() == before
    finally:
        gc.enable()


def test_a_pack_that_raises_holds_nothing() -> None:
    def pack(tensor: torch.Tensor) -> object:
        raise ValueError

    saved = dh.saving(dh.Functions(pack, lambda packed: packed))
    with pytest.raises(ValueError), saved:
        torch.ones(4, requires_grad=True).exp()
    assert saved.report().held == 0


def test_a_smaller_try_after_a_full_store(tmp_path: pathlib.Path) -> None:
    """What a dead graph left pending is not tried again for ever."""
    big, small = torch.randn(64, 64, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path, 10_000))):
        with pytest.raises(dh.errors.StoreError):
            big.exp().sin()
        y = small.exp().sin().sum()
    y.backward()


def test_a_tensor_whose_memory_is_exchanged_is_another_content(tmp_path: pathlib.Path) -> None:
    """``t.data = other``: the same tensor at the same version, and often at the address just given back: law 3."""
    batch, anchor, outputs = torch.zeros(8, 8), torch.zeros(8, 8, requires_grad=True), []
    with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))):
        for i in range(300):
            batch.data = torch.full((8, 8), float(i))
            outputs.append(anchor * batch)
            anchor.exp()  # the next operator: the one before is stored
    for i, output in enumerate(outputs):
        assert output.grad_fn._saved_other[0, 0] == i


def test_what_nobody_needs_any_more_is_never_written(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(dh.OnDisk(tmp_path)) as saved:
        x.exp()
        x.sum()
    assert saved.report().moved == 0


def test_a_layout_does_not_lengthen_its_storage() -> None:
    """``set_`` would, with bytes that nobody wrote."""
    layout = Layout.of(torch.zeros(4, 4))
    with pytest.raises(dh.errors.StoreError, match="was taken away"):
        layout.over(torch.zeros(3).untyped_storage())
