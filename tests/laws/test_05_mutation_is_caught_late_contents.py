"""Law 5, contents are taken late: they are those at the end of the operator that saved them.

Whoever writes to a tensor later, counted or not, and whatever backward does with what it is given, each program gives
what torch's own hooks give when they copy, for they act at that moment (laws 1, 3 and 4, too).
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.functions import Prepared
from tests.support.stores.copies import Copies
from tests.support.stores.moving import Gate, opened


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


STORES: dict[str, Callable[[pathlib.Path], Any]] = {
    "disk": lambda folder: pipeline(dh.OnDisk(folder), at_least=0),
    "written": lambda folder: pipeline(dh.OnDisk(folder, in_flight=0), at_least=0),
    "compact": lambda folder: pipeline(dh.Compact(), dh.OnDisk(folder), at_least=0),
    "tiers": lambda folder: pipeline(dh.Tiered(dh.OnDevice("20 KiB"), dh.OnDisk(folder)), at_least=0),
}


class Copying(torch.autograd.graph.saved_tensors_hooks):
    """torch's own hooks with a copy of each saved tensor."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.detach().clone(), lambda copy: copy)


def noise_through_numpy(hooks: Callable[[], Any]) -> list[torch.Tensor]:
    """A GAN's loop fills the noise again while the graph of the last step is alive."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    array = torch.empty(64, 64).numpy()
    noise = torch.from_numpy(array)
    found, graphs = [], []
    for _ in range(3):
        array[:] = torch.randn(64, 64).numpy()
        with hooks():
            graphs.append(model(noise).square().mean())
        model.zero_grad()
        graphs[-1].backward(retain_graph=True)
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


def noise_in_one_block(hooks: Callable[[], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight, noise = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with hooks():
        losses = []
        for _ in range(3):
            losses.append((weight * noise).sin().sum())
            noise.data.normal_()
    return [torch.autograd.grad(loss, weight)[0] for loss in losses]


def a_leaf(hooks: Callable[[], Any]) -> list[torch.Tensor]:
    x = torch.ones(64, 64, requires_grad=True)
    with hooks():
        a = (x * x).sum()
        x.exp()
        x.data.mul_(3)
        b = (x * x).sum()
    return [torch.autograd.grad(loss, x)[0] for loss in (a, b)]


def a_leaf_at_once(hooks: Callable[[], Any]) -> list[torch.Tensor]:
    """No other operator saves anything before the write."""
    x = torch.ones(64, 64, requires_grad=True)
    with hooks():
        a = (x * x).sum()
        x.data.mul_(3)
        b = (x * x).sum()
    return [torch.autograd.grad(loss, x)[0] for loss in (a, b)]


def _summed(tensor: torch.Tensor) -> None:
    version = tensor._version
    with torch.no_grad():
        torch.distributed.all_reduce(tensor)
    assert tensor._version == version
    tensor.data.add_(tensor.data.flip(0))  # what the other ranks would add


def a_sum_of_ranks(hooks: Callable[[], Any]) -> list[torch.Tensor]:
    """Tensor parallelism by hand: ``all_reduce`` writes what ReLU and the next layer save, and counts no change."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with hooks():
        y = (x @ weight).relu()
        z = x.sigmoid()
        _summed(y)
        _summed(z)
        loss = (y @ weight + z * y).square().mean()
    return list(torch.autograd.grad(loss, (x, weight)))


def a_mask_from_a_temporary(hooks: Callable[[], Any]) -> list[torch.Tensor]:
    x = torch.ones(64, 64, requires_grad=True)
    with hooks():
        mask = torch.ones(64, 64)
        y = (x * mask[:, :20].t().reshape(64, 20).repeat(1, 4)[:, :64]).sin()
        part = x[:, :20] * mask[:, :20]
        mask.data.zero_()
        part = part + x[:, :20] * mask[:, :20]
    return list(torch.autograd.grad(y.sum() + part.sum(), x))


def views_of_what_is_written(hooks: Callable[[], Any]) -> list[torch.Tensor]:
    w, x = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)
    with hooks():
        a = (w * x).sum() + (w[:20] * x[:20]).sum()
        x.data[30:].mul_(2)
        b = (w[:20] * x[:20]).sum() + (w[40:50] * x[40:50]).sum() + (w.t() * x.t()).sum()
    return [*torch.autograd.grad(a, w), *torch.autograd.grad(b, w)]


