"""Host memory that is used again: pools of blocks that begin at a page, page-locked for a device or not."""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import functools
import mmap
import os
import pathlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from disthooks._fork_safe import ForkSafe, Order
from disthooks._tensors import format_bytes
from disthooks.saved.stores.extents import Extent, Extents

# [Note: pinned memory]
# A device copies to and from page-locked ("pinned") host memory by itself, beside the computation. Ordinary memory
# may be swapped out or moved by the system, so a copy of it goes through a buffer of the driver, and the host waits.
#
# - To lock pages takes a second for a few GB. So they are locked in large segments, which are used again.
# - Other processes of the node cannot use locked pages. So one eighth of the memory of the node, and of the
#   container's limit, is never locked. When only that is left, ordinary memory is used, and one warning says so. Some
#   seconds later, or after ``clear``, the next new segment is asked to be locked again, because memory may be back.
# - After a fork, parent and child share their pages until one of them writes to a page. Then the writer gets a new
#   page, and the device would still use the old one. So a child does not get the locked blocks (MADV_DONTFORK). It
#   must never unmap their addresses, because nothing or something else is there.

# [Note: segments]
# The lengths of batches vary, and with them the size of each tensor. A pool with blocks of a few sizes finds no block
# of the new size then, although nearly all of it is idle, and locks gigabytes anew in each step. So space is given out
# by offset in large segments: each part comes from the first segment with enough room in one piece. A part of any size
# fits where other sizes were before, and when nothing is in use, every segment is empty and whole.
#
# A new segment has one eighth of the bytes of all others, so that a pool that is little used is small, and one that
# grows asks the system seldom. Measured with a decoder's tensors of 4,096 to 8,192 tokens, random lengths: all
# segments together have at most 1.10 times the most bytes that were in use at once, and after the longest step nothing
# is registered any more (``benchmarks/host_memory.py``).

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


class _Returns:
    """Memory that its destructor gives back to the pool."""

    give_back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.give_back is not None:
            self.give_back()  # it appends to a queue: see [Note: destructors]


@functools.cache
def lease_type(room: int) -> Any:
    """The type of a lease: a ctypes array of ``room`` bytes whose destructor gives its memory back to the pool."""
    return type("Lease", (_Returns, ctypes.Array), {"_type_": ctypes.c_char, "_length_": room})


class AlignedPool(ForkSafe[Any]):
    """A pool of page-aligned blocks of memory.

    Args:
        keep: bytes. Idle blocks are kept while all blocks together, in use or idle, have at most so many.
    """

    _may_repeat = False  # a block that is released twice would be given to two tensors

    def __init__(self, keep: int = 0) -> None:
        super().__init__(Order.POOL)
        self.keep = keep
        self._idle: collections.OrderedDict[int, Any] = collections.OrderedDict()  # by number, the oldest first
        self._numbers = 0
        self._blocks: list[weakref.ref[Any]] = []  # all blocks, idle or in use
        self._bytes = 0  # of all blocks
        self._many = 64  # when there are so many of these references, those to freed blocks are removed

    def lease(self, nbytes: int) -> Any:
        """A writable buffer of ``room_for(nbytes)`` bytes, whatever is in them.

        Its memory comes back when neither the buffer nor a tensor over it is in use.

        Raises:
            OSError: when the system has no more memory.
        """
        room = room_for(nbytes)
        with self._lock:
            self._drain_releases()
            number = next((number for number, idle in self._idle.items() if len(idle) == room), None)
            block = self._idle.pop(number) if number is not None else None
            self._shrink(self.keep - (0 if block is not None else room))
            if block is None:
                block = map_block(room)
                self._blocks.append(weakref.ref(block))
                self._bytes += room
        lease = lease_type(len(block)).from_buffer(block)
        lease.give_back = functools.partial(self.release, block)
        return lease

    def trim(self, keep: int) -> None:
        """Keep at most ``keep`` bytes from now on, and give the idle blocks above that back to the system."""
        if self._releases or keep < self.keep:
            with self._lock:
                self.keep = keep
                self._drain_releases()
                self._shrink(keep)
        self.keep = keep

    def clear(self) -> None:
        """Give all idle blocks back to the system."""
        with self._lock:
            self._drain_releases()
            self._shrink(0)

    def _apply_release(self, release: Any) -> None:
        self._numbers += 1
        self._idle[self._numbers] = release

    def _shrink(self, most: int) -> None:
        """Free idle blocks, the oldest first, until all blocks together have at most ``most`` bytes."""
        if len(self._blocks) >= self._many:
            self._count()
        while self._idle and self._bytes > most:
            self._bytes -= len(self._idle.popitem(last=False)[1])

    def _count(self) -> None:
        """Count the blocks and their bytes anew, because an interrupt may have lost a release.

        This is done when their number has doubled: at each lease it would take the square of their number.
        """
        alive = [(reference, block) for reference in self._blocks if (block := reference()) is not None]
        self._blocks, self._bytes = [reference for reference, _ in alive], sum(len(block) for _, block in alive)
        self._many = 2 * len(alive) + 64


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
    nbytes = shape.numel() * dtype.itemsize
    flat = torch.frombuffer(lease, dtype=torch.uint8, count=nbytes, offset=offset)
    return flat.view(dtype).view(shape).data  # `.data`: autograd does not take it for a view of ``flat``


