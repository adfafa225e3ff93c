"""Law 6, nothing left.

"Bytes are released when the graph node releases them. Files are anonymous from birth: a process that is killed
(SIGKILL too) leaves none."

This file shows it without the garbage collector, in the store and in memory, however a step ends. Its sibling shows it
for the threads and the files of a disk, and for a process that ends while it writes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks._torch import top_hooks
from disthooks.errors import StoreError
from disthooks.saved.codecs import Codec
from disthooks.saved.hooks import SavedTensorHooks
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores.base import Store
from tests.support.functions import SavesItsOutput
from tests.support.models import Tiny, identical, tokens
from tests.support.stores.faulty import AsAsked, Watch, fail, interrupt, left, line, soon, suppressed
from tests.support.stores.pairs import Pair, ones

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("no_collector")]


# --- Bytes go with the graph


def test_a_view_of_one_token_does_not_keep_the_sequence(tmp_path: pathlib.Path) -> None:
    """A class token is too small to store, but a view of it would keep the whole sequence in memory."""
    x = torch.randn(8, 128, 64, requires_grad=True)
    truth = torch.autograd.grad(F.silu(x.sin()[:, 0, :16]).square().sum(), x)
    with dh.saving(dh.OnDisk(tmp_path)) as saved:
        y = x.sin()
        token = y[:, 0, :16]
        z = F.silu(token).square().sum()
    storage = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
    del y, token
    assert storage.expired()
    assert saved.report().kept_by["small"] == 2 * 8 * 16 * 4
    assert identical(list(torch.autograd.grad(z, x)), list(truth))


# --- However a step ends


class Step:
    """A small model whose saved tensors go through hooks in one of three ways; watches the memory of its steps."""

    def __init__(self, way: str, kind: str, folder: object, **faults: Any) -> None:
        self.to, self.budget = line(kind, folder, **faults)
        self.wait = getattr(self.to, "store", self.to).wait
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.block: Any = contextlib.nullcontext()
        if way == "in place":
            self.report = dh.save_activations(self.model, "", self.to).report
        elif way == "wrapper":
            self.model = dh.SaveWith(self.model, self.to)
            self.report = self.model.report
        else:
            self.block = dh.saving(self.to)
            self.report = self.block.report
        self.watch = Watch()
        self.x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))

    def forward(self) -> torch.Tensor:
        with self.watch, self.block:
            return self.model(self.x).sum()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        with self.watch:
            loss.backward(**options)

    def assert_all_is_back(self) -> None:
        assert top_hooks(True) is None
        self.model.zero_grad()
        self.wait()  # what a thread writes in this moment is in memory until it is written
        assert left(lambda: self.wait() or self.report().held, self.budget, self.watch.alive) == (0, 0, 0)


STORES = ["disk", "copies", "functions"]
WAYS = ["in place", "wrapper", "saving"]


@pytest.fixture(params=[(way, kind) for way in WAYS for kind in STORES], ids=", ".join)
def make(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Callable[..., Step]:
    return lambda **faults: Step(*request.param, tmp_path, **faults)


def _retained(step: Step) -> None:
    loss = step.forward()
    held = step.report().held
    for _ in range(3):
        step.backward(loss, retain_graph=True)
    assert step.report().held == held


def _one_after_the_other(step: Step) -> None:
    losses = [step.forward() for _ in range(3)]
    held = step.report().held
    step.backward(losses.pop())
    assert 0 < step.report().held < held
    step.backward(losses.pop())


ENDS: dict[str, Callable[[Step], object]] = {
    "a backward": lambda step: step.backward(step.forward()),
    "a graph was dropped": lambda step: all(step.forward() is not None for _ in range(3)),
    "a graph was retained": _retained,
    "two of three losses were differentiated": _one_after_the_other,
}


@pytest.mark.parametrize("end", ENDS)
def test_all_is_back_after(end: str, make: Callable[..., Step]) -> None:
    step = make()
    ENDS[end](step)
    step.assert_all_is_back()


def _break(model: nn.Module, when: str, what: Callable) -> Any:
    if when == "backward":
        return model[1].register_forward_hook(lambda module, args, y: y.register_hook(what) and None)
    return model[3].register_forward_hook(what if when == "forward" else lambda *_: None)


@pytest.mark.parametrize("what", [fail, interrupt])
@pytest.mark.parametrize("when", ["forward", "backward", "put", "get"])
def test_all_is_back_after_something_went_wrong(when: str, what: Callable, make: Callable[..., Step]) -> None:
    """It goes wrong in a hook of a module or a tensor, or in the store itself; an interrupt is a real SIGINT."""
    step = make(**{f"{when}_at": 3, "then": what} if when in ("put", "get") else {})
    handle = _break(step.model, when, what)
    with suppressed(AsAsked, KeyboardInterrupt):
        step.backward(step.forward())
    handle.remove()
    step.assert_all_is_back()
    loss = step.forward()
    step.backward(loss)
    del loss
    step.assert_all_is_back()


def test_a_backward_whose_read_failed_can_be_run_again(make: Callable[..., Step]) -> None:
    """A backward whose read failed leaves the graph as it was: it can be run again."""
    plain, step = make(), make(get_at=1)
    loss = step.forward()
    with suppressed(AsAsked):
        step.backward(loss)
    step.backward(loss)
    plain.model.load_state_dict(step.model.state_dict())
    plain.backward(plain.forward())
    for a, b in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    del loss
    step.assert_all_is_back()


@pytest.mark.parametrize("fails_at", ["a weight", "a branch"])
def test_a_full_store_frees_the_graph_of_a_failed_backward(fails_at: str, tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    failing = [True]

    def hook(gradient: torch.Tensor) -> None:
        if failing[0]:
            raise AsAsked

    model[2][0].weight.register_hook(hook)

    def step(to: dh.saving) -> None:
        with to:
            branch = model(torch.ones(64, 64))
            if fails_at == "a branch":
                other = model(torch.ones(64, 64))
                other.register_hook(hook)
                branch = branch + other
        branch.sum().backward()

    failing[0] = False
    with dh.saving(dh.OnDisk(tmp_path), at_least=0) as saved:
        pass
    step(saved)
    saved = dh.saving(dh.OnDisk(tmp_path, limit=saved.report().stored * 5 // 4), at_least=0)
    failing[0] = True
    for _ in range(3):
        with pytest.raises(AsAsked):
            step(saved)
    failing[0] = False
    step(saved)
    assert saved.report().held == 0


def test_a_full_store_says_what_still_counts(tmp_path: pathlib.Path) -> None:
    with dh.saving(dh.OnDisk(tmp_path, limit="48 KiB"), at_least=0):
        y = ones(64, 64).exp()  # the script holds it
        with pytest.raises(StoreError, match=r"as long as its graph is alive.* delete the outputs, the loss"):
            ones(64, 64).exp().tan()
    y.sum().backward()


# --- Whatever goes away before the graph does


@pytest.mark.parametrize("gone", ["hooks", "model", "everything"])
def test_a_graph_outlives_what_made_it(gone: str, make: Callable[..., Step]) -> None:
    step, plain = make(), make()
    plain.model.load_state_dict(step.model.state_dict())
    plain.backward(plain.forward())
    x, weight = step.x.requires_grad_(), next(step.model.parameters())
    report, account, watch = step.report, step.budget, step.watch
    loss = step.forward()
    if gone == "hooks" and hasattr(report.__self__, "remove"):
        report.__self__.remove()
    elif gone == "model":
        step.model = nn.Identity()
    elif gone == "everything":
        del step
    loss.backward()
    assert torch.equal(weight.grad, next(plain.model.parameters()).grad)
    weight.grad = x.grad = None
    del loss, weight
    assert left(lambda: report().held, account) == (0, 0)
    if gone == "everything":
        assert soon(lambda: watch.alive() == 0)


class Keeps(nn.Module):
    """Keeps its last output, as many models do for a loss or a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(x).tanh()
        return self.last


