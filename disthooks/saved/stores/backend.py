"""Backends move bytes to a place and back: a scratch file, several places in turn, or a place of your own."""

from __future__ import annotations

import itertools
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

from disthooks._tensors import format_bytes, parse_bytes
from disthooks.errors import StoreError
from disthooks.saved.stores.extents import Extent
from disthooks.saved.stores.pools import PAGE
from disthooks.saved.stores.scratch_file import CHUNK, ScratchFile, Waste, file_in

Memory = TypeVar("Memory")


class Backend(ABC, Generic[Memory]):
    """A place for bytes. It knows nothing of tensors, of the order in which they are read, or of limits in flight.

    ``Memory`` is what bytes are written from and read into: a ``memoryview`` of host memory (format ``"B"``, writable
    in ``read``), or a tensor of bytes if the backend moves the memory of a device.

    Each call blocks until it is done, and worker threads make several calls at once. A call that fails raises
    :class:`~disthooks.errors.StoreError` with ``path`` and ``wanted``, and ``free`` if that is known. After a write
    that failed, nothing of it is kept. :class:`disthooks.testing.BackendTests` tests a backend.

    Attributes:
        capacity: the most bytes that all writes together may have; None if that is not known.
        alignment: memory begins at a multiple of so many bytes, and has a multiple of so many.
        best_write: bytes; larger writes are not faster.
        at_once: the number of calls at once from which on more are not faster.
        leaves_nothing: whether nothing is left of what a process wrote if it is killed.
    """

    capacity: int | None = None
    alignment: int = 1
    best_write: int = CHUNK
    at_once: int = 2
    leaves_nothing: bool = True

    @abstractmethod
    def write(self, memory: Memory) -> Any:
        """Keep the bytes of ``memory``, and return a key for them: any object."""

    @abstractmethod
    def read(self, key: Any, memory: Memory) -> None:
        """Fill ``memory`` with the bytes of ``key``; ``memory`` has as many bytes as were written.

        This may be called any number of times, from several threads at once.
        """

    @abstractmethod
    def free(self, key: Any) -> None:
        """Let go of the bytes of ``key``. This is called once, and no read of ``key`` is under way or comes later."""

    def free_part(self, key: Any, start: int, nbytes: int) -> None:
        """Note that nobody needs ``nbytes`` bytes from byte ``start`` of ``key`` on; a read may give others instead."""

    def release_idle(self) -> None:
        """Release what is kept for later calls, such as unused space or connections."""


class InFile(Backend[Memory]):
    """A scratch file whose bytes a subclass moves.

    Args:
        file: the file. In a fork of its process nothing can be read, because the parent may have changed the file.
        capacity: most bytes in use in the file; None for no limit.
    """

    alignment = PAGE

    def __init__(self, file: ScratchFile, capacity: int | None) -> None:
        self.file, self.capacity = file, capacity

    @abstractmethod
    def _write_at(self, offset: int, memory: Memory) -> None:
        """Write ``memory`` at ``offset`` of the file."""

    @abstractmethod
    def _read_at(self, offset: int, memory: Memory) -> None:
        """Fill ``memory`` from ``offset`` of the file."""

    def write(self, memory: Memory) -> Extent:
        check_process(self.file)
        nbytes: int = memory.nbytes  # type: ignore[attr-defined]  # a memoryview has it, and a tensor
        extent = self.file.allocate(nbytes)
        try:
            self._check_capacity(nbytes)
            self._write_at(extent.offset, memory)
        except BaseException:
            self.file.release(extent)
            raise
        return extent

    def read(self, key: Extent, memory: Memory) -> None:
        check_process(self.file)
        self._read_at(key.offset, memory)

    def free(self, key: Extent) -> None:
        self.file.release(key)

    def free_part(self, key: Extent, start: int, nbytes: int) -> None:
        self.file.release(Waste(key, start, nbytes))

    def release_idle(self) -> None:
        self.file.shrink(keep_peak=False)

    def _check_capacity(self, nbytes: int) -> None:
        used = self.file.in_use
        if self.capacity is not None and used > self.capacity:
            free = max(0, self.capacity - used + nbytes)
            raise StoreError(
                f"{self.file.directory!r} is full: wanted {format_bytes(nbytes)} more, {format_bytes(free)} free of "
                f"its limit of {format_bytes(self.capacity)}; raise the limit, or save less",
                path=self.file.directory,
                wanted=nbytes,
                free=free,
            )


