"""A model of torch's caching allocator for CUDA: from the births and deaths of tensors to the memory that is reserved.

It needs no GPU and no torch. ``simulate`` takes the events of a step and gives the two numbers that torch would show on
a GPU, ``max_memory_allocated()`` and ``max_memory_reserved()``, and says whether the step fits.
"""

# [Note: what is modelled]
# The rules are those of `c10/cuda/CUDACachingAllocator.cpp`, read at pytorch commit 001074d25084 and compared with the
# constants in the headers of torch 2.13 (`c10/core/AllocatorConfig.h`), which are the same. For one stream:
#
# - A request is rounded up to a multiple of 512 bytes. Requests up to 1 MiB use the small pool, others the large pool.
# - A request takes the smallest free block of its pool that is large enough, and of equal blocks the lowest address.
# - The block is split if the rest is at least 512 bytes (small pool) or more than 1 MiB (large pool). If it is not
#   split, the whole block counts as allocated. So `max_memory_allocated` may exceed the sum of the rounded sizes, by up
#   to 1 MiB for each tensor in the large pool.
# - If no block is large enough, a segment is made: 2 MiB for the small pool; 20 MiB for less than 10 MiB; otherwise the
#   request, rounded up to 2 MiB.
# - A freed block is joined with its free neighbours of the same segment.
# - If the driver has no memory left, all segments that are entirely free go back to it, and the request is made again.
#   If that does not help, torch raises OutOfMemoryError.
#
# [Note: what is left out]
# - Several streams. Each stream has pools of its own, and `record_stream` delays a free until an event has happened.
#   An engine with streams of its own (FSDP) reserves more than is said here.
# - The pools of CUDA graphs and `torch.cuda.MemPool`.
# - The settings `max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`,
#   `max_non_split_rounding_mb`, `large_segment_size_mb`, and `backend:cudaMallocAsync`. All of them are off by default.
# - The addresses that the driver gives. Here a later segment has a higher address. It matters only for the choice
#   between free blocks of equal size.
# - What does not come from this allocator: the CUDA context, NCCL's buffers, other processes.
# - `expandable_segments:True`, with which less is reserved: memory lies in one range of addresses for each pool.

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from disthooks.predict.recording.record import StepRecord

MiB = 1 << 20
#: The unit to which sizes are rounded, in bytes.
MIN_BLOCK = 512
#: The largest request that uses the small pool, in bytes.
SMALL_REQUEST = MiB
#: The size of a segment of the small pool, in bytes.
SMALL_SEGMENT = 2 * MiB
#: The size of a segment of the large pool for requests below :data:`LARGE_REQUEST`, in bytes.
LARGE_SEGMENT = 20 * MiB
#: From this size on a request has a segment of its own, in bytes.
LARGE_REQUEST = 10 * MiB
#: The unit to which segments of :data:`LARGE_REQUEST` and more are rounded, in bytes.
ROUND_LARGE = 2 * MiB


