"""Every store, by one suite: what is put comes back, dropped bytes are free, copies and pickles work."""

from __future__ import annotations

import copy
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import Store
from disthooks.saved.stores.pools import room_for

# A new store is one line here.
STORES = {
    "OnCpu": lambda folder, **kw: dh.OnCpu(**kw),
    "OnDevice": lambda folder, **kw: dh.OnDevice(**kw),
    "OnDisk": lambda folder, **kw: dh.OnDisk(folder, **kw),
    "OnDisk, past the host where it can": lambda folder, **kw: dh.OnDisk(folder, gpu_direct="auto", **kw),
}

TENSORS = {
    "floats": torch.randn(33, 7),
    "bools": torch.rand(1001) > 0.5,
    "one byte": torch.tensor([7], dtype=torch.uint8),
    "zero-dim": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "not contiguous": torch.randn(40, 50).t()[::2],
    "complex": torch.randn(5, 5, dtype=torch.complex64),
}


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> object:
    return lambda **kw: STORES[request.param](tmp_path, **kw)


@pytest.mark.parametrize("kind", TENSORS)
def test_there_and_back(make: object, kind: str) -> None:
    store, tensor = make(), TENSORS[kind]
    ticket = store.put(tensor)
    for _ in range(2):
        back = store.get(ticket)
        assert (back.dtype, back.device, back.shape) == (tensor.dtype, tensor.device, tensor.shape)
        assert torch.equal(back, tensor)
    store.drop(ticket)
    assert store.account.held == 0


def test_copies_and_pickles(make: object) -> None:
    store = make(limit="1 MiB")
    for twin in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert twin == store
        assert repr(twin) == repr(store)
        assert torch.equal(twin.get(twin.put(torch.ones(5))), torch.ones(5))


def test_bad_limits(make: object) -> None:
    for bad in ("12 potatoes", -1, "", 1.5, True):
        with pytest.raises(UsageError, match="limit="):
            make(limit=bad)


def test_extents_do_not_overlap_and_are_used_again(tmp_path: pathlib.Path) -> None:
    """Random puts and drops: what is held always reads back, and the file stops growing."""
    store = dh.OnDisk(tmp_path)
    generator = torch.Generator().manual_seed(0)
    held: list[tuple[torch.Tensor, object]] = []
    ends = []
    for i in range(2000):
        n = int(torch.randint(1, 60_000, (1,), generator=generator))
        tensor = torch.full((n,), i % 251, dtype=torch.uint8)
        held.append((tensor, store.put(tensor)))
        if len(held) > 20:
            tensor, ticket = held.pop(int(torch.randint(0, 20, (1,), generator=generator)))
            assert torch.equal(store.get(ticket), tensor)
            store.drop(ticket)
        ends.append(store._mover.arenas[0]._end)
    assert ends[-1] < 4 * 20 * 60_000
    assert store.account.held == sum(store.account.size(tensor.nbytes) for tensor, _ in held)


def test_extent_sizes_are_few_and_waste_little() -> None:
    sizes = [room_for(n) for n in range(1, 10_000_000, 997)]
    assert all(
        n <= size <= max(4096, n * 1.125 + 4096) for n, size in zip(range(1, 10_000_000, 997), sizes, strict=True)
    )
    assert len(set(sizes)) < 80


def test_pin_memory_is_checked() -> None:
    with pytest.raises(UsageError, match="pin_memory"):
        dh.OnCpu(pin_memory="yes")


def test_a_store_of_ones_own(tmp_path: pathlib.Path) -> None:
    """A dictionary is a store."""
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class InDict(Store):
        kept: dict = dataclasses.field(default_factory=dict)

        def put(self, tensor: torch.Tensor) -> int:
            self.kept[len(self.kept)] = tensor.clone()
            return len(self.kept) - 1

        def get(self, ticket: int) -> torch.Tensor:
            return self.kept[ticket]

        def drop(self, ticket: int) -> None:
            self.kept[ticket] = None

    store = InDict()
    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(store) as saved:
        y = x.exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())
    assert store.kept == {0: None}
    assert saved.report().moved == x.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_from_a_gpu_and_back(make: object) -> None:
    store = make(limit="1 MiB")
    tensor = torch.randn(100, 100, device="cuda")
    ticket = store.put(tensor)
    assert store.account.held == tensor.nbytes
    back = store.get(ticket)
    assert back.device == tensor.device
    assert torch.equal(back, tensor)
    store.drop(ticket)
    with pytest.raises(StoreError, match="full"):
        store.put(torch.empty(1 << 20, device="cuda"))


def test_what_each_store_is_worth(tmp_path: pathlib.Path) -> None:
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
print(dh.Tiered(dh.OnDevice(1), dh.OnDisk(sys.argv[1])).worth, dh.OnCpu().worth)
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
    assert done.stdout.splitlines()[-1] == "65536 4096"
