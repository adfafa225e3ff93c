"""Law 9, never wrong: whatever befalls a thread that moves tensors, nobody waits for it for ever, and all goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import threading
from collections.abc import Iterator

import pytest

import disthooks as dh
from disthooks.errors import StoreError
from tests.support.stores.faulty import soon
from tests.support.stores.moving import Nth, alone, error_of, movers, one_thread, read, right, slow, step, write  # noqa: F401

MAIN = threading.main_thread()
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that die here are meant to."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    others = movers()
    yield
    assert soon(lambda: set(movers()) <= set(others))


@pytest.mark.parametrize("kind", [SystemExit, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
@pytest.mark.usefixtures("quiet")
def test_what_a_thread_may_raise(
    call: str, kind: type[BaseException], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def instead(*_: object) -> int:
        raise kind

    move = write if call == "pwrite" else read
    fails = Nth(move, 2, instead)
    store = dh.OnDisk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lambda *args: (move if threading.current_thread() is MAIN else fails)(*args))
        if call == "pwrite":
            assert type(error_of(lambda: step(store), kind)) is kind
        else:  # ahead of need: who wants it reads it itself
            assert step(store)
    assert right(store)
    store.rest()


@pytest.mark.parametrize("moment", range(6))
@pytest.mark.usefixtures("quiet")
def test_a_thread_that_is_killed(moment: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronously, wherever it is: in the end nobody waits for it, and what it had is in memory."""
    store = dh.OnDisk(tmp_path, in_flight="40 KiB")
    kill = ctypes.pythonapi.PyThreadState_SetAsyncExc
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", slow(write, 0.002))
        patch.setattr(os, "preadv", slow(read, 0.002))
        for i in range(8):
            timer = threading.Timer(
                0.003 * i + 0.0007 * moment,
                lambda: [
                    kill(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
                    for thread in list(store._mover._jobs)
                ],
            )
            timer.start()
            with contextlib.suppress(StoreError, SystemExit):
                assert step(store, wait=False)
            timer.join()
    for _ in range(2):  # what a killed thread could not write may be said once more
        with contextlib.suppress(StoreError, SystemExit):
            store.wait()
    assert right(store)
    assert store._mover._jobs
    store.rest()  # what is killed while it is idle dies here