class FileBackend(InFile[memoryview]):
    """A file without a name in ``directory``, which the system frees however the process ends.

    All such backends of a process with the same directory and ``direct`` share one file.

    Args:
        directory: a directory that exists and can be written.
        limit: most bytes in use in the file; None for no limit.
        direct: whether to write past the page cache: True, False, or ``"auto"`` to do it if it works there.

    Raises:
        StoreError: if no file can be made there, or if ``direct`` is True and does not work there.

    >>> import tempfile
    >>> backend = FileBackend(tempfile.gettempdir(), direct=False)
    >>> key = backend.write(memoryview(b"x" * 4096))
    >>> found = bytearray(4096)
    >>> backend.read(key, memoryview(found)); backend.free(key)
    >>> bytes(found[:3])
    b'xxx'
    """

    def __init__(self, directory: str, limit: int | str | None = None, direct: bool | Literal["auto"] = "auto") -> None:
        capacity = None if limit is None else parse_bytes(limit, "FileBackend limit")
        super().__init__(file_in(directory, direct), capacity)

    def _write_at(self, offset: int, memory: memoryview) -> None:
        self.file.write(memory, offset)

    def _read_at(self, offset: int, memory: memoryview) -> None:
        self.file.read(memory, offset, memory.nbytes)


def check_process(file: ScratchFile) -> None:
    """Raise StoreError if another process opened ``file``, and this one is a fork of it."""
    if file.process != os.getpid():
        raise StoreError(
            f"OnDisk({file.directory!r}): process {file.process} stored this tensor, and {os.getpid()} is a fork "
            "of it. The parent may have changed the file. Run the backward in the process that ran the forward",
            path=file.directory,
        )


class InTurn(Backend[Memory]):
    """Several backends that are written to in turn, such as one for each disk.

    >>> import tempfile
    >>> both = InTurn([FileBackend(tempfile.gettempdir(), direct=False) for _ in range(2)])
    >>> both.at_once, both.alignment
    (4, 4096)
    """

    def __init__(self, backends: Sequence[Backend[Memory]]) -> None:
        capacities = [backend.capacity for backend in backends]
        self.capacity = None if None in capacities else sum(capacity or 0 for capacity in capacities)
        self.alignment = max(backend.alignment for backend in backends)
        self.best_write = max(backend.best_write for backend in backends)
        self.at_once = sum(backend.at_once for backend in backends)
        self.leaves_nothing = all(backend.leaves_nothing for backend in backends)
        self._backends = tuple(backends)
        self._turns = itertools.cycle(self._backends)

    def write(self, memory: Memory) -> tuple[Backend[Memory], Any]:
        backend = next(self._turns)
        return backend, backend.write(memory)

    def read(self, key: tuple[Backend[Memory], Any], memory: Memory) -> None:
        key[0].read(key[1], memory)

    def free(self, key: tuple[Backend[Memory], Any]) -> None:
        key[0].free(key[1])

    def free_part(self, key: tuple[Backend[Memory], Any], start: int, nbytes: int) -> None:
        key[0].free_part(key[1], start, nbytes)

    def release_idle(self) -> None:
        for backend in self._backends:
            backend.release_idle()


class Checked(Backend[memoryview]):
    """A backend that keeps a CRC-32 of each write in memory, and compares it with what is read.

    Of a key of which a part is free, nothing is compared: other bytes may be there.
    """

    def __init__(self, backend: Backend[memoryview]) -> None:
        self.capacity, self.alignment = backend.capacity, backend.alignment
        self.best_write, self.at_once = backend.best_write, backend.at_once
        self.leaves_nothing = backend.leaves_nothing
        self._backend = backend

    def write(self, memory: memoryview) -> list[Any]:
        return [self._backend.write(memory), zlib.crc32(memory)]

    def read(self, key: list[Any], memory: memoryview) -> None:
        self._backend.read(key[0], memory)
        if key[1] is not None and zlib.crc32(memory) != key[1]:
            raise StoreError(
                f"other bytes were read from {self._backend!r} than were written (the checksum differs)",
                wanted=memory.nbytes,
            )

    def free(self, key: list[Any]) -> None:
        self._backend.free(key[0])

    def free_part(self, key: list[Any], start: int, nbytes: int) -> None:
        key[1] = None
        self._backend.free_part(key[0], start, nbytes)

    def release_idle(self) -> None:
        self._backend.release_idle()
