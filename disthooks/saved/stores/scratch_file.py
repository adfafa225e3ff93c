"""One anonymous file that many tensors lie in.

Between a GPU's memory and a disk, past the host's: GPUDirect Storage, through kvikio.

kvikio's reads and writes happen on the host's schedule, in threads of its own, whatever the streams are at. So who
writes waits on the host until the tensor is filled, who reads until the memory is nobody's any more, and both hold it
until the future is done. That is done in the threads of a mover.

A device's tensors on their way to a disk and back: through pinned memory, beside the computation.

Everything is ordered by events. The link holds what a copy reads and writes until the device has said that it is done,
whoever lets go of it before.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import functools
import importlib
import itertools
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from disthooks._fork_safe import Order, shared
from disthooks._streams import current_stream, event_on, handed_over, on
from disthooks._tensors import format_bytes
from disthooks.errors import StoreError
from disthooks.saved.stores.base import ByteBudget
from disthooks.saved.stores.pools import PAGE, AlignedPool, pool_of, room_for, tensor_over
from disthooks.saved.stores.transfer import Coming, Outgoing, link_of

CHUNK = 8 << 20  # bytes of one system call
_PROBE = 32 << 20


# [Note: blocks of the file]
# Small tensors are written together, each to pages of its own. An extent is used again when all tensors in it are
# gone, but a limit counts the tensors that are there: one of them must not keep the blocks of the others. So where
# there is a limit, and the file would have more blocks than that, all parts that nobody uses become holes: pages of
# dropped tensors in extents that are in use, free extents, and what an extent has beyond its tensor. Without a limit,
# and below it, they keep their blocks, because to write over blocks is faster than to get new ones. What is compared
# is ``st_blocks``.
#
# A hole in what is in use would lose data. So each part is known in one way only: that of an extent in use by its
# extent, and it is forgotten when the extent is freed; a free extent until it is used again, or is beyond the end.
# What is wasted and what is freed goes through one queue, because the order of the two matters.


class Extent(NamedTuple):
    """A place in the file of a file: first byte and number of bytes, both multiples of a page."""

    offset: int
    room: int


class Waste(NamedTuple):
    """``room`` bytes at ``start`` of the extent at ``offset``, whole pages: nobody uses them."""

    offset: int
    start: int
    room: int


class Bandwidth(NamedTuple):
    """Bytes a second."""

    write: float
    read: float


class ScratchFile:
    """One file without a name, so that nothing is left when its process dies, and who has which part of it.

    Args:
        directory: where the file lives.
        direct: past the page cache of the system: True, False, or ``"auto"`` for where it works.

    Raises:
        StoreError: when no file can be made there, or ``direct`` is True and does not work there.
    """

    def __init__(self, directory: str, direct: bool | Literal["auto"]) -> None:
        self.directory = directory
        self.process = os.getpid()
        self.why_buffered = "direct=False"
        self._fd = -1
        if direct:
            self._fd, self.why_buffered = _open_direct(directory)
            if self._fd < 0 and direct is True:
                raise self.error(f"direct=True, but {self.why_buffered}", None, None)
        self.direct = self._fd >= 0
        if not self.direct:
            try:
                # O_TMPFILE where the file system has it, otherwise unlinked at birth.
                with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                    self._fd = os.dup(file.fileno())
            except OSError as error:
                raise self.error("no file can be made", error, None) from error
        self._fd = _high(self._fd)
        self.measured: Bandwidth | None = None
        self._end = self._size = 0
        self._peaks: collections.deque[int] = collections.deque([0], maxlen=8)
        self._free: dict[int, list[int]] = collections.defaultdict(list)  # offsets by room
        self._ends: dict[int, tuple[int, int]] = {}  # free extents by where they end: offset and room
        self._freed: collections.deque[Extent | Waste] = collections.deque()
        #: Let an extent be used again. A C function: safe in a destructor, and nothing interrupts it.
        self.free: Callable[[Extent], None] = self._freed.append
        self._used = 0  # extents in use
        #: Part of an extent in use is not needed any more. A C function, as ``free``.
        self.waste: Callable[[Waste], None] = self._freed.append
        # See [Note: blocks of the file]. Both may have blocks.
        self._wasted: collections.defaultdict[int, list[Extent]] = collections.defaultdict(list)  # by their extent
        self._unused: dict[int, int] = {}  # rooms of free extents, by offset
        self._has_holes = False
        #: Those whose limits bound what the file takes on the disk, each on so many files (``parts``).
        self.budgets: weakref.WeakSet[ByteBudget] = weakref.WeakSet()
        self.parts = 1
        self._punches = True  # whether the file system can
        self._lock = shared(Order.SCRATCH_FILE)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # as Python ends, ``os`` may be gone before
        if self._fd >= 0:
            _close(self._fd)

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._fd

    # -- bytes

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of ``memory`` (direct: page-aligned, whole pages) at ``offset``.

        Raises:
            StoreError: when the system does not take it.
        """
        done, nbytes = 0, memory.nbytes
        while done < nbytes:
            try:
                count = os.pwrite(self._fd, memory[done : done + CHUNK], offset + done)
            except OSError as error:
                raise self.error(f"{format_bytes(nbytes)} could not be written", error, nbytes) from error
            taken = self._whole(count, nbytes - done)
            if taken == 0:
                raise self.error(f"{format_bytes(nbytes)} could not be written: nothing was taken", None, nbytes)
            done += taken

    def read(self, memory: memoryview, offset: int, nbytes: int) -> None:
        """Fill ``memory`` (direct: page-aligned, whole pages), of which ``nbytes`` count, from ``offset``.

        Raises:
            StoreError: rather than ever a byte that was not written.
        """
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [memory[done : done + CHUNK]], offset + done)
            except OSError as error:
                raise self.error(f"{format_bytes(nbytes)} could not be read", error, nbytes) from error
            given = self._whole(count, nbytes - done)
            if given == 0:
                raise self.error(f"the file ends {format_bytes(nbytes - done)} too soon", None, nbytes)
            done += given

    def _whole(self, count: int, wanted: int) -> int:
        """What of ``count`` bytes moved is good to go on from: a direct call has to begin at a page."""
        return count if not self.direct or count >= wanted else count // PAGE * PAGE

    # -- who has which part

    def allocate(self, nbytes: int) -> Extent:
        """An extent for ``nbytes``: one that is free, of that room or up to twice it, or else at the end."""
        room = room_for(nbytes)
        with self._lock:
            self._settle()
            self._used += 1
            fitting = [size for size, offsets in self._free.items() if offsets and room <= size <= 2 * room]
            if fitting:
                room = min(fitting)
                offset = self._free[room].pop()
                del self._ends[offset + room]
                grows = self._unused.pop(offset, None) is None
            else:
                offset, self._end = self._end, self._end + room
                grows = self._has_holes or self._end > self._size
                self._size = max(self._size, self._end)
                self._peaks[-1] = max(self._peaks[-1], self._end)
            pages = -(-nbytes // PAGE) * PAGE
            if pages < room:
                self._wasted[offset].append(Extent(offset + pages, room - pages))
            self._give_back(pages if grows else 0)
            return Extent(offset, room)

    def shrink(self, keep_peak: bool) -> None:
        """Give space back to the file system: all that is unused, or what the last few steps did not need either."""
        with self._lock:
            self._settle()
            wanted = max(self._end, *self._peaks) if keep_peak else self._end
            if self._size > (2 * wanted if keep_peak else wanted) and self.process == os.getpid():
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, wanted)
                    self._size = wanted
            self._give_back(at_once=not keep_peak)

    @property
    def resident(self) -> int:
        """Bytes that the file takes on the disk."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def may_be_measured(self) -> bool:
        """Whether a limit leaves room for what that writes."""
        most = self._most
        return most is None or self.resident + _PROBE <= most

    @property
    def _most(self) -> int | None:
        """Bytes that it may take there; None for any number."""
        limits = [budget.limit for budget in tuple(self.budgets)]
        return sum(limit for limit in limits if limit) // self.parts if limits and None not in limits else None

    def _give_back(self, wanted: int = 0, at_once: bool = False) -> None:
        """Give blocks that nobody uses back to the file system: ``at_once``, or if there would be too many.

        Args:
            wanted: bytes that will be written to where no blocks are.
            at_once: whatever the limit is.
        """
        if self.process != os.getpid():
            return
        most = self._most
        if not at_once and (most is None or self.resident + wanted <= most):
            return
        with contextlib.suppress(OSError):
            if self._size > self._end:
                os.ftruncate(self._fd, self._end)
                self._size = self._end
        for offset, room in list(self._unused.items()) if self._punches else []:
            if self._punch(Extent(offset, room)):
                del self._unused[offset]
        if self._punches:
            for part in itertools.chain.from_iterable(self._wasted.values()):
                self._punch(part)
            self._wasted.clear()  # each is a hole now; where there are no holes it is asked no more

    def _punch(self, extent: Extent) -> bool:
        """Whether ``extent`` is a hole now; not every file system can."""
        call = _fallocate() if self._punches else None
        done = call is not None and call(self._fd, _PUNCH_HOLE | _KEEP_SIZE, *extent) == 0
        self._punches, self._has_holes = done, self._has_holes or done
        return done

    def _settle(self) -> None:
        while self._freed:
            found = self._freed.popleft()
            if isinstance(found, Waste):
                self._wasted[found.offset].append(Extent(found.offset + found.start, found.room))
                continue
            offset, room = found
            self._used -= 1
            self._wasted.pop(offset, None)
            self._unused[offset] = room
            self._free[room].append(offset)
            self._ends[offset + room] = offset, room
        while self._end in self._ends:  # what is free at the end is no part of the file any more
            offset, room = self._ends.pop(self._end)
            self._free[room].remove(offset)
            self._unused.pop(offset, None)
            self._end = offset
        if not self._used and self._peaks[-1]:  # as after every backward
            self._free.clear()
            self._ends.clear()
            self._unused.clear()
            self._wasted.clear()
            self._end = 0
            self._peaks.append(0)

    # -- what the disk gives

    def measure(self, buffers: AlignedPool) -> Bandwidth:
        """Write and read ``_PROBE`` bytes, and keep what that gave in ``measured``; StoreError when it cannot."""
        lease = buffers.lease(CHUNK)
        extent = self.allocate(_PROBE)
        memory = memoryview(lease).cast("B")[:CHUNK]
        try:
            begin = time.perf_counter()
            for offset in range(0, _PROBE, CHUNK):
                self.write(memory, extent.offset + offset)
            middle = time.perf_counter()
            for offset in range(0, _PROBE, CHUNK):
                self.read(memory, extent.offset + offset, CHUNK)
            end = time.perf_counter()
        finally:
            self.free(extent)
        self.measured = Bandwidth(_PROBE / (middle - begin), _PROBE / (end - middle))
        return self.measured

    def error(self, what: str, error: OSError | None, wanted: int | None) -> StoreError:
        """A StoreError that says what happened, where, and how much room there is."""
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


_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # of linux/falloc.h
_FIRST = 512


def _high(fd: int) -> int:
    """The file of ``fd`` under a descriptor of 512 or more; ``fd`` itself where the process may have none so high.

    The system gives the lowest number that is free. Code that closes a descriptor twice closes whatever got its number
    meanwhile. On a busy machine with gloo the file of a file was found closed ("Bad file descriptor") two times, and
    nothing in disthooks closes it. So the file has a number that other code is not given.
    """
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    except OSError:
        return fd
    os.close(fd)
    return high


@functools.cache
def _fallocate() -> Any:
    """The C library's, or None where there is none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return found