def round_up(nbytes: int) -> int:
    """The bytes of a block for a tensor of ``nbytes`` bytes; 0 for a tensor without elements.

    >>> round_up(1), round_up(512), round_up(1_000_000), round_up(0)
    (512, 512, 1000448, 0)
    """
    return (nbytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def segment_bytes(nbytes: int) -> int:
    """The bytes that torch asks the driver for, if it has no free block for ``nbytes`` bytes."""
    if nbytes <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if nbytes < LARGE_REQUEST:
        return LARGE_SEGMENT
    return (nbytes + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


class OutOfMemory(Exception):
    """The request does not fit under the limit, even after all cached memory went back to the driver."""


class AllocatorReport(NamedTuple):
    """What the allocator did with the events of a step, up to a request that did not fit: peaks in bytes.

    ``requested_peak`` is the largest sum of the sizes that were asked for, without any rounding.
    """

    allocated_peak: int
    reserved_peak: int
    requested_peak: int
    fits: bool


class Block:
    """A range of addresses of one segment; ``before`` and ``after`` are its neighbours there."""

    __slots__ = ("address", "after", "before", "is_free", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.is_free = True
        self.before: Block | None = None
        self.after: Block | None = None

    def cut(self, size: int) -> Block:
        """Cut the first ``size`` bytes off this block, and return them as a new block before it."""
        front = Block(self.address, size, self.pool)
        front.before, front.after = self.before, self
        if front.before is not None:
            front.before.after = front
        self.before = front
        self.address += size
        self.size -= size
        return front

    def absorb(self, other: Block) -> None:
        """Take over the addresses of ``other``, a neighbour that stands in no pool."""
        if other is self.before:
            self.address = other.address
            self.before = other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size


class _Pool:
    """The free blocks of the small or of the large pool, by size and address."""

    __slots__ = ("free", "least_rest")

    def __init__(self, least_rest: int) -> None:
        self.least_rest = least_rest  # a block is split if at least this many bytes remain
        self.free: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        bisect.insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]

    def join(self, block: Block) -> None:
        """Join ``block`` with its free neighbours; their own entries go away."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self.remove(neighbour)
                block.absorb(neighbour)


class CachingAllocator:
    """The allocator of one device and one stream. See [Note: what is modelled] and [Note: what is left out]."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = self.reserved = 0
        self._small, self._large = _Pool(MIN_BLOCK), _Pool(SMALL_REQUEST + 1)
        self._next_address = 0

    def allocate(self, nbytes: int) -> Block:
        """Find or make a block for ``nbytes`` bytes, which must be positive."""
        size = round_up(nbytes)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._cached_block(pool, size) or self._new_block(pool, size)
        if block is None:
            self.empty_cache()
            block = self._new_block(pool, size)
            if block is None:
                raise OutOfMemory(f"{nbytes} bytes do not fit: {self.reserved} of {self.limit} bytes are reserved")
        if block.size - size >= pool.least_rest:
            rest, block = block, block.cut(size)
            pool.add(rest)
        block.is_free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        pool = block.pool
        self.allocated -= block.size
        block.is_free = True
        pool.join(block)
        pool.add(block)

    def empty_cache(self) -> None:
        """Give the driver all segments that are entirely free."""
        for pool in (self._large, self._small):
            whole = [entry for entry in pool.free if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            if whole:
                pool.free = [entry for entry in pool.free if entry[2].before is not None or entry[2].after is not None]

    def _cached_block(self, pool: _Pool, size: int) -> Block | None:
        free = pool.free
        i = bisect.bisect_left(free, (size,))
        return None if i == len(free) else free.pop(i)[2]

    def _new_block(self, pool: _Pool, size: int) -> Block | None:
        segment = segment_bytes(size)
        if self.limit is not None and self.reserved + segment > self.limit:
            return None
        self.reserved += segment
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        return block


def events_of(record: StepRecord) -> list[tuple[int, int]]:
    """The births and deaths of a recorded step on the device, as :func:`simulate` takes them.

    A storage that is resized dies and is born again, which is how torch does it.
    """
    events: list[tuple[int, int]] = []
    sizes: dict[int, int] = {}
    for _, allocation, nbytes in record.changes:
        if record.allocations[allocation].device != "device":
            continue
        before = sizes.get(allocation, 0)
        sizes[allocation] = after = before + nbytes
        if before:
            events.append((allocation, 0))
        if after:
            events.append((allocation, after))
    return events


def simulate(events: Iterable[tuple[int, int]], limit: int | None = None) -> AllocatorReport:
    """Follow births and deaths of tensors through torch's caching allocator.

    An event is ``(serial, nbytes)`` for the birth of a storage, and ``(serial, 0)`` for its death. ``limit`` is the
    bytes that the driver can give to torch.

    >>> MiB = 2**20
    >>> simulate([(1, 3 * MiB), (2, 3 * MiB), (1, 0), (3, 16 * MiB), (2, 0)]).reserved_peak // MiB
    36
    >>> simulate([(1, 30 * MiB), (2, 30 * MiB)], limit=50 * MiB).fits
    False
    """
    allocator, fits = CachingAllocator(limit), True
    alive: dict[int, tuple[Block, int]] = {}
    allocated_peak = reserved_peak = requested = requested_peak = 0
    for serial, nbytes in events:
        if nbytes == 0:
            if serial in alive:
                block, size = alive.pop(serial)
                allocator.free(block)
                requested -= size
            continue
        try:
            alive[serial] = allocator.allocate(nbytes), nbytes
        except OutOfMemory:
            fits = False
            break
        requested += nbytes
        requested_peak = max(requested_peak, requested)
        reserved_peak = max(reserved_peak, allocator.reserved)
        allocated_peak = max(allocated_peak, allocator.allocated)
    return AllocatorReport(allocated_peak, reserved_peak, requested_peak, fits)


def least_limit(events: Sequence[tuple[int, int]], report: AllocatorReport) -> int:
    """The least memory in which the allocator meets every request, in bytes: not less, and larger by at most 0.5%.

    It lies between the peak of the blocks in use and that of the memory taken from the driver, because the allocator
    gives cached memory back before it fails.
    """
    low, high = report.allocated_peak, report.reserved_peak
    if simulate(events, low).fits:
        return low
    while high - low > 0.005 * high:
        middle = (low + high) // 2
        low, high = (low, middle) if simulate(events, middle).fits else (middle, high)
    return high