@pytest.mark.parametrize("way", ["in place", "wrapper"])
def test_a_graph_does_not_keep_its_module(way: str, tmp_path: pathlib.Path) -> None:
    """A graph makes no cycle with the module, which the garbage collector could not see."""
    to = pipeline(dh.OnDisk(tmp_path), at_least=0)
    model = keeps = Keeps()
    if way == "in place":
        counters = dh.save_activations(model, "", to)._pipeline  # the handle itself keeps what it can be removed from
    else:
        model = dh.SaveWith(keeps, to)
        counters = model._site.pipeline
    table = weakref.ref(keeps.table)
    model(torch.ones(4, 8))
    assert counters.report().held > 0
    del model, keeps
    gc.collect()
    assert table() is None
    assert counters.report().held == 0


def test_a_cycle_goes_with_the_collector(pair: Pair) -> None:
    y = pair(torch.exp, ones(5))
    y.me = y
    del y
    gc.collect()
    assert pair.held == 0


def test_frames_are_no_cycles(tmp_path: pathlib.Path) -> None:
    """Training loops switch the garbage collector off, so the object that each call makes must go without it."""
    model = dh.SaveWith(nn.Linear(8, 8), dh.OnDisk(tmp_path), at_least=4096)

    def alive() -> int:
        return sum(type(thing) is SavedTensorHooks for thing in gc.get_objects())

    gc.collect()
    before = alive()  # the compiler's caches hold some from earlier tests
    gc.disable()
    try:
        for _ in range(20):
            model(torch.ones(1, 8))
        assert alive() == before
    finally:
        gc.enable()


# --- Saved outputs, custom Functions, and code that is left half way


OUTPUTS = [torch.relu, torch.exp, torch.sigmoid, torch.tanh, torch.sqrt, lambda x: x.softmax(0), lambda x: x.cumprod(0)]
OUTPUTS.append(SavesItsOutput.apply)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("function", OUTPUTS)
def test_a_saved_output_makes_no_cycle(function: Callable, kind: str, tmp_path: pathlib.Path) -> None:
    to, account = line(kind, tmp_path)
    watch, saved, x = Watch(), dh.saving(to), torch.ones(64, requires_grad=True)
    with watch, saved:
        y = function(x)
    assert saved.report().held >= x.nbytes
    del y
    assert left(lambda: saved.report().held, account, watch.alive) == (0, 0, 0)