def _open_direct(directory: str) -> tuple[int, str]:
    """A file past the page cache, or -1 and why there is none: a page is written and read to see."""
    flags = getattr(os, "O_DIRECT", 0), getattr(os, "O_TMPFILE", 0)
    if not all(flags):
        return -1, "this system has no O_DIRECT"
    fd = -1
    try:
        fd = os.open(directory, os.O_RDWR | os.O_CLOEXEC | flags[0] | flags[1], 0o600)
        with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            page[:6] = b"probed"
            if os.pwrite(fd, page, 0) == PAGE and os.preadv(fd, [page], 0) == PAGE and page[:6] == b"probed":
                os.ftruncate(fd, 0)
                return fd, ""
        why = "what was written directly did not come back"
    except OSError as error:
        why = f"the file system there takes no direct writes ({error.strerror})"
    if fd >= 0:
        os.close(fd)
    return -1, why


_LEAST = 1 << 20  # bytes: kvikio moves smaller ones through host memory by itself
_KINDS = ("cuda",)  # of devices
_INSTALL = "install kvikio-cu12 (or -cu13, as your CUDA is) and NVIDIA's nvidia-fs driver, or leave gpu_direct=False"


class GpuDirect:
    """The files of ``files``, opened once more for GPUs.

    Raises:
        OSError, RuntimeError, ValueError: what kvikio raises for a file that it cannot move directly.
    """

    def __init__(self, kvikio: Any, files: Sequence[ScratchFile]) -> None:
        # "OFF": an error where it would otherwise go through host memory, silently.
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
            # By their descriptors: they have no names.
            self._files = {file: kvikio.CuFile(f"/proc/self/fd/{file.fileno()}", "r+") for file in files}

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, contiguous, goes this way: whole pages, and enough of them to be worth it."""
        return tensor.device.type in _KINDS and tensor.nbytes >= _LEAST and tensor.nbytes % PAGE == 0

    def write(self, file: ScratchFile, tensor: torch.Tensor, offset: int) -> None:
        """Write ``tensor``, which is filled, at ``offset``, and wait for it.

        Raises:
            StoreError: when it is not all written.
        """
        self._move(file, "pwrite", "written", tensor, offset)

    def read(self, file: ScratchFile, tensor: torch.Tensor, offset: int) -> None:
        """Fill ``tensor``, which the device is done with, from ``offset``, and wait for it.

        Raises:
            StoreError: when not all of it is there.
        """
        self._move(file, "pread", "read", tensor, offset)

    def _move(self, file: ScratchFile, call: str, done: str, tensor: torch.Tensor, offset: int) -> None:
        data = tensor.detach().view(-1).view(torch.uint8)  # bits: it does not know every dtype of torch
        what = f"{tensor.nbytes} bytes could not be {done} by GPUDirect Storage"
        try:
            moved = getattr(self._files[file], call)(data, tensor.nbytes, offset).get()
        except OSError as error:
            raise file.error(what, error, tensor.nbytes) from error
        except (RuntimeError, ValueError) as error:
            raise file.error(f"{what} ({error})", None, tensor.nbytes) from error
        if moved != tensor.nbytes:
            raise file.error(f"{what}: only {moved} were", None, tensor.nbytes)


def opened(files: Sequence[ScratchFile], checksum: bool) -> tuple[GpuDirect | None, str]:
    """The way past the host for all of ``files``, or why there is none."""
    if checksum:
        return None, "checksum=True reads every byte on the host"
    buffered = next((file for file in files if not file.direct), None)
    if buffered is not None:
        return None, f"{buffered.directory} is written through the page cache: {buffered.why_buffered}"
    kvikio, why = _kvikio()
    if kvikio is None:
        return None, why
    try:
        found = GpuDirect(kvikio, files)
        _probe(found, files)
    except Exception as error:  # whatever a driver raises on a machine that it does not fit
        return None, f"kvikio cannot move files of {', '.join(file.directory for file in files)}: {error}"
    return found, ""


def _kvikio() -> tuple[Any, str]:
    """kvikio, or why it cannot be used."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None, "there is no NVIDIA GPU"
    try:
        kvikio: Any = importlib.import_module("kvikio")
        driver: Any = importlib.import_module("kvikio.cufile_driver")
        importlib.import_module("kvikio.defaults")  # kvikio itself does not: it would not be there
    except Exception as error:  # also a library that does not load
        return None, f"kvikio cannot be imported ({error}): {_INSTALL}"
    try:
        there = driver.get("is_gds_available") if hasattr(driver, "get") else driver.properties.is_gds_available
    except Exception as error:
        return None, f"the cuFile driver does not start ({error}): {_INSTALL}"
    return (kvikio, "") if there else (None, f"kvikio says that GPUDirect Storage is not available: {_INSTALL}")


