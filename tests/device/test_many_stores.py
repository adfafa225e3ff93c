"""Stores that threads make, share, use in any order and forget: each tensor has its bits, and nothing is left."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import random
import threading
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from tests.support.sim import simulated
from tests.support.stores.faulty import soon

DTYPES = torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64


def make(dice: random.Random, folder: pathlib.Path) -> Any:
    """A store of any kind; those on disk share a directory."""
    disk = dh.OnDisk(
        folder, dice.choice([None, "2 MiB"]), direct=dice.choice([False, "auto"]), in_flight=dice.choice([0, "256 KiB"])
    )
    host = dh.OnCpu(dice.choice([None, "1 MiB"]), in_flight=dice.choice([0, "256 KiB", "512 MiB"]))
    near = dh.OnDevice(dice.choice([0, 1 << 18, 1 << 21]))
    chains = [near, host], [near, disk], [near, host, disk], [near, disk, host]
    return dice.choice([disk, host, *(dh.Tiered(*chain) for chain in chains)])


def value(dice: random.Random, device: torch.device) -> torch.Tensor:
    """Any size, dtype and strides."""
    found = torch.randint(0, 100, (dice.choice([0, 1, 100, 1024, 5000, 20_000, 70_000, 300_000]),))
    found = found.to(dice.choice(DTYPES)).to(device)
    if dice.random() < 0.2:
        found = found.expand(2, -1)
    return found[: len(found) // 4 * 4].reshape(4, -1).t() if found.ndim == 1 and dice.random() < 0.2 else found


def use(store: Any, dice: random.Random, device: torch.device) -> None:
    """Some steps: put many, ask the store for this and that, read all, and drop most."""
    live: list[tuple[Any, torch.Tensor]] = []
    for _ in range(dice.randint(2, 8)):
        for _ in range(dice.randint(1, 20)):
            tensor = value(dice, device)
            try:
                live.append((store.put(store.own(tensor) if dice.random() < 0.3 else tensor.clone()), tensor))
            except StoreError as error:
                assert "full" in str(error)  # noqa: PT017  (other errors are none of a limit)
                if live:
                    store.drop(live.pop()[0])
        if live:
            store.prefetch(live[0][0])
            dice.choice([store.release_idle, store.report, store.wait, gc.collect])()
        order = list(range(len(live) - 1, -1, -1))
        if dice.random() < 0.3:
            dice.shuffle(order)
        dropped = set()
        for i in order:
            ticket, tensor = live[i]
            found = store.get(ticket)
            assert (found.device, found.dtype, found.shape) == (tensor.device, tensor.dtype, tensor.shape)
            assert torch.equal(found.cpu(), tensor.cpu()), store
            if dice.random() < 0.85:
                store.drop(ticket)
                dropped.add(i)
        live = [each for i, each in enumerate(live) if i not in dropped]


@pytest.mark.full_tier
@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("seed", range(4))
def test_each_tensor_has_its_bits_and_nothing_is_left(
    seed: int, where: str, tmp_path: pathlib.Path, device: torch.device
) -> None:
    dice = random.Random(seed)
    device = device if where == "device" else torch.device("cpu")
    for number in range(15):
        if device.type == "sim":
            simulated.delays(dice.choice([0, 500e-6]), number)
        shared = make(dice, tmp_path)
        done: list[int] = []

        def work(seed: int, shared: Any = shared, done: list[int] = done) -> None:
            mine = random.Random(seed)
            use(shared if mine.random() < 0.6 else make(mine, tmp_path), mine, device)
            done.append(seed)

        threads = [threading.Thread(target=work, args=(dice.randrange(1 << 30),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert len(done) == 4

        def is_empty(shared: Any = shared) -> bool:
            gc.collect()
            with contextlib.suppress(StoreError):
                shared.wait()
            return all(report.held == 0 for report in shared.report())

        assert soon(is_empty), shared
