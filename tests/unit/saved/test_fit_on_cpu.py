"""``fit`` on the CPU, where what a store has in memory while it writes and reads depends on the speed of the disk."""

from __future__ import annotations

import pathlib
import threading
import time

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import memory
from disthooks.errors import UsageError
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


class Net(nn.Module):
    """A class of a user: torch.compile keeps its ``__call__`` as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("modules", ["*", "layers"])
@pytest.mark.parametrize("how", ["after", "before", "in place", "in place before"])
def test_a_compiled_model_is_measured(how: str, modules: str, tmp_path: pathlib.Path) -> None:
    torch.compiler.reset()
    model: nn.Module = Net()
    if how == "in place before":
        model.compile(backend="eager")
    called: nn.Module = torch.compile(model, backend="eager") if how == "before" else model  # type: ignore[assignment]
    with dh.fit(called, "64 GiB", dh.OnDisk(tmp_path), modules=modules) as fitted:
        if how == "after":
            called = torch.compile(model, backend="eager")  # type: ignore[assignment]
        elif how == "in place":
            model.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            called(torch.ones(1024, 8)).sum().backward()
            optimizer.step()
            assert fitted.report().rounds == i
        assert fitted.report().peak > 0 < fitted.report().limit
        assert fitted.report().saved.stored > 0


def test_hooks_that_a_compiled_model_does_not_call_are_an_error(tmp_path: pathlib.Path) -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    with dh.fit(model, "64 GiB", dh.OnDisk(tmp_path)):
        compiled(torch.ones(1024, 8)).sum().backward()
        with pytest.raises(UsageError, match=r"no module with hooks was called \(the model\).*call fit before"):
            compiled(torch.ones(1024, 8))


def test_a_record_has_the_most_in_use_since_the_one_before(tmp_path: pathlib.Path) -> None:
    """The second of four steps needs the most; the third one is logged. A step that is over the budget is counted."""
    memory.release_promptly()
    model, records = nn.Linear(8, 8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    base = memory.resident()
    with (
        dh.fit(model, base + 1024 * MIB, dh.OnDisk(tmp_path)) as fitted,
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[records.append], every=2, also=[fitted]),
    ):
        for i in range(4):
            loss = model(torch.ones(8, 8)).sum()
            if i in (1, 3):
                torch.empty((300 if i == 1 else 1100) * MIB, dtype=torch.uint8).fill_(1)
            loss.backward()
            optimizer.step()
        kept = fitted.report().saved.budget
        assert kept is not None
    first, third = ((record["saved/peak"] - base) / MIB for record in records)
    assert first < 200 < 290 < third < 400
    assert {record["saved/budget"] for record in records} == {base + 1024 * MIB}
    assert (kept.steps, kept.over) == (4, 1)
    assert str(kept).endswith("1 of 4 rounds over")


def test_forwards_in_two_threads_are_one_round(tmp_path: pathlib.Path) -> None:
    memory.release_promptly()
    model, both = nn.Linear(8, 8), threading.Barrier(2)
    model.register_forward_hook(lambda *_: (both.wait(60), None)[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward() -> None:
        model(torch.ones(8, 8)).sum().backward()

    with dh.fit(model, "64 GiB", dh.OnDisk(tmp_path)) as fitted:
        for i in range(4):
            threads = [threading.Thread(target=forward) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()
            assert fitted.report().rounds == i
            assert fitted.report().peak > 0 or i == 0
        assert ", all 4 steps within;" in str(fitted.report())