def _probe(direct: GpuDirect, files: Sequence[ScratchFile]) -> None:
    """Write and read a little of each file, to see that what comes back is what was written."""
    device = torch.accelerator.current_accelerator()
    there = torch.arange(_LEAST // 8, device=device)
    for file in files:
        back = torch.zeros_like(there)
        torch.accelerator.synchronize()
        extent = file.allocate(there.nbytes)
        try:
            direct.write(file, there, extent.offset)
            direct.read(file, back, extent.offset)
        finally:
            file.free(extent)
        if not torch.equal(there, back):
            raise RuntimeError("what was written did not come back")


class Incoming:
    """What was read for a device, on its way there.

    Attributes:
        coming: its copy on the device, in memory of the stream that the tensor was put on.
    """

    __slots__ = ("__weakref__", "coming")

    def __init__(self, coming: Coming) -> None:
        self.coming = coming

    @property
    def device_bytes(self) -> int:
        """Bytes there that nobody has taken."""
        return 0 if self.coming.tensor is None else self.coming.host.nbytes


class _Read(Outgoing):
    """Host memory that is filled already, for a link to bring."""

    __slots__ = ()

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self.device, self.host, self.rate, self.source = device, host, None, None
        self.done = event_on(current_stream(device))  # a link that brings it waits for this anyway


def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that ``device`` reads and writes beside the host: ``uint8``, whole pages from a page's beginning on.

    Raises:
        OSError: when the system has no more memory.
    """
    pool = pool_of(device, True)
    lease = pool.lease(nbytes)
    begin = -ctypes.addressof(lease) % PAGE
    if begin:  # not every system's pinned memory begins at a page
        lease = pool.lease(nbytes + PAGE)
        begin = -ctypes.addressof(lease) % PAGE
    return tensor_over(lease, torch.Size([(len(lease) - begin) // PAGE * PAGE]), torch.uint8, begin)


def shaped(block: torch.Tensor, shape: torch.Size, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A contiguous tensor at byte ``offset`` of ``block``.

    >>> shaped(torch.arange(8, dtype=torch.uint8), torch.Size([2]), torch.uint8, offset=4)
    tensor([4, 5], dtype=torch.uint8)
    """
    return block[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def sent(tensor: torch.Tensor) -> Outgoing:
    """Begin to copy ``tensor``, contiguous and of some bytes, into pinned pages, in the order of the current stream.

    Raises:
        OSError: when the system has no more memory.
    """
    host = shaped(pinned(tensor.nbytes, tensor.device), tensor.shape, tensor.dtype)
    return link_of(tensor.device).send(tensor, host)


def arriving(host: torch.Tensor, stream: torch.Stream) -> Incoming:
    """Begin to copy ``host``, which is filled, to the device of ``stream``, into memory of that stream."""
    with on(stream):
        return Incoming(link_of(stream.device).bring(_Read(host, stream.device)))


def brought(host: torch.Tensor, device: torch.device, outgoing: Outgoing | None) -> torch.Tensor:
    """A copy of ``host`` on ``device`` for the current stream; ``outgoing`` may be filling it still."""
    link = link_of(device)
    return link.take(link.bring(_Read(host, device) if outgoing is None else outgoing))


def taken(incoming: Incoming, device: torch.device) -> torch.Tensor:
    """The copy of ``incoming`` for the current stream."""
    return link_of(device).take(incoming.coming)


def source_of(outgoing: Outgoing | None, made_on: torch.Stream) -> torch.Tensor | None:
    """What ``outgoing`` copies, as long as it is held, for the current stream."""
    source = None if outgoing is None else outgoing.source
    return None if source is None else handed_over(source, made_on)


def let_go(outgoing: Outgoing | None) -> None:
    """``outgoing`` is not wanted any more: its source goes at once if it is copied, or when the link is next used.

    It takes no lock and waits for nothing, for destructors.
    """
    if outgoing is not None and outgoing.is_done():
        outgoing.source = None
