"""Saved tensors on disk: one anonymous file for each process and directory."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import tempfile
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from disthooks._tensors import format_bytes
from disthooks.errors import StoreError
from disthooks.saved.stores.base import Account, Store

_PAGE = 4096
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def _memory(tensor: torch.Tensor, flags: int) -> memoryview:
    """The bytes of a contiguous CPU tensor, for the system calls; numpy would be an extra dependency."""
    nbytes = tensor.numel() * tensor.element_size()
    view: memoryview = _view_memory(tensor.data_ptr(), nbytes, flags)
    return view


def _extent(nbytes: int) -> int:
    """``nbytes`` rounded up to one of eight sizes for each power of two, and to whole pages.

    Few sizes mean that a freed extent is soon used again whatever sizes come; the tail that rounding adds is
    never written, so it takes no space on disk.

    >>> [_extent(n) for n in (1, 4097, 33000, 100_000)]
    [4096, 8192, 36864, 106496]
    """
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class Arena:
    """One anonymous file that many tensors lie in; it has no name, so nothing is left when its process dies.

    Args:
        directory: where the file lives.

    Raises:
        StoreError: when no file can be made there.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            # O_TMPFILE where the file system has it, otherwise unlinked at birth.
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._error("no file can be made", error, None) from error
        self._fd = self._file.fileno()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._freed: collections.deque[tuple[int, int]] = collections.deque()
        self._used = 0  # extents in use
        self._lock = threading.Lock()

    def write(self, memory: memoryview) -> tuple[int, int]:
        """Write ``memory``; its offset in the file and the bytes reserved there. StoreError when it does not fit."""
        nbytes = memory.nbytes
        offset, room = self._allocate(_extent(nbytes))
        done = 0
        try:
            while done < nbytes:  # the system writes at most 2 GiB at a time, and less when it likes
                done += os.pwrite(self._fd, memory[done:], offset + done)
        except BaseException as error:  # an interrupt, too
            self.free(offset, room)
            if not isinstance(error, OSError):
                raise
            raise self._error(f"{format_bytes(nbytes)} could not be written", error, nbytes) from error
        return offset, room

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill ``memory`` from ``offset``; StoreError rather than ever a byte that was not written."""
        done, nbytes = 0, memory.nbytes
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [memory[done:]], offset + done)
            except OSError as error:
                raise self._error(f"{format_bytes(nbytes)} could not be read", error, nbytes) from error
            if count == 0:
                raise self._error(f"the file ends {format_bytes(nbytes - done)} too soon", None, nbytes)
            done += count

    def free(self, offset: int, room: int) -> None:
        """Let the extent be used again; safe in a destructor."""
        self._freed.append((offset, room))

    def _allocate(self, extent: int) -> tuple[int, int]:
        """An extent that is free, of this size or up to twice it, or else at the end."""
        with self._lock:
            self._settle()
            self._used += 1
            fitting = [room for room, offsets in self._free.items() if offsets and extent <= room <= 2 * extent]
            if fitting:
                room = min(fitting)
                return self._free[room].pop(), room
            self._end += extent
            return self._end - extent, extent

    def _settle(self) -> None:
        while self._freed:
            offset, room = self._freed.popleft()
            self._free.setdefault(room, []).append(offset)
            self._used -= 1
        if not self._used:  # as after every backward: begin again at the front, whatever sizes come next
            self._free.clear()
            self._end = 0

    def _error(self, what: str, error: OSError | None, wanted: int | None) -> StoreError:
        free = None
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.directory)
            free = disk.f_bavail * disk.f_frsize
        why = f": {error.strerror}" if error is not None else ""
        room = f" ({format_bytes(free)} free there)" if free is not None else ""
        return StoreError(
            f"OnDisk({self.directory!r}): {what}{why}{room}; give a directory that exists, is writable and has "
            "room for the saved tensors of one forward, or save fewer of them",
            path=self.directory,
            wanted=wanted,
            free=free,
        )


_arenas: weakref.WeakValueDictionary[tuple[str, int], Arena] = weakref.WeakValueDictionary()
_arenas_lock = threading.Lock()


def arena(directory: str) -> Arena:
    """The arena of this process in ``directory``; a fork gets one of its own."""
    key = (os.path.realpath(directory), os.getpid())
    with _arenas_lock:
        found = _arenas.get(key)
        if found is None:
            found = _arenas[key] = Arena(directory)
        return found


class _Extent(NamedTuple):
    arena: Arena
    offset: int
    room: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class OnDisk(Store):
    """Keep saved tensors in one anonymous file of this process in ``directory``.

    The file has no name from birth: whatever ends the process, SIGKILL too, the system takes it back. It goes
    when the last store and the last saved tensor in it go.

    Args:
        directory: a directory that exists and can be written; best a local disk.
        limit: most bytes at any time in this process, an int or text such as ``"1 TiB"``; None for no limit.

    Raises:
        UsageError: when ``limit`` is not a size.
        StoreError: at once when no file can be made in ``directory``; in forward at the limit or when the disk
            is full; in backward when the file cannot be read. It has ``path``, ``wanted`` and ``free``.

    >>> store = OnDisk(tempfile.gettempdir())
    >>> ticket = store.put(torch.arange(4))
    >>> store.get(ticket)
    tensor([0, 1, 2, 3])
    >>> store.drop(ticket)
    """

    directory: str | os.PathLike[str]
    limit: int | str | None = None
    account: Account = field(init=False, repr=False, compare=False)
    _arena: Arena = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", os.fspath(self.directory))
        object.__setattr__(self, "account", Account(self.limit, f"OnDisk({self.directory!r})"))
        object.__setattr__(self, "_arena", arena(str(self.directory)))

    def __reduce__(self) -> tuple[Any, ...]:
        return OnDisk, (self.directory, self.limit)

    def put(self, tensor: torch.Tensor) -> _Extent:
        """Write ``tensor`` and wait until the system has taken it."""
        host = tensor.detach().cpu().contiguous()
        nbytes = int(host.numel()) * host.element_size()
        place = arena(str(self.directory))
        self.account.reserve(nbytes)
        try:
            offset, room = place.write(_memory(host, _READ)) if nbytes else (0, 0)
        except BaseException:
            self.account.release(nbytes)
            raise
        return _Extent(place, offset, room, nbytes, tensor.shape, tensor.dtype, tensor.device)

    def get(self, ticket: _Extent) -> torch.Tensor:
        """Read the tensor into fresh memory of the device it came from."""
        host = torch.empty(ticket.shape, dtype=ticket.dtype, device="cpu")
        if ticket.nbytes:
            ticket.arena.read(_memory(host, _WRITE), ticket.offset)
        return host.to(ticket.device)

    def drop(self, ticket: _Extent) -> None:
        """Let the extent be used again."""
        if ticket.nbytes:
            ticket.arena.free(ticket.offset, ticket.room)
        self.account.release(ticket.nbytes)
