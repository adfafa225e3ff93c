"""Host memory that is used again: blocks that begin at a page, and segments that are page-locked for a device."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from disthooks._locks import Shared
from disthooks._tensors import format_bytes
from disthooks._torch import drop_failed_backward_at_exit
from disthooks.saved.stores.extents import Extent, Extents

# [Note: pinned memory]
# A device copies to and from page-locked ("pinned") host memory by itself, beside the computation. Ordinary memory may
# be swapped out or moved by the system, so a copy of it goes through a buffer of the driver, and the host waits.
#
# - To lock pages takes a second for a few GB. So torch's allocator locks them in large segments, which are used again.
#   The lengths of batches vary, and with them the size of each tensor. So space is given out by offset in a segment: a
#   part of any size fits where other sizes were before, and when nothing is in use, every segment is empty and whole.
#   Torch's own pool rounds each tensor up to a power of two.
# - A new segment has one eighth of the bytes of all others, so that a pool that is little used is small, and one that
#   grows asks the system seldom. Measured with a decoder's tensors of 4,096 to 8,192 tokens, random lengths: all
#   segments together have at most 1.10 times the most bytes that were in use at once, and after the longest step
#   almost nothing is locked any more (``benchmarks/host_memory.py``).
# - Other processes of the node cannot use locked pages. So one eighth of the memory of the node, and of the
#   container's limit, is never locked. When only that is left, ordinary memory is used, and one warning says so.
# - A forked child must not free or use the locked memory of its parent. So it gets a pool of its own, and keeps that of
#   the parent as it is.

PAGE = 4096
_HUGE = 4 << 20  # bytes: from this size on, huge pages are worth asking for


def room_for(nbytes: int, sizes: int = 8) -> int:
    """``nbytes`` rounded up to one of ``sizes`` sizes for each power of two, and to whole pages.

    Because there are few sizes, a freed block is soon used again, whatever sizes come.

    >>> [room_for(n) for n in (1, 4097, 33000, 100_000)]
    [4096, 8192, 36864, 106496]
    """
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - sizes.bit_length()))
    return max(1, -(-nbytes // step)) * step


class _Lease:
    """Memory that its destructor gives back to the pool."""

    give_back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.give_back is not None:
            self.give_back()  # it appends to a queue: see [Note: destructors]


@functools.cache
def lease_type(room: int) -> Any:
    """The type of a lease: a ctypes array of ``room`` bytes whose destructor gives its memory back to the pool."""
    drop_failed_backward_at_exit()  # or the destructor of a lease in its graph runs when the interpreter is gone
    return type("Lease", (_Lease, ctypes.Array), {"_type_": ctypes.c_char, "_length_": room})


class AlignedPool(Shared[mmap.mmap]):
    """A pool of page-aligned blocks of ordinary memory.

    Attributes:
        keep: bytes. Idle blocks are kept while all blocks together, in use or idle, have at most so many.
    """

    def __init__(self, keep: int = 0) -> None:
        super().__init__()
        self.keep = keep
        self._idle: collections.deque[mmap.mmap] = collections.deque()  # the oldest first
        self._bytes = 0  # of all blocks

    def lease(self, nbytes: int) -> Any:
        """A writable buffer of ``room_for(nbytes)`` bytes, whatever is in them.

        Its memory comes back when neither the buffer nor a tensor over it is in use.

        Raises:
            OSError: when the system has no more memory.
        """
        room = room_for(nbytes)
        with self._lock:
            self._apply_releases()
            block = next((idle for idle in self._idle if len(idle) == room), None)
            if block is not None:
                self._idle.remove(block)
            self._shrink(self.keep - (0 if block is not None else room))
            if block is None:
                block = map_block(room)
                self._bytes += room
        lease = lease_type(room).from_buffer(block)
        lease.give_back = functools.partial(self.release, block)
        return lease

    def trim(self, keep: int) -> None:
        """Keep at most ``keep`` bytes from now on, and give the idle blocks above that back to the system."""
        if self._releases or keep < self.keep:
            with self._lock:
                self._apply_releases()
                self._shrink(keep)
        self.keep = keep

    def _apply_release(self, release: mmap.mmap) -> None:
        if release not in self._idle:
            self._idle.append(release)

    def _shrink(self, most: int) -> None:
        """Free idle blocks, the oldest first, until all blocks together have at most ``most`` bytes."""
        while self._idle and self._bytes > most:
            self._bytes -= len(self._idle.popleft())


def map_block(room: int) -> mmap.mmap:
    """New memory of ``room`` bytes, in huge pages if it is large and the system has them."""
    block = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if room >= _HUGE:
        with contextlib.suppress(AttributeError, OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def tensor_over(lease: Any, shape: torch.Size, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A contiguous CPU tensor at ``offset`` in a lease, which lives as long as the tensor's storage.

    >>> pool = AlignedPool(keep=1 << 20)
    >>> x = tensor_over(pool.lease(12), torch.Size([3]), torch.float32).fill_(2)
    >>> x.tolist(), x.data_ptr() % PAGE
    ([2.0, 2.0, 2.0], 0)
    >>> address = x.data_ptr()
    >>> del x
    >>> tensor_over(pool.lease(12), torch.Size([3]), torch.float32).data_ptr() == address
    True
    """
    flat = torch.frombuffer(lease, dtype=dtype, count=shape.numel(), offset=offset)
    return flat.view(shape).data  # `.data`: autograd does not take it for a view of ``flat``


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which may be written; ``Tensor.numpy`` would need an extra dependency.

    The view does not keep the memory alive: keep the tensor.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


