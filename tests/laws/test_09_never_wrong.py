"""Law 9, never wrong.

"What a store cannot hold (sparse, nested, quantized, fake, functorch-wrapped, unknown subclasses) is kept as it is
and counted as kept. A write or read that fails raises a `StoreError` with path, bytes wanted and bytes free, on every
rank's own terms, and never zeros, never a hang."

This file shows it in one process; the tests of `disthooks.testing` show for every store that what is put comes back.
Its siblings show it for a disk that fails, threads that die or never start, forks, and locks; tests/engines shows it
for ranks.
"""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import StoreError, UsageError
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores.host import room_for
from tests.support.models import Tiny, identical, step, tokens

pytestmark = pytest.mark.any_device


# --- Stores


STORES = {
    "OnCpu": lambda folder, **kw: dh.OnCpu(**kw),
    "OnDevice": lambda folder, **kw: dh.OnDevice(**kw),
    "OnDisk": lambda folder, **kw: dh.OnDisk(folder, **kw),
}


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> object:
    return lambda **kw: STORES[request.param](tmp_path, **kw)


def test_bad_limits_are_refused(make: object) -> None:
    for bad in ("12 potatoes", -1, "", 1.5, True):
        with pytest.raises(UsageError, match="limit="):
            make(limit=bad)


def test_extent_sizes_are_few_and_waste_little() -> None:
    sizes = [room_for(n) for n in range(1, 10_000_000, 997)]
    assert all(
        n <= size <= max(4096, n * 1.125 + 4096) for n, size in zip(range(1, 10_000_000, 997), sizes, strict=True)
    )
    assert len(set(sizes)) < 80


def test_pin_memory_is_checked() -> None:
    with pytest.raises(UsageError, match="pin_memory"):
        dh.OnCpu(pin_memory="yes")


def test_each_store_says_from_which_size_it_is_worth_moving(tmp_path: pathlib.Path) -> None:
    """The defaults, in a process of their own: the tests set another one for the disk."""
    script = """
import sys, torch, disthooks as dh
for size in (64, 127, 128, 256):
    x = torch.ones(size, 128, requires_grad=True)
    with dh.saving(dh.OnDisk(sys.argv[1])) as saved:
        y = x.exp()
    print(size, saved.report().stored, saved.report().kept_by)
print(saved.report().advice())
with dh.saving(dh.OnDisk(sys.argv[1])) as saved:
    torch.ones(64, requires_grad=True).exp()
print(saved.report())
print(dh.Tiered(dh.OnDevice(1), dh.OnDisk(sys.argv[1])).min_bytes, dh.OnCpu().min_bytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines()[:4] == [
        "64 0 {'small': 32768}",
        "127 0 {'small': 65024}",
        "128 65536 {}",
        "256 131072 {}",
    ]
    assert "nothing was stored: 256 B are in tensors too small" in done.stdout
    assert done.stdout.splitlines()[-1] == "65536 65536"


# --- What a store cannot hold is kept


def test_exotic_tensors_are_kept_and_counted(tmp_path: pathlib.Path) -> None:
    line = pipeline(dh.OnDisk(tmp_path), at_least=0)
    dense = torch.randn(8, 8, requires_grad=True)
    sparse = torch.eye(8).to_sparse()
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], requires_grad=True)
    with dh.saving(line) as saved:
        torch.sparse.mm(sparse, dense).sum().backward()
        nested.sin().to_padded_tensor(0.0).sum().backward()
    assert saved.report().kept_by["sparse"] > 0
    assert saved.report().kept_by["nested"] > 0
    torch.testing.assert_close(dense.grad, torch.ones(8, 8))


def test_a_default_device_does_not_reach_into_the_store(tmp_path: pathlib.Path) -> None:
    """``torch.device`` as a context changes every call that names no device, and must not change those of the store."""
    x = torch.randn(64, 64, requires_grad=True)
    with torch.device("meta"), dh.saving(dh.OnDisk(tmp_path)) as saved:
        y = x.sin().cos()
        (got,) = torch.autograd.grad(y, x, x.detach())
    assert saved.report().moved > 0
    assert torch.equal(got, torch.autograd.grad(x.sin().cos(), x, x.detach())[0])


def test_a_trace_does_not_poison_the_arena(tmp_path: pathlib.Path) -> None:
    """Under ``torch.jit.trace`` ``numel()`` is a tensor. It must not stay in the bookkeeping of the process's file."""
    store = dh.OnDisk(tmp_path)
    model = dh.SaveWith(nn.Linear(64, 64), store)
    torch.jit.trace(model, torch.randn(64, 64))
    gc.collect()
    assert isinstance(store.budget.held, int)
    model(torch.randn(64, 64)).sum().backward()


# --- A failure is an error, and the next step is whole


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for bad, why in [
        (tmp_path / "absent", "No such file or directory"),
        (tmp_path / "file", "Not a directory"),
        ("/proc", ""),
    ]:
        with pytest.raises(StoreError, match=f"no file can be made: {why}") as caught:
            dh.SaveWith(torch.nn.Linear(2, 2), dh.OnDisk(bad), at_least=4096)
        assert caught.value.path == str(bad)


def test_a_store_that_gives_back_something_else_is_an_error(tmp_path: pathlib.Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Forgetful(dh.OnDisk):
        def get(self, ticket: object) -> torch.Tensor:
            return super().get(ticket)[:1]

    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(Forgetful(tmp_path)):
        y = x.exp()
    with pytest.raises(StoreError, match="must return what was put"):
        y.sum().backward()


def test_one_error_leaves_the_next_step_whole(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    truth = step(model, tokens())
    store = dh.OnDisk(tmp_path, limit="600 KiB")
    with dh.save_activations(model, "blocks.*", store):
        with pytest.raises(StoreError):
            model(tokens(batch=16))
        assert identical(step(model, tokens(batch=1)), step(model, tokens(batch=1)))
    assert identical(step(model, tokens()), truth)