_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory

_view_memory.restype = ctypes.py_object

_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE


def memory_at(address: int, nbytes: int, write: bool = False) -> memoryview:
    """``nbytes`` bytes from ``address`` on, for system calls. This does not keep the memory alive: keep its owner."""
    view: memoryview = _view_memory(address, nbytes, _WRITE if write else _READ)
    return view


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, for system calls; ``Tensor.numpy`` would need an extra dependency.

    The view does not keep the memory alive: keep the tensor.
    """
    return memory_at(tensor.data_ptr(), tensor.nbytes)


_LEFT = 8  # 1/8 of a node's memory is left to others, because page-locked memory cannot be swapped out
_SPARE = (
    1.25  # idle segments are freed if all have more than so many times the most bytes that were ever in use at once
)
_SMALLEST, _LARGEST = 16 << 20, 1 << 30  # bytes of a new segment, unless one tensor has more
_GROWS = 8  # a new segment has at least one part in so many of the bytes of all others
_SEVERAL = 4  # a new segment has room for so many parts, if the others have together, so that little is left at its end
_FINE = 64  # sizes of parts for each power of two: at most 1/64 of a part is unused, and few types of leases are made
_PATIENCE = 10.0  # seconds after which memory is asked to be page-locked again, when that was refused
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device

_ending = threading.Event()

atexit.register(_ending.set)


class Block:
    """Memory at ``address``, as long as this object lives.

    Attributes:
        pinned: whether it is page-locked.
    """

    def __init__(self, memory: Any, address: int, room: int, unpin: Callable[[int], object] | None) -> None:
        self._memory, self.address, self._room, self._unpin = memory, address, room, unpin
        self.process = os.getpid()
        self.pinned = unpin is not None

    def __len__(self) -> int:
        return self._room

    def __del__(
        self,
        _getpid: Callable[[], int] = os.getpid,  # arguments: as Python ends, the module's names may be gone already
        _is_ending: Callable[[], bool] = _ending.is_set,
        _hold: Callable[[Any], None] = ctypes.pythonapi.Py_IncRef,
        _object: Callable[[Any], Any] = ctypes.py_object,
    ) -> None:
        if self.process != _getpid():
            # See [Note: pinned memory]: this address must not be unmapped in a child.
            _hold(_object(self._memory))
        elif self._unpin is not None and not _is_ending():
            self._unpin(self.address)  # must come before unmapping; at the end of the process the system does both


class _Part(Extent):
    """A part of a segment of host memory. It holds the segment."""

    __slots__ = ("segment",)

    segment: _Segment


class _Segment:
    """Host memory that was registered at once, and which parts of it are in use."""

    __slots__ = ("block", "parts")

    def __init__(self, block: Block) -> None:
        self.block, self.parts = block, Extents(len(block))

    def take(self, part: _Part, room: int) -> bool:
        """Let ``part`` be ``room`` bytes of this segment, if it has so many in one piece."""
        part.segment = self  # before it is taken: whoever gives a part back needs it
        return self.parts.take(part, room)


class PinnedPool(ForkSafe[_Part]):
    """Host memory in large segments, page-locked for ``device``. See [Note: segments] and [Note: pinned memory].

    A part of a segment is used again when no tensor lies in it any more: whoever has a device copy to it or from it
    holds such a tensor.

    Args:
        device: an accelerator.
        pin: False for ordinary memory.

    Attributes:
        refused: whether the last new segment could not be page-locked.
        registered: bytes that were taken from the system so far.
    """

    def __init__(self, device: torch.device, pin: bool = True) -> None:
        self.device = device
        self.pin = pin
        self.registered = 0
        self._segments: list[_Segment] = []
        self._peak = 0  # the most bytes that were in use at once when a segment was added
        self.refused, self._ask_again = False, 0.0
        super().__init__(Order.POOL)

    def after_fork(self) -> None:
        """Forget all segments: a child has none of them. See [Note: pinned memory]."""
        self._segments.clear()
        self._releases.clear()
        self._peak = 0

    @property
    def held(self) -> int:
        """Bytes of all segments, in use or idle."""
        with self._lock:
            self._drain_releases()
            return self._total()

    @property
    def in_use(self) -> int:
        """Bytes of all parts that are in use."""
        with self._lock:
            self._drain_releases()
            return self._used()

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in host memory, with any contents.

        Raises:
            OSError: if the system has no more memory.
        """
        return tensor_over(self.lease(shape.numel() * dtype.itemsize), shape, dtype)

    def lease(self, nbytes: int) -> Any:
        """A writable buffer of at least ``nbytes`` bytes. Its destructor gives it back to the pool."""
        room, part = room_for(nbytes, _FINE), _Part()
        try:
            with self._lock:
                self._drain_releases()
                self._find(part, room)
            lease = lease_type(room).from_address(part.segment.block.address + part.offset)
            lease.give_back = functools.partial(self.release, part)
        except BaseException:
            self.release(part)  # this does nothing if the part is not in use
            raise
        return lease

    def clear(self) -> None:
        """Give all idle segments back to the system."""
        with self._lock:
            self._drain_releases()
            self._shrink(0)
            self._peak = self._used()
            self.refused = False  # the freed memory may be enough for the next one

    def _find(self, part: _Part, room: int) -> None:
        """Let ``part`` be ``room`` bytes of a segment; of a new one if all others are too full."""
        for segment in self._segments:
            if (segment.block.pinned or not self.pin) and segment.take(part, room):
                return
        self._peak = max(self._peak, self._used() + room)
        most = int(_SPARE * self._peak)  # bytes of all segments
        held = self._total()
        new = max(_SMALLEST, held // _GROWS, min(_SEVERAL * room, held))
        new = max(room, min(_LARGEST, new) // PAGE * PAGE)
        block = None
        if self.pin and (not self.refused or time.monotonic() >= self._ask_again):
            self._shrink(most - new)
            block = self._pinned(room, new)
        if block is None:
            if any(segment.take(part, room) for segment in self._segments):
                return
            self._shrink(most - new)
            block = mapped_block(new)
        segment = _Segment(block)
        self._segments.append(segment)
        self.registered += len(block)
        segment.take(part, room)

    def _total(self) -> int:
        return sum(len(segment.block) for segment in self._segments)

    def _used(self) -> int:
        return sum(segment.parts.in_use for segment in self._segments)

    def _apply_release(self, release: _Part) -> None:
        if hasattr(release, "segment"):
            release.segment.parts.give(release)  # in a child this may be a segment of the parent, which is forgotten

    def _shrink(self, most: int) -> None:
        """Free idle segments until all together have at most ``most`` bytes: ordinary ones first, then the smallest."""
        idle = [segment for segment in self._segments if not segment.parts.in_use]
        for segment in sorted(idle, key=lambda each: (each.block.pinned, len(each.block))):
            if self._total() <= most:
                return
            self._segments.remove(segment)  # the destructor of its block unlocks and unmaps it

    def _pinned(self, room: int, new: int) -> Block | None:
        """Page-locked memory: ``new`` bytes, or ``room`` if the system does not lock so many; None if not even that."""
        why = ""
        for nbytes in dict.fromkeys((new, room)):
            why = too_little_left(nbytes)
            block = None if why else pinned_block(self.device, nbytes)
            if block is not None:
                self.refused = False
                return block
        if not self.refused:
            warn_unpinned(room, why or f"the driver or the system refused to lock {format_bytes(room)}")
        self.refused, self._ask_again = True, time.monotonic() + _PATIENCE
        return None


@functools.cache
def pool_of(device: torch.device, pin: bool) -> PinnedPool:
    """The pool of this process for ``device``."""
    return PinnedPool(device, pin)


def warn_unpinned(room: int, why: str) -> None:
    """Warn that the host waits for copies from now on, and say what to do."""
    warnings.warn(
        f"no more page-locked memory is available ({why}). Ordinary memory is used, and the host waits for each copy "
        'between it and the device. Give OnCpu a smaller limit= ("64 GiB per node" is shared by the node\'s '
        "processes), raise the limit of locked memory (ulimit -l, or --ulimit memlock=-1 of a container), or set "
        "pin_memory=False if ordinary memory is right for you",
        stacklevel=4,
    )


# -- blocks


def mapped_block(room: int) -> Block:
    """Ordinary memory."""
    memory = map_block(room)
    return Block(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), room, None)


def pinned_block(device: torch.device, room: int) -> Block | None:
    """Page-locked memory, or None if the driver or the system refuses it."""
    if device.type != "cuda":  # torch has no generic function that locks given memory, so its allocator makes the block
        room = 1 << (room - 1).bit_length()  # its allocator takes powers of two from the system
        try:
            memory = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return None
        return Block(memory, memory.data_ptr(), room, _nothing)
    block = mapped_block(room)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        if int(runtime.cudaHostRegister(block.address, room, _PORTABLE)) != 0:
            # The runtime reports the refusal once more, at the next launch on the device: make that launch here.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device).add_(1)
            return None
    with contextlib.suppress(AttributeError, OSError):
        # A child of a fork must not have it. See [Note: pinned memory].
        block._memory.madvise(mmap.MADV_DONTFORK)
    block._unpin, block.pinned = runtime.cudaHostUnregister, True
    return block


def _nothing(address: int) -> None:
    """In place of unlocking: torch's allocator unlocks its memory by itself."""


# -- what the system has


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
