"""Page-aligned memory that is used again: a fresh allocation costs more than the read into it."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import weakref
from typing import Any

import torch

from disthooks._locks import Order, shared

PAGE = 4096
_HUGE = 4 << 20  # from here on it is worth asking for huge pages


def room_for(nbytes: int) -> int:
    """``nbytes`` rounded up to one of eight sizes for each power of two, and to whole pages.

    Few sizes mean that what was freed is soon used again whatever sizes come.

    >>> [room_for(n) for n in (1, 4097, 33000, 100_000)]
    [4096, 8192, 36864, 106496]
    """
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return max(1, -(-nbytes // step)) * step


class _Returns:
    """Gives its memory back to the pool when nobody uses it any more."""

    pool: Buffers
    block: Any

    def __del__(self) -> None:
        self.pool.returned.append(self.block)  # a destructor takes no lock


@functools.cache
def lease_type(room: int) -> Any:
    """A ctypes array of ``room`` bytes, which goes back to its pool."""
    return type("Lease", (_Returns, ctypes.Array), {"_type_": ctypes.c_char, "_length_": room})


class Buffers:
    """A pool of page-aligned blocks of memory.

    Args:
        keep: idle blocks are kept to be used again while all blocks together, in use or idle, have at most so many
            bytes.
    """

    def __init__(self, keep: int = 0) -> None:
        self.keep = keep
        self._idle: collections.OrderedDict[int, Any] = collections.OrderedDict()  # by number, the oldest first
        self._numbers = 0
        self._blocks: list[weakref.ref[Any]] = []  # all that there are
        self._many = 64  # those that are gone are sorted out at so many
        self.returned: collections.deque[Any] = collections.deque()
        self._lock = shared(Order.POOL)

    def lease(self, nbytes: int) -> Any:
        """A writable buffer of ``room_for(nbytes)`` bytes, whatever is in them.

        Its memory comes back when neither it nor a tensor made of it is in use.

        Raises:
            OSError: when the system has no more memory.
        """
        room = room_for(nbytes)
        with self._lock:
            self._settle()
            number = self._fitting(room)
            block = self._idle.pop(number) if number is not None else None
            self._shrink(self.keep - (0 if block is not None else room))
            if block is None:
                block = self._new(room)
                self._blocks.append(weakref.ref(block))
        lease = self._over(block)
        lease.pool, lease.block = self, block
        return lease

    def _fitting(self, room: int) -> int | None:
        """The number of an idle block for ``room`` bytes."""
        return next((n for n, block in self._idle.items() if len(block) == room), None)

    def _new(self, room: int) -> Any:
        """A new block; it has a length and can be referenced weakly."""
        return map_block(room)

    def _over(self, block: Any) -> Any:
        """A lease of ``block``."""
        return lease_type(len(block)).from_buffer(block)

    def trim(self, keep: int) -> None:
        """From now on ``keep`` so many; more is given back to the system."""
        if self.returned or keep < self.keep:
            with self._lock:
                self.keep = keep
                self._settle()
                self._shrink(keep)
        self.keep = keep

    def clear(self) -> None:
        """Give all idle blocks back to the system."""
        with self._lock:
            self._settle()
            self._shrink(0)

    def _settle(self) -> None:
        while self.returned:
            self._numbers += 1
            self._idle[self._numbers] = self.returned.popleft()

    def _shrink(self, most: int) -> None:
        """Let go of idle blocks, the oldest first, until all together have at most ``most`` bytes."""
        if not self._idle and len(self._blocks) < self._many:
            return  # to count all blocks for each lease would take the square of their number
        total = self._total()
        self._many = 2 * len(self._blocks) + 64
        while self._idle and total > most:
            total -= len(self._idle.popitem(last=False)[1])

    def _total(self) -> int:
        """Bytes of all blocks, in use or idle."""
        self._blocks = [reference for reference in self._blocks if reference() is not None]
        return sum(0 if block is None else len(block) for block in (reference() for reference in self._blocks))


def map_block(room: int) -> mmap.mmap:
    """Fresh memory of ``room`` bytes, of huge pages where that is worth it."""
    block = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if room >= _HUGE:
        with contextlib.suppress(AttributeError, OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def tensor_over(lease: Any, shape: torch.Size, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A contiguous CPU tensor at ``offset`` in a lease, which lives as long as the tensor's storage.

    >>> pool = Buffers(keep=1 << 20)
    >>> x = tensor_over(pool.lease(12), torch.Size([3]), torch.float32).fill_(2)
    >>> x.tolist(), x.data_ptr() % PAGE
    ([2.0, 2.0, 2.0], 0)
    >>> address = x.data_ptr()
    >>> del x
    >>> tensor_over(pool.lease(12), torch.Size([3]), torch.float32).data_ptr() == address
    True
    """
    nbytes = shape.numel() * dtype.itemsize
    flat = torch.frombuffer(lease, dtype=torch.uint8, count=nbytes, offset=offset)
    return flat.view(dtype).view(shape).data  # no view of another


_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE


def memory_at(address: int, nbytes: int, write: bool = False) -> memoryview:
    """``nbytes`` from ``address`` on, for the system calls. They are not held: keep whose they are."""
    view: memoryview = _view_memory(address, nbytes, _WRITE if write else _READ)
    return view


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, for the system calls; numpy would be an extra dependency.

    The memory is not held: keep the tensor.
    """
    return memory_at(tensor.data_ptr(), tensor.nbytes)