_LEFT = 8  # 1/8 of a node's memory is left to others, because page-locked memory cannot be swapped out
_SPARE = 1.25  # idle segments are freed if all have more than so many times the most bytes that were in use at once
_SMALLEST, _LARGEST = 16 << 20, 1 << 30  # bytes of a new segment, unless one tensor has more
_GROWS = 8  # a new segment has at least one part in so many of the bytes of all others
_SEVERAL = 4  # a new segment has room for so many parts, if the others have together, so that little is left at its end
_FINE = 64  # sizes of parts for each power of two: at most 1/64 of a part is unused, and few types of leases are made


class _Segment:
    """Host memory that was taken from the system at once, and which parts of it are in use."""

    def __init__(self, room: int, pin: bool) -> None:
        self.memory = torch.empty(room + PAGE, dtype=torch.uint8, pin_memory=pin)
        self.address = self.memory.data_ptr() + -self.memory.data_ptr() % PAGE
        self.room, self.pinned, self.parts = room, pin, Extents(room)


class _Slice(NamedTuple):
    segment: _Segment
    extent: Extent


class PinnedPool(Shared[_Slice]):
    """Host memory in large segments, page-locked for ``device``. See [Note: pinned memory].

    A part of a segment is used again when no tensor lies in it any more: whoever has a device copy to it or from it
    holds such a tensor.

    Attributes:
        refused: whether the last new segment could not be page-locked.
        registered: bytes that were taken from the system so far.
    """

    def __init__(self, device: torch.device, pin: bool = True) -> None:
        super().__init__()
        self.device, self.pin = device, pin
        self.registered = 0
        self.refused = False
        self._segments: list[_Segment] = []
        self._peak = 0  # the most bytes that were in use at once when a segment was added

    @property
    def held(self) -> int:
        return sum(segment.room for segment in self._segments)

    @property
    def in_use(self) -> int:
        with self._lock:
            self._apply_releases()
            return self._used()

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in host memory, with any contents.

        Raises:
            OSError: if the system has no more memory.
        """
        return tensor_over(self.lease(shape.numel() * dtype.itemsize), shape, dtype)

    def lease(self, nbytes: int) -> Any:
        """A writable buffer of at least ``nbytes`` bytes that begins at a page. Its destructor gives it back.

        Raises:
            OSError: if the system has no more memory.
        """
        room = room_for(nbytes, _FINE)
        with self._lock:
            self._apply_releases()
            part = self._take(room)
        lease = lease_type(room).from_address(part.segment.address + part.extent.offset)
        lease.give_back = functools.partial(self.release, part)
        return lease

    def clear(self) -> None:
        with self._lock:
            self._apply_releases()
            self._shrink(0)
            self._peak = self._used()

    def _take(self, room: int) -> _Slice:
        """``room`` bytes of a segment; of a new one if all others are too full."""
        for segment in self._segments:
            if (segment.pinned or not self.pin or self.refused) and (extent := segment.parts.take(room)) is not None:
                return _Slice(segment, extent)
        self._peak = max(self._peak, self._used() + room)
        new = max(_SMALLEST, self.held // _GROWS, min(_SEVERAL * room, self.held))
        new = max(room, min(_LARGEST, new) // PAGE * PAGE)
        self._shrink(int(_SPARE * self._peak) - new)
        segment = self._new_segment(room, new)
        self._segments.append(segment)
        self.registered += segment.room
        extent = segment.parts.take(room)
        assert extent is not None
        return _Slice(segment, extent)

    def _new_segment(self, room: int, new: int) -> _Segment:
        """A segment of ``new`` bytes; page-locked, if the system locks so many, or at least ``room``."""
        why = ""
        for nbytes in dict.fromkeys((new, room)) if self.pin else ():
            why = too_little_left(nbytes)
            # Torch locks powers of two, and the segment has all of it: at most ``nbytes``, unless one part needs more.
            # One page is left to begin at a page.
            whole = max(1 << (nbytes.bit_length() - 1), 1 << (room + PAGE - 1).bit_length()) - PAGE
            with contextlib.suppress(RuntimeError):  # the driver or the system refuses it
                if not why:
                    segment = _Segment(whole, True)
                    self.refused = False
                    return segment
        if self.pin and not self.refused:
            warn_unpinned(why or f"the driver or the system refused to lock {format_bytes(room)}")
        self.refused = self.pin
        try:
            return _Segment(new, False)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def _used(self) -> int:
        return sum(segment.parts.in_use for segment in self._segments)

    def _apply_release(self, release: _Slice) -> None:
        release.segment.parts.give(release.extent)

    def _shrink(self, most: int) -> None:
        """Free idle segments until all together have at most ``most`` bytes: ordinary ones first, then the smallest."""
        idle = [segment for segment in self._segments if not segment.parts.in_use]
        for segment in sorted(idle, key=lambda each: (each.pinned, each.room)):
            if self.held <= most:
                return
            self._segments.remove(segment)


_pools: dict[tuple[torch.device, bool, int], PinnedPool] = {}


def pool_of(device: torch.device, pin: bool) -> PinnedPool:
    key = device, pin, os.getpid()
    found = _pools.get(key)
    return _pools.setdefault(key, PinnedPool(device, pin)) if found is None else found


def warn_unpinned(why: str) -> None:
    """Warn that the host waits for copies from now on, and say what to do."""
    warnings.warn(
        f"no more page-locked memory is available ({why}). Ordinary memory is used, and the host waits for each copy "
        'between it and the device. Give OnCpu a smaller limit= ("64 GiB per node" is shared by the node\'s '
        "processes), raise the limit of locked memory (ulimit -l, or --ulimit memlock=-1 of a container), or set "
        "pin_memory=False if ordinary memory is right for you",
        stacklevel=4,
    )


def too_little_left(room: int) -> str:
    """The reason why ``room`` bytes more should not be page-locked; empty if they may be."""
    for left, total, where in filter(None, (node_memory(), container_memory())):
        if left - room < total // _LEFT:
            return f"{format_bytes(max(0, left))} of the {format_bytes(total)} of {where} are left"
    return ""


def node_memory() -> tuple[int, int, str] | None:
    """The bytes of the node's memory that are left, all of them, and its name; None if the system does not say."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines()[:8]:
            found[line.split(":")[0]] = 1024 * int(line.split()[1])
    if "MemAvailable" not in found or "MemTotal" not in found:
        return None
    return found["MemAvailable"], found["MemTotal"], "this node"


def container_memory(root: str = "/sys/fs/cgroup") -> tuple[int, int, str] | None:
    """The memory left under the limit of the control group, and the limit. The page cache counts as left."""
    for most, now, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit = int((pathlib.Path(root) / most).read_text())
            used = int((pathlib.Path(root) / now).read_text())
            stat = (pathlib.Path(root) / now).with_name("memory.stat").read_text().split()
            used -= int(stat[stat.index(cache) + 1]) if cache in stat else 0
            return (limit - used, limit, "this container") if limit < 1 << 60 else None
    return None