UNCOUNTED = [
    noise_through_numpy,
    noise_in_one_block,
    a_leaf,
    a_leaf_at_once,
    a_sum_of_ranks,
    a_mask_from_a_temporary,
    views_of_what_is_written,
]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("program", UNCOUNTED, ids=lambda program: program.__name__)
def test_contents_are_those_of_torchs_own_copies(
    program: Callable[..., list[torch.Tensor]], store: str, tmp_path: pathlib.Path
) -> None:
    expected = program(Copying)
    line = STORES[store](tmp_path)
    saved = dh.saving(line)
    with contextlib.suppress(AttributeError):
        assert saved.report().stored == 0
    found = program(lambda: saved)
    assert saved.report().stored > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_write_before_the_file_is_written_changes_nothing(tmp_path: pathlib.Path, gate: Gate) -> None:
    """The contents are right even if the thread that writes them comes late: a leaf's, a constant's, activations'."""
    store = opened(gate, tmp_path)
    x, mask = torch.randn(512, 512, requires_grad=True), torch.full((512, 512), 5.0)
    before = x.detach().clone()
    with dh.saving(store):
        y = x.relu()
        z = y.exp()
        masked, square = (x * mask).sum(), x.square().sum()
    for written in (x, mask, y, z):
        written.data.fill_(3)
    gate.open.set()
    store.wait()
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], torch.where(before > 0, before.exp(), 0.0))
    assert torch.equal(torch.autograd.grad(masked, x)[0], torch.full_like(x, 5.0))
    assert torch.equal(torch.autograd.grad(square, x)[0], 2 * before)


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "vector": lambda: torch.ones(5),
    "matrix": lambda: torch.ones(64, 64),
    "row": lambda: torch.ones(1, 4096),
    "column": lambda: torch.ones(4096, 1),
    "transposed": lambda: torch.ones(32, 64).t(),
    "part": lambda: torch.ones(64, 96)[:, 8:40],
    "most": lambda: torch.ones(65, 64)[1:],
    "channels last": lambda: torch.ones(2, 8, 16, 16).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(64, 1).expand(64, 64),
    "strided": lambda: torch.ones(64, 64)[::2, ::2],
    "scalar": lambda: torch.tensor(1.0),
}
PLACES: dict[str, Callable[[pathlib.Path], Any]] = {
    "disk": STORES["disk"],
    "tiers": STORES["tiers"],
    "kept": lambda folder: pipeline(dh.OnDisk(folder), at_least="1 GiB"),
    "in place": lambda folder: pipeline(dh.OnCpu()),
    "recompute": lambda folder: pipeline(dh.Recompute(), dh.OnDevice(), at_least=0),
    "compact": lambda folder: pipeline(dh.Compact(floats=True), dh.OnCpu(), at_least=0),
}


