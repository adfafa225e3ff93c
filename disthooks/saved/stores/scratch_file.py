"""A file without a name that holds many tensors, and GPUDirect Storage, which moves tensors of a GPU to it."""

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

from disthooks._fork_safe import ForkSafe, Order, shared_lock
from disthooks._tensors import format_bytes
from disthooks.errors import StoreError
from disthooks.saved.stores.base import ByteBudget
from disthooks.saved.stores.pools import PAGE, AlignedPool, room_for

CHUNK = 8 << 20  # bytes of one system call
_PROBE = 32 << 20  # bytes that are written and read to measure the disk


# [Note: direct I/O]
# The page cache of the system grows by every byte that is written through it, and the limit of a container includes
# the cache. O_DIRECT writes past the cache. Its price is that memory, offset and length have to be multiples of a page:
#
# - Memory comes from pools of aligned blocks, and tensors are padded to whole pages. Torch's own tensors do not begin
#   at a page, so they are copied through an aligned buffer, a chunk at a time.
# - The system may move fewer bytes than it was asked to. A direct call has to begin at a page, so the next one begins
#   at the last whole page that was moved.
# - Some file systems accept the flag and fail later. So a page is written and read back, to find out whether the file
#   system takes such calls. ``why_buffered`` says why a file goes through the cache.

# [Note: blocks of the file]
# Small tensors are written together, each to pages of its own. An extent is used again only when all tensors in it are
# dropped. But a limit counts only tensors that are still there, so the blocks of dropped tensors must not stay. If
# there is a limit, and the file would have more blocks (``st_blocks``) than that, all unused parts become holes: pages
# of dropped tensors in extents that are in use, free extents, and the room that an extent has beyond its tensor.
# Without a limit, and below it, they keep their blocks, because writing over blocks is faster than getting new ones.
#
# A hole in a part that is in use would lose data. So each unused part is listed in one place only. An unused part of
# an extent in use is listed in ``_wasted`` under this extent, until the extent is freed. A free extent is listed in
# ``_unused``, until it is used again or lies beyond the end of the file. Both kinds of releases go through one queue,
# because their order matters.


class Extent(NamedTuple):
    """A place in a file: first byte and number of bytes, both multiples of a page."""

    offset: int
    room: int


class Waste(NamedTuple):
    """Unused pages of an extent in use: ``room`` bytes from byte ``start`` of the extent at ``offset``."""

    offset: int
    start: int
    room: int


class Bandwidth(NamedTuple):
    """The speed of a disk, in bytes a second."""

    write: float
    read: float