# --- Files have no name, and go with the process


def _anonymous_bytes(folder: pathlib.Path) -> int | None:
    """Size of this process's open, nameless file in ``folder``; None when there is none."""
    for fd in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith(str(folder)) and target.endswith("(deleted)"):
                return os.stat(fd).st_size
    return None


def test_the_file_has_no_name_and_is_used_again(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    model = Tiny()
    sizes = []
    with dh.save_activations(model, "blocks.*", store):
        for _ in range(4):
            loss = model(tokens()).sum()
            store.wait()
            assert os.listdir(tmp_path) == []
            sizes.append(_anonymous_bytes(tmp_path))
            loss.backward()
    assert sizes[0] > 0
    assert sizes == [sizes[0]] * 4
    store.release_idle()
    del store, loss
    gc.collect()
    assert _anonymous_bytes(tmp_path) is None


def test_one_file_for_all_stores_in_a_directory(tmp_path: pathlib.Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stores = [dh.OnDisk(tmp_path) for _ in range(5)]
    tickets = [store.put(torch.ones(1000) * i) for i, store in enumerate(stores) for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    for i, ticket in enumerate(tickets):
        assert stores[0].get(ticket)[0] == i // 10


FAILED_AT_THE_END = """
import threading, torch, disthooks as dh
import subprocess
x = torch.ones(1_000_000, requires_grad=True)
with dh.saving(dh.OnDisk("/tmp"), at_least=0):
    z = x * 2
    y = x * 1
    c = y * y
    loss = (c * z).exp().sum()
y.add_(1)
def backward():
    try:
        torch.autograd.grad(loss, x, create_graph=True)
    except dh.errors.MutationError:
        print("said", flush=True)
WHERE
"""


@pytest.mark.first_tier(where=("backward()",))
@pytest.mark.parametrize(
    "where", ["backward()", "t = threading.Thread(target=backward); t.start(); t.join()"], ids=["main", "thread"]
)
def test_a_process_whose_last_backward_failed_ends_well(where: str) -> None:
    """torch frees what that backward left when the interpreter is gone, and restored memory needs it."""
    code = FAILED_AT_THE_END.replace("WHERE", where)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "")


class SavesAView(SavesItsOutput):
    """It saves a view of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y[1:])
        return y


@pytest.mark.parametrize("inside", [True, False], ids=["under the hooks", "outside of them"])
@pytest.mark.parametrize("backward", ["none", "retained", "whole"])
def test_a_view_of_its_own_output_is_left_only_where_torch_leaves_it(
    inside: bool, backward: str, tmp_path: pathlib.Path
) -> None:
    """Outside of hooks it is a cycle in torch, which keeps the graph before it, whoever packed the tensors of that.

    docs/saved-tensors/limits.md says which programs have one.
    """

    def left_by(hooks: Any) -> None:
        x = torch.ones(64, requires_grad=True)
        with hooks:
            y = x.exp()
            z = SavesAView.apply(y) if inside else None
        z = SavesAView.apply(y) if z is None else z
        if backward != "none":
            z.sum().backward(retain_graph=backward == "retained")

    kept: list[weakref.ref[Any]] = []

    def pack(tensor: torch.Tensor) -> Any:
        held = {tensor.detach()}
        kept.append(weakref.ref(held))
        return held

    left_by(torch.autograd.graph.saved_tensors_hooks(pack, lambda held: next(iter(held))))
    saving = dh.saving(dh.OnDisk(tmp_path), at_least=0)
    left_by(saving)
    gc.collect()
    by_torch = any(reference() is not None for reference in kept)
    assert by_torch == (not inside and backward != "whole")
    assert saving.report().held == (64 * 4 if by_torch else 0)


@dataclass(frozen=True)
class RoomForOne(Store):
    held: list[torch.Tensor] = field(default_factory=list, compare=False)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.held:
            raise StoreError("full")
        self.held.append(tensor)
        return tensor

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket.clone()

    def drop(self, ticket: torch.Tensor) -> None:
        self.held.pop()


class Halves(Codec):
    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Size]:
        return tuple(half.clone() for half in tensor.flatten().chunk(2)), tensor.shape

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: torch.Size) -> torch.Tensor:
        return torch.cat(tensors).view(spec)


def test_a_content_of_which_the_store_took_a_part_leaves_nothing_in_it() -> None:
    """The graph of the error is alive, and so is its traceback."""
    store, x = RoomForOne(), torch.randn(64, 64, requires_grad=True)
    saved, outputs = dh.saving(Halves(), store), []

    def forward() -> None:
        with saved:
            for _ in range(3):
                outputs.append((outputs or [x])[-1].sin())

    with pytest.raises(StoreError, match="full") as error:
        forward()
    assert error.value.__traceback__ is not None
    assert len(outputs) > 0
    assert (store.held, saved.report().held) == ([], 0)
