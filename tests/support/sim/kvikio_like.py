"""Stands in for kvikio, which needs an NVIDIA GPU: files that move a simulated device's memory, late and in threads.

Like it, it looks at no stream: it takes what is in memory when its thread comes to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

moved: list[tuple[str, int]] = []  # what was called for how many bytes
fails: list[OSError] = []  # raised by the next calls

_pool = ThreadPoolExecutor(4)


class _IOFuture:
    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def get(self) -> int:
        return self._future.result()


class CuFile:
    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r+"
        self._fd = os.open(path, os.O_RDWR)

    def __del__(self) -> None:
        os.close(self._fd)

    def pwrite(self, buffer: Any, size: int, file_offset: int) -> _IOFuture:
        return _IOFuture(_pool.submit(self._move, "pwrite", buffer, size, file_offset))

    def pread(self, buffer: Any, size: int, file_offset: int) -> _IOFuture:
        return _IOFuture(_pool.submit(self._move, "pread", buffer, size, file_offset))

    def _move(self, call: str, buffer: Any, size: int, offset: int) -> int:
        time.sleep(random.random() * 1e-3)
        if fails:
            raise fails.pop()
        assert offset % 4096 == size % 4096 == 0
        moved.append((call, size))
        if call == "pwrite":
            return os.pwrite(self._fd, ctypes.string_at(buffer.data_ptr(), size), offset)
        data = os.pread(self._fd, size, offset)
        ctypes.memmove(buffer.data_ptr(), data, len(data))
        return len(data)


class CompatMode:
    OFF = "off"


class defaults:
    @staticmethod
    def set(name: str, value: object) -> contextlib.AbstractContextManager[None]:
        assert (name, value) == ("compat_mode", CompatMode.OFF)
        return contextlib.nullcontext()
