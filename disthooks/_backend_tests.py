"""Conformance tests for a backend, and what they share with those of other kinds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from disthooks.errors import StoreError
from disthooks.saved.stores.backend import Backend

MOST = 120.0  # seconds after which a rank, a thread or a fork counts as hung


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Run ``work`` in several threads at once. An error in one of them is raised here."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result(MOST)


def _in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a fork of this process, and return its wait status. A fork that hangs is ended by a signal."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(int(MOST / 2))
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


class BackendTests:
    """Tests of a :class:`disthooks.saved.stores.backend.Backend`. The subclass gives the fixture ``backend``.

    The other methods say how to see and to change what lies at its place. A test that needs one which the subclass does
    not give is skipped.
    """

    @pytest.fixture
    def backend(self) -> Backend[Any]:
        """The backend to test; a new one, with nothing in it, for each test."""
        raise NotImplementedError("give the fixture 'backend': def backend(self): return YourBackend()")

    def reopen(self, backend: Backend[Any]) -> Backend[Any]:
        """A backend at the same place, as another process would open it. It is called in a child process."""
        pytest.skip("the subclass has no 'reopen'")

    def traces(self, backend: Backend[Any]) -> Collection[Any]:
        """What lies at the place of the backend, such as the names of files or objects."""
        pytest.skip("the subclass has no 'traces'")

    def lose(self, backend: Backend[Any]) -> None:
        """Remove all bytes from the place, behind the back of the backend."""
        pytest.skip("the subclass has no 'lose'")

    def memory(self, backend: Backend[Any], data: bytes) -> Any:
        """Memory that the backend takes, with the bytes ``data``."""
        # Anonymous memory begins at a page.
        found = memoryview(mmap.mmap(-1, max(1, len(data))))[: len(data)]
        found[:] = data
        return found

    def data(self, memory: Any) -> bytes:
        """The bytes of ``memory``."""
        return bytes(memory)

    def _wrote(self, backend: Backend[Any], number: int, pages: int = 1) -> tuple[Any, bytes]:
        """A key and its bytes, which depend on ``number`` alone."""
        nbytes = pages * max(backend.alignment, 512)
        data = bytes(torch.randint(256, (nbytes,), generator=torch.Generator().manual_seed(number)).tolist())
        return backend.write(self.memory(backend, data)), data

    def _check(self, backend: Backend[Any], key: Any, data: bytes) -> None:
        memory = self.memory(backend, bytes(len(data)))
        backend.read(key, memory)
        assert self.data(memory) == data, "law 1, exact: other bytes were read than were written"

    def test_law_1_bits(self, backend: Backend[Any]) -> None:
        """What is read has the bits of what was written, each time, and a write does not change its memory."""
        for pages in (1, 2, 7, 300):
            key, data = self._wrote(backend, pages, pages)
            self._check(backend, key, data)
            self._check(backend, key, data)
            backend.free(key)
        memory = self.memory(backend, b"\x05" * max(backend.alignment, 512))
        key, before = backend.write(memory), self.data(memory)
        assert self.data(memory) == before
        memory[:] = 0 if isinstance(memory, torch.Tensor) else bytes(memory.nbytes)
        self._check(backend, key, before)  # the memory of a write is free when the write is done
        backend.free(key)

    def test_law_4_any_order(self, backend: Backend[Any]) -> None:
        """Keys are read and freed in any order, and what is written into freed space changes no other key."""
        held = {number: self._wrote(backend, number, 1 + number % 5) for number in range(30)}
        for number in range(0, 30, 3):
            backend.free(held.pop(number)[0])
        held |= {number: self._wrote(backend, number, 1 + number % 7) for number in range(30, 45)}
        for number in reversed(held):
            self._check(backend, *held[number])
        for key, _ in held.values():
            backend.free(key)

    def test_law_6_nothing_left(self, backend: Backend[Any]) -> None:
        """After ``free`` nothing of the bytes is there."""
        before = sorted(map(str, self.traces(backend)))
        keys = [self._wrote(backend, number)[0] for number in range(5)]
        for key in keys:
            backend.free(key)
        backend.release_idle()
        assert sorted(map(str, self.traces(backend))) == before

    def test_law_6_killed(self, backend: Backend[Any]) -> None:
        """Nothing is left of a process that is killed, if ``leaves_nothing``."""
        if not backend.leaves_nothing or type(self).reopen is BackendTests.reopen:
            pytest.skip("the backend does not promise it, or the subclass has no 'reopen'")
        before = sorted(map(str, self.traces(backend)))

        def child() -> None:
            again = self.reopen(backend)
            self._wrote(again, 1), self._wrote(again, 2)
            os.kill(os.getpid(), signal.SIGKILL)

        assert os.WTERMSIG(_in_child(child)) == signal.SIGKILL
        assert sorted(map(str, self.traces(backend))) == before

    def test_law_7_threads(self, backend: Backend[Any]) -> None:
        """Several threads write, read and free at once."""

        def work(number: int) -> None:
            for turn in range(5):
                held = [self._wrote(backend, 100 * number + 10 * turn + each, 1 + each) for each in range(4)]
                for key, data in held:
                    self._check(backend, key, data)
                    backend.free(key)

        in_threads(work, max(4, backend.at_once))

    def test_law_9_errors(self, backend: Backend[Any]) -> None:
        """A read of bytes that are gone is a StoreError that says where and how many, and never other bytes."""
        key, data = self._wrote(backend, 1, 4)
        self.lose(backend)
        with pytest.raises(StoreError) as caught:
            backend.read(key, self.memory(backend, bytes(len(data))))
        assert caught.value.path
        assert caught.value.wanted == len(data)

    def test_law_9_forks(self, backend: Backend[Any]) -> None:
        """A fork reads the same bytes or gets a StoreError, opens a backend of its own, and changes nothing here."""
        key, data = self._wrote(backend, 1, 3)

        def child() -> None:
            with contextlib.suppress(StoreError):
                self._check(backend, key, data)
            with contextlib.suppress(StoreError):
                self._check(backend, *self._wrote(backend, 2, 3))
            with contextlib.suppress(pytest.skip.Exception):
                again = self.reopen(backend)
                self._check(again, *self._wrote(again, 3, 3))

        assert _in_child(child) == 0
        self._check(backend, key, data)
        later = self._wrote(backend, 4, 3)
        self._check(backend, key, data)
        for each in (key, later[0]):
            backend.free(each)

    def test_law_10_bounded(self, backend: Backend[Any]) -> None:
        """More than ``capacity`` is a StoreError that changes nothing, and freed space is used again."""
        if backend.capacity is None:
            pytest.skip("the backend has no capacity")
        held: list[tuple[Any, bytes]] = []
        numbers = itertools.count()

        def fill() -> None:
            for _ in range(backend.capacity or 0):
                held.append(self._wrote(backend, next(numbers), 2))

        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                fill()
            assert caught.value.wanted
            assert sum(len(data) for _, data in held) <= backend.capacity
            for key, data in held:
                self._check(backend, key, data)
            while held:
                backend.free(held.pop()[0])