class Halves(torch.autograd.Function):
    """Writes into what it saved, in backward."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        return h * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        saved = ctx.saved_tensors[0]
        if 0 in saved.stride():
            saved = saved[:, :1]  # torch writes to no element twice
        saved.mul_(0.5)
        return grad


def _laid_out(like: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """An activation with a history and the layout of ``like``."""
    base = torch.ones(like.untyped_storage().nbytes() // 4) * 3 * leaf
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


@pytest.mark.parametrize("when", ["in the block", "in flight", "written"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_backward_may_write_into_what_it_saved(
    shape: str, place: str, first: bool, when: str, tmp_path: pathlib.Path
) -> None:
    """Another node that saved the same tensor gets the contents that were saved.

    So it is with torch's own hooks that copy, and the user's memory is intact. In the block the error that torch raises
    without hooks is right, too.
    """
    like, leaf, store = SHAPES[shape](), torch.ones((), requires_grad=True), PLACES[place](tmp_path)
    functions = (Halves.apply, torch.square) if first else (torch.square, Halves.apply)
    with dh.saving(store), contextlib.suppress(dh.errors.MutationError):
        h = _laid_out(like, leaf)
        y = functions[0](h).sum() + functions[1](h).sum()
        if when == "in the block":
            for _ in range(2):
                assert torch.autograd.grad(y, leaf, retain_graph=True)[0] == 21 * h.numel()
    if when == "in the block":
        return
    if when == "written":
        store.store.wait()
    content = h.detach().clone()
    for _ in range(2):
        (got,) = torch.autograd.grad(y, leaf, retain_graph=True)
        assert got == 21 * h.numel()
    assert torch.equal(h, content)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["in flight", "written"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_backward_returns_belongs_to_nobody_else(
    shape: str, place: str, late: bool, constant: bool, tmp_path: pathlib.Path
) -> None:
    like, leaf, store = SHAPES[shape](), torch.ones((), requires_grad=True), PLACES[place](tmp_path)
    x, other = (torch.ones(like.shape, requires_grad=True) for _ in range(2))
    with dh.saving(store):
        h = _laid_out(like, leaf)
        h = h.detach() if constant else h
        loss = Prepared.apply(x, h) + Prepared.apply(other, h)
    if late:
        store.store.wait()
    content = h.detach().clone()
    for count in range(1, 4):
        loss.backward(retain_graph=True)
        assert torch.equal(x.grad, count * content)
        assert torch.equal(other.grad, count * content)
    nn.utils.clip_grad_norm_([x], 0.1)
    assert torch.equal(h, content)
    other.grad.data.zero_()
    x.grad = None
    loss.backward()
    nn.utils.clip_grad_norm_([x], 0.1)
    assert torch.equal(h, content)
    assert torch.equal(other.grad, content)


def test_copies_are_let_go_of_when_they_are_written(tmp_path: pathlib.Path) -> None:
    """When all is written, only the copies of the last operator stay in memory."""
    store = dh.OnDisk(tmp_path)
    with dh.saving(store, at_least=0):
        y = torch.randn(64, 64, requires_grad=True)
        for _ in range(20):
            y = y.sin()
    store.wait()
    gc.collect()
    node, copies = y.grad_fn, 0
    while hasattr(node, "_raw_saved_self"):
        packed = node._raw_saved_self.data.packed
        copies += packed._copy is not None
        node = node.next_functions[0][0]
    assert copies <= 2


@pytest.mark.parametrize("stages", [(), (dh.Recompute(),)], ids=["stored", "recompute"])
def test_a_counted_write_while_the_store_takes_the_contents_raises(stages: tuple[Any, ...]) -> None:
    """Nobody gets what may be half written, and the store keeps nothing of it."""
    written: list[torch.Tensor] = []

    class Interrupted(Copies):
        """In its ``put`` the user's tensor is written, as another thread may do."""

        def put(self, tensor: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                while written:
                    written.pop().mul_(2)
            return super().put(tensor)

    x, store = torch.randn(64, 64, requires_grad=True), Interrupted()
    with dh.saving(*stages, store, at_least=0) as saved:
        y = x * 1
        z = y.square()
        written.append(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    del y, z
    assert saved.report().held == store.budget.held == 0


@pytest.mark.parametrize("stages", [(), (dh.Recompute(),)], ids=["stored", "recompute"])
def test_what_is_stored_stays_when_the_tensor_is_changed(stages: tuple[Any, ...], tmp_path: pathlib.Path) -> None:
    """A counted write spoils the reader of the tensor, not what is computed again from the stored contents."""
    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(*stages, dh.OnDisk(tmp_path), at_least=0):
        h = x * 1
        spoilt = h.square()
        y = h.relu()
        z = y.exp()
    with torch.no_grad():
        h.mul_(-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(spoilt.sum(), x, retain_graph=True)
    (got,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(got, torch.where(x > 0, x.exp(), 0.0))


@pytest.mark.parametrize("counted", [False, True], ids=["uncounted", "counted"])
@pytest.mark.parametrize("store", STORES)
def test_a_constant_that_is_read_outside_of_a_backward_may_be_written(
    store: str, counted: bool, tmp_path: pathlib.Path
) -> None:
    """Neither the user's memory nor what other nodes read is changed by that."""
    x, other = (torch.ones(64, 64, requires_grad=True) for _ in range(2))
    constant = torch.full((64, 64), 3.0)
    with dh.saving(STORES[store](tmp_path)):
        one, two = Prepared.apply(x, constant), Prepared.apply(other, constant)
    for _ in range(2):
        (got,) = one.grad_fn.saved_tensors
        (got if counted else got.data).mul_(7)
    (one + two).backward()
    assert torch.equal(constant, torch.full((64, 64), 3.0))
    assert torch.equal(x.grad, constant)
    assert torch.equal(other.grad, constant)
