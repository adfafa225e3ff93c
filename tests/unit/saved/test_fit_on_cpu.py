"""``fit`` on the CPU, where what a store has in memory while it writes and reads depends on the speed of the disk."""

from __future__ import annotations

import pathlib
import time

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import memory
from disthooks.saved.fit import Fitted
from disthooks.saved.stores.scratch_file import ScratchFile

pytestmark = pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
MIB = 1 << 20


def _needed(folder: pathlib.Path, layers: int) -> float:
    """Bytes that a round needs beside saved tensors of which nothing stays: one of 2 MiB for each layer."""
    memory.release_promptly()
    store = dh.OnDisk(folder)
    model, x = nn.Sequential(nn.Linear(8, 8), *(nn.Sigmoid() for _ in range(layers))), torch.ones(1 << 16, 8)
    with dh.fit(model, memory.resident() + 1024 * MIB, store) as fitted:
        assert fitted in store.open().worker.frees_idle_for
        for _ in range(3):
            model(x).sum().backward()
        found = fitted._needed(fitted._round)  # type: ignore[arg-type]
    assert not store.open().worker.frees_idle_for
    return found


def test_what_a_round_needs_does_not_depend_on_the_speed_of_the_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fitted, "_limit", lambda *_: 0)
    fast, few, write = _needed(tmp_path, 48), _needed(tmp_path, 4), ScratchFile.write

    def slow(file: ScratchFile, buffer: memoryview, offset: int) -> None:
        write(file, buffer, offset)
        time.sleep(buffer.nbytes / 100e6)

    monkeypatch.setattr(ScratchFile, "write", slow)
    assert _needed(tmp_path, 48) == pytest.approx(fast, abs=16 * MIB)
    assert fast > 64 * MIB, "the 64 MiB that may be in flight, used or not"
    assert few < 40 * MIB, "no more can be in flight than moves"


def test_a_size_needs_as_much_as_any_smaller_one(tmp_path: pathlib.Path) -> None:
    """glibc keeps the memory of small tensors, so smaller inputs may need more resident memory than larger ones."""
    memory.release_promptly()
    model = nn.Linear(8, 8)
    with dh.fit(model, memory.resident() + 1024 * MIB, dh.OnDisk(tmp_path)) as fitted:
        found = []
        for smaller, larger in ((300, 100), (100, 300)):
            needs = {(8 * rows, True): {8 * rows: needed * MIB} for rows, needed in ((4, smaller), (8, larger))}
            fitted.load_state_dict({"needs": needs, "least": {}, "again": {}, "layers": {}})
            for rows in (8, 4):
                fitted._round = None
                model(torch.ones(rows, 8))
                found.append(fitted._needed(fitted._round) / MIB)  # type: ignore[arg-type]
    assert found == [300, 300, 300, 100]
