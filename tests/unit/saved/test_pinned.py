"""The pool of page-locked memory, as far as it can be seen without a device: sizes, reuse, refusals, forks."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import warnings

import pytest
import torch

from disthooks.saved.stores import pools
from disthooks.saved.stores.pools import PinnedPool

CPU = torch.device("cpu")
KiB = 1 << 10


def tensor(pool: PinnedPool, nbytes: int) -> torch.Tensor:
    return pool.tensor(torch.Size([nbytes]), torch.uint8)


def test_no_power_of_two_is_wasted() -> None:
    """20.4 GiB of it were 32 in torch's own pool."""
    pool = PinnedPool(CPU, pin=False)
    held = [tensor(pool, n * 100 * KiB + 1) for n in range(1, 40)]
    wanted = sum(each.nbytes for each in held)
    assert wanted <= pool.held <= 1.15 * wanted
    assert all(each.data_ptr() % 4096 == 0 for each in held)


def test_a_block_is_used_again_once_no_tensor_uses_it() -> None:
    pool = PinnedPool(CPU, pin=False)
    first = tensor(pool, 50 * KiB)
    address, view = first.data_ptr(), first[10:20]
    del first
    other = tensor(pool, 50 * KiB)
    assert other.data_ptr() != address
    del view
    assert tensor(pool, 50 * KiB).data_ptr() == address


def test_one_that_is_somewhat_larger_will_do() -> None:
    pool = PinnedPool(CPU, pin=False)
    large = tensor(pool, 140 * KiB)
    address = large.data_ptr()
    del large
    assert tensor(pool, 100 * KiB).data_ptr() == address
    assert tensor(pool, 60 * KiB).data_ptr() != address  # more than twice


def test_what_is_idle_is_bounded() -> None:
    pool = PinnedPool(CPU, pin=False)
    for n in range(1, 60):
        each = tensor(pool, n * 40 * KiB)
        each.fill_(n)
        most = each.nbytes
        del each
    assert pool.held <= 1.25 * 1.13 * most
    pool.clear()
    assert pool.held == 0


@pytest.mark.second_tier
def test_it_is_pinned_by_torch(device: torch.device) -> None:
    pool = PinnedPool(device)
    each = tensor(pool, 100 * KiB)
    assert each.is_pinned()
    assert not pool.refused


def test_ordinary_memory_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a limit on locked memory; said once."""
    monkeypatch.setattr(pools, "pinned_block", lambda device, room, node: None)
    pool = PinnedPool(CPU)
    with pytest.warns(UserWarning, match=r"(?s)the host waits.*limit=.*ulimit -l"):
        first = tensor(pool, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = tensor(pool, 100)
    first.fill_(1), second.fill_(2)
    assert (int(first.sum()), int(second.sum())) == (100, 200)


def test_an_eighth_of_memory_is_left(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("8000000\n")
    (tmp_path / "memory.current").write_text("6500000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500000\nother 3\n")
    container = pools._container_memory(str(tmp_path))
    assert container == (2_000_000, 8_000_000, "this container")
    find = pools._container_memory
    monkeypatch.setattr(pools, "_container_memory", lambda: container)
    assert pools.too_little_left(900_000) == ""
    assert "this container" in pools.too_little_left(1_100_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert find(str(tmp_path)) is None
    monkeypatch.undo()
    assert "this node" in pools.too_little_left(1 << 60)


def test_memory_near_a_device_is_as_good_as_any() -> None:
    block = pools.mapped_block(64 * KiB, 0)
    assert not pools.prefer_node(None, block.address, 64 * KiB)
    assert not pools.prefer_node(1 << 20, block.address, 64 * KiB)
    ctypes.memset(block.address, 7, 64 * KiB)
    assert ctypes.string_at(block.address + 64 * KiB - 1, 1) == b"\x07"


def test_a_block_is_unpinned_before_it_is_unmapped() -> None:
    freed = []
    block = pools.mapped_block(64 * KiB, None)
    address = block.address

    def unpin(address: int) -> None:
        freed.append((address, ctypes.string_at(address, 1)))

    block._unpin = unpin
    del block
    gc.collect()
    assert freed == [(address, b"\x00")]


def test_a_child_leaves_it_alone() -> None:
    """It may have something else at the address by then."""
    freed: list[int] = []
    block = pools.mapped_block(64 * KiB, None)
    block._unpin = freed.append
    address = block.address
    child = os.fork()
    if not child:
        del block
        gc.collect()
        same = ctypes.string_at(address, 1) == b"\x00"  # still mapped
        os._exit(0 if same and not freed else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_begins_with_an_empty_pool() -> None:
    pool = PinnedPool(CPU, pin=False)
    each = tensor(pool, 64 * KiB)
    address = each.data_ptr()
    child = os.fork()
    if not child:
        del each
        other = tensor(pool, 64 * KiB)
        os._exit(0 if other.data_ptr() != address and pool.held == 64 * KiB else 1)
    assert os.waitpid(child, 0)[1] == 0