class ScratchFile(ForkSafe["Extent | Waste"]):
    """A file without a name, so that nothing is left when its process dies; it knows which of its parts are used.

    Args:
        directory: where the file is.
        direct: whether to write past the page cache: True, False, or ``"auto"`` to do it if it works. See
            [Note: direct I/O].

    Raises:
        StoreError: if no file can be made there, or if ``direct`` is True and does not work there.
    """

    _may_repeat = False  # an extent that is released twice would be given to two tensors

    def __init__(self, directory: str, direct: bool | Literal["auto"]) -> None:
        super().__init__(Order.SCRATCH_FILE)
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
                # This uses O_TMPFILE if the file system has it, and otherwise unlinks the file at once.
                with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                    self._fd = os.dup(file.fileno())
            except OSError as error:
                raise self.error("no file can be made", error, None) from error
        self._fd = _high(self._fd)
        self.measured: Bandwidth | None = None
        self._end = self._size = 0  # bytes: the end of the last extent, and the size of the file
        self._peaks: collections.deque[int] = collections.deque([0], maxlen=8)  # the largest ends of the last steps
        self._free: dict[int, list[int]] = collections.defaultdict(list)  # by room: the offsets of free extents
        self._ends: dict[int, tuple[int, int]] = {}  # by their ends: offset and room of free extents
        self._used = 0  # how many extents are in use
        # See [Note: blocks of the file]. The parts in both may still have blocks.
        self._wasted: collections.defaultdict[int, list[Extent]] = collections.defaultdict(list)  # by extent
        self._unused: dict[int, int] = {}  # by offset: the rooms of free extents
        self._has_holes = False
        #: The budgets whose limits bound the space of this file on the disk, and how many files share each limit.
        self.budgets: weakref.WeakSet[ByteBudget] = weakref.WeakSet()
        self.parts = 1
        self._punches = True  # whether the file system can make holes, as far as is known

    # ``_close`` is an argument because as Python ends, ``os`` may be gone already.
    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        if self._fd >= 0:
            _close(self._fd)

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._fd

    # -- bytes

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of ``memory`` at ``offset``. With direct I/O ``memory`` begins at a page and has whole pages.

        Raises:
            StoreError: if the system does not write all of it.
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
        """Read ``nbytes`` from ``offset`` into ``memory``.

        With direct I/O ``memory`` begins at a page and has whole pages.

        Raises:
            StoreError: if the system does not give all of these bytes.
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
        """How many of the ``count`` bytes that were moved the next call may skip. See [Note: direct I/O]."""
        return count if not self.direct or count >= wanted else count // PAGE * PAGE

    # -- which parts are used

    def allocate(self, nbytes: int) -> Extent:
        """An extent for ``nbytes``: a free one with at most twice the room that is needed, or a new one at the end."""
        room = room_for(nbytes)
        with self._lock:
            self._drain_releases()
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
        """Give unused space back to the file system.

        Args:
            keep_peak: keep the space that the last steps needed.
        """
        with self._lock:
            self._drain_releases()
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
        """Whether the limits leave room for the bytes that ``measure`` writes."""
        most = self._most
        return most is None or self.resident + _PROBE <= most

    @property
    def _most(self) -> int | None:
        """Bytes that the file may take on the disk; None for no limit."""
        limits = [budget.limit for budget in tuple(self.budgets)]
        return sum(limit for limit in limits if limit) // self.parts if limits and None not in limits else None

    def _give_back(self, wanted: int = 0, at_once: bool = False) -> None:
        """Give unused blocks back to the file system, if the file would have more blocks than its limits allow.

        Args:
            wanted: bytes that will be written to places that have no blocks yet.
            at_once: do it whatever the limits are.
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
            self._wasted.clear()  # each is a hole now, or the file system can make none

    def _punch(self, extent: Extent) -> bool:
        """Make ``extent`` a hole. Returns whether it is one now; not every file system can do this."""
        call = _fallocate() if self._punches else None
        done = call is not None and call(self._fd, _PUNCH_HOLE | _KEEP_SIZE, *extent) == 0
        self._punches, self._has_holes = done, self._has_holes or done
        return done

    def _apply_release(self, release: Extent | Waste) -> None:
        if isinstance(release, Waste):
            self._wasted[release.offset].append(Extent(release.offset + release.start, release.room))
            return
        offset, room = release
        self._used -= 1
        self._wasted.pop(offset, None)
        self._unused[offset] = room
        self._free[room].append(offset)
        self._ends[offset + room] = offset, room

    def _drain_releases(self) -> None:
        super()._drain_releases()
        while self._end in self._ends:  # a free extent at the end is cut off
            offset, room = self._ends.pop(self._end)
            self._free[room].remove(offset)
            self._unused.pop(offset, None)
            self._end = offset
        if not self._used and self._peaks[-1]:  # all is free, as after every backward: begin anew at 0
            self._free.clear()
            self._ends.clear()
            self._unused.clear()
            self._wasted.clear()
            self._end = 0
            self._peaks.append(0)

    # -- the speed of the disk

    def measure(self, buffers: AlignedPool) -> Bandwidth:
        """Write and read ``_PROBE`` bytes, and keep the bandwidth in ``measured``; StoreError if that fails."""
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
            self.release(extent)
        self.measured = Bandwidth(_PROBE / (middle - begin), _PROBE / (end - middle))
        return self.measured

    def error(self, what: str, error: OSError | None, wanted: int | None) -> StoreError:
        """A StoreError that says what happened, where, and how much room is left."""
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


_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # flags of fallocate, from linux/falloc.h
_FIRST = 512  # the lowest descriptor for a scratch file


def _high(fd: int) -> int:
    """Move ``fd`` to a descriptor of 512 or more, and return it; ``fd`` itself if the process may have none so high.

    The system gives new files the lowest free number. Code that closes a descriptor twice closes the file that got its
    number meanwhile. On a busy machine with gloo a scratch file was found closed ("Bad file descriptor") two times,
    although nothing in disthooks closes it. So the file gets a number that the system does not give to other code.
    """
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    except OSError:
        return fd
    os.close(fd)
    return high


@functools.cache
def _fallocate() -> Any:
    """The function of the C library, or None if it has none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return found


def _open_direct(directory: str) -> tuple[int, str]:
    """The descriptor of a file past the page cache, or -1 and why there is none. See [Note: direct I/O]."""
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
        why = "a page that was written directly was not read back as it was written"
    except OSError as error:
        why = f"the file system there takes no direct writes ({error.strerror})"
    if fd >= 0:
        os.close(fd)
    return -1, why


_LEAST = 1 << 20  # bytes: kvikio itself moves smaller tensors through host memory
_KINDS = ("cuda",)  # the types of devices that can use it

_INSTALL = "install kvikio-cu12 (or -cu13, as your CUDA is) and NVIDIA's nvidia-fs driver, or leave gpu_direct=False"


class GpuDirect:
    """Scratch files that are opened a second time for GPUs: NVIDIA's GPUDirect Storage, through kvikio.

    kvikio reads and writes in threads of its own, and does not wait for streams. So the host waits before a write until
    the tensor is filled, and before a read until nobody uses the memory any more. Writer and reader hold the memory
    until kvikio is done.

    Raises:
        OSError, RuntimeError, ValueError: what kvikio raises for a file that it cannot move directly.
    """

    def __init__(self, kvikio: Any, files: Sequence[ScratchFile]) -> None:
        # With "OFF", kvikio raises an error where it would otherwise go through host memory without a word.
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
            # The files have no names, so they are opened by their descriptors.
            self._files = {file: kvikio.CuFile(f"/proc/self/fd/{file.fileno()}", "r+") for file in files}

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which is contiguous, can go this way: it has whole pages, and is large enough."""
        return tensor.device.type in _KINDS and tensor.nbytes >= _LEAST and tensor.nbytes % PAGE == 0

    def write(self, file: ScratchFile, tensor: torch.Tensor, offset: int) -> None:
        """Write ``tensor``, which is filled, at ``offset``, and wait for that.

        Raises:
            StoreError: if not all of it is written.
        """
        self._move(file, "pwrite", "written", tensor, offset)

    def read(self, file: ScratchFile, tensor: torch.Tensor, offset: int) -> None:
        """Fill ``tensor``, whose memory the device does not use, from ``offset``, and wait for that.

        Raises:
            StoreError: if not all of it is there.
        """
        self._move(file, "pread", "read", tensor, offset)

    def _move(self, file: ScratchFile, call: str, done: str, tensor: torch.Tensor, offset: int) -> None:
        data = tensor.detach().view(-1).view(torch.uint8)  # bytes, because kvikio does not know every dtype of torch
        what = f"{tensor.nbytes} bytes could not be {done} by GPUDirect Storage"
        try:
            moved = getattr(self._files[file], call)(data, tensor.nbytes, offset).get()
        except OSError as error:
            raise file.error(what, error, tensor.nbytes) from error
        except (RuntimeError, ValueError) as error:
            raise file.error(f"{what} ({error})", None, tensor.nbytes) from error
        if moved != tensor.nbytes:
            raise file.error(f"{what}: only {moved} bytes were {done}", None, tensor.nbytes)


def opened(files: Sequence[ScratchFile], checksum: bool) -> tuple[GpuDirect | None, str]:
    """GPUDirect Storage for all of ``files``, or why it cannot be used."""
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
    except Exception as error:  # on a machine that it does not fit, a driver may raise anything
        return None, f"kvikio cannot move files of {', '.join(file.directory for file in files)}: {error}"
    return found, ""


def _kvikio() -> tuple[Any, str]:
    """kvikio, or why it cannot be used."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None, "there is no NVIDIA GPU"
    try:
        kvikio: Any = importlib.import_module("kvikio")
        driver: Any = importlib.import_module("kvikio.cufile_driver")
        importlib.import_module("kvikio.defaults")  # kvikio itself does not import it
    except Exception as error:  # a shared library that does not load raises other errors than ImportError
        return None, f"kvikio cannot be imported ({error}): {_INSTALL}"
    try:
        there = driver.get("is_gds_available") if hasattr(driver, "get") else driver.properties.is_gds_available
    except Exception as error:
        return None, f"the cuFile driver does not start ({error}): {_INSTALL}"
    return (kvikio, "") if there else (None, f"kvikio says that GPUDirect Storage is not available: {_INSTALL}")


def _probe(direct: GpuDirect, files: Sequence[ScratchFile]) -> None:
    """Write a little to each file and read it back; RuntimeError if other bytes come back."""
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
            file.release(extent)
        if not torch.equal(there, back):
            raise RuntimeError(f"the bytes read from {file.directory} are not those that were written")


_files: weakref.WeakValueDictionary[Any, ScratchFile] = weakref.WeakValueDictionary()


def file_in(directory: str, direct: bool | Literal["auto"]) -> ScratchFile:
    """The file of this process in ``directory``."""
    key = os.path.realpath(directory), os.getpid(), direct
    found = _files.get(key)
    if found is None:
        found = _files[key] = ScratchFile(directory, direct)
    return found


class GpuDirectWay:
    """GPUDirect Storage for ``files``, opened when it is first needed.

    Args:
        files: the files; it is used only if it works for all of them.
        checksum: whether the host has to read every byte, for a checksum.
        wanted: True: it has to work. False: it is not used. ``"auto"``: it is used if it works.

    Attributes:
        why_staged: why it cannot be used; empty if it can, or if ``wanted`` is False.

    Raises:
        StoreError: at once, if it has to work and does not.
    """

    def __init__(self, files: Sequence[ScratchFile], checksum: bool, wanted: bool | Literal["auto"]) -> None:
        self._files, self._checksum, self._lock = files, checksum, shared_lock(Order.WAY)
        self._looked = wanted is False
        self._found: GpuDirect | None = None
        self.why_staged = ""
        if wanted is True and self() is None:
            what = f"OnDisk({files[0].directory!r}): gpu_direct=True, but {self.why_staged}"
            raise StoreError(what, path=files[0].directory)

    def __call__(self) -> GpuDirect | None:
        """GPUDirect Storage for these files, or None if it cannot be used."""
        if not self._looked:
            with self._lock:
                if not self._looked:
                    self._found, self.why_staged = opened(self._files, self._checksum)
                    self._looked = True
        return self._found
