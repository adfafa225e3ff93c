"""A file without a name that holds many tensors."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from disthooks._locks import Shared
from disthooks._tensors import format_bytes
from disthooks.errors import StoreError
from disthooks.saved.stores.base import ByteBudget
from disthooks.saved.stores.extents import Extent, Extents
from disthooks.saved.stores.host import PAGE

CHUNK = 8 << 20  # bytes of one system call


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
# there is a limit, and the file would have more blocks (``st_blocks``) than that, all unused parts become holes: the
# free parts of the file, and the pages of dropped tensors in extents that are in use (``_wasted``). Without a limit,
# and below it, they keep their blocks, because writing over blocks is faster than getting new ones.
#
# A hole in a part that is in use would lose data. So the wasted parts of an extent are forgotten when it is freed.

_ENDLESS = 1 << 62  # bytes: the file has no end, as far as its parts are concerned


class Waste(NamedTuple):
    """Unused pages of an extent in use: ``room`` bytes from byte ``start`` of it."""

    extent: Extent
    start: int
    room: int


class _Descriptor:
    """An open file. This object has the destructor, so that the scratch file needs none.

    While a destructor runs, Python lets other threads find the dying object again (decision 13): they would write to a
    file that is being closed, or to another file that has its number by then.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    # ``_close`` is an argument because as Python ends, ``os`` may be gone already.
    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        _close(self.number)


class ScratchFile(Shared["Extent | Waste"]):
    """A file without a name, so that nothing is left when its process dies; it knows which of its parts are used.

    Args:
        directory: where the file is.
        direct: whether to write past the page cache: True, False, or ``"auto"`` to do it if it works. See
            [Note: direct I/O].

    Raises:
        StoreError: if no file can be made there, or if ``direct`` is True and does not work there.
    """

    def __init__(self, directory: str, direct: bool | Literal["auto"]) -> None:
        super().__init__()
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
        self._descriptor = _Descriptor(self._fd)
        self._parts = Extents(_ENDLESS)
        self._size = 0  # bytes of the file
        self._peaks: collections.deque[int] = collections.deque([0], maxlen=8)  # the largest ends of the last steps
        # See [Note: blocks of the file].
        self._wasted: dict[Extent, list[tuple[int, int]]] = {}  # by extent: begins and ends that may still have blocks
        self._holes: set[tuple[int, int]] = set()  # free parts that have none
        self._has_holes = False
        #: The budgets whose limits bound the space of this file on the disk.
        self.budgets: weakref.WeakSet[ByteBudget] = weakref.WeakSet()
        self._punches = True  # whether the file system can make holes, as far as is known

    def fileno(self) -> int:
        return self._descriptor.number

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

    @property
    def in_use(self) -> int:
        with self._lock:
            self._apply_releases()
            return self._parts.in_use

    @property
    def _end(self) -> int:
        return self._parts.free[-1][0]

    def check_process(self) -> None:
        """Raise StoreError if another process opened the file, and this one is a fork of it."""
        if self.process != os.getpid():
            raise StoreError(
                f"OnDisk({self.directory!r}): process {self.process} stored this tensor, and {os.getpid()} is a fork "
                "of it. The parent may have changed the file. Run the backward in the process that ran the forward",
                path=self.directory,
            )

    def allocate(self, nbytes: int) -> Extent:
        """An extent of whole pages for ``nbytes``. ``release``, which destructors may call, gives it back."""
        room = -(-nbytes // PAGE) * PAGE
        with self._lock:
            self._apply_releases()
            extent = self._parts.take(room)
            assert extent is not None  # the range has no end
            grows = self._has_holes or self._end > self._size
            self._size = max(self._size, self._end)
            self._peaks[-1] = max(self._peaks[-1], self._end)
            self._give_back(room if grows else 0)
        return extent

    def shrink(self, keep_peak: bool) -> None:
        """Give unused space back to the file system."""
        with self._lock:
            self._apply_releases()
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
    def _most(self) -> int | None:
        """Bytes that the file may take on the disk; None for no limit."""
        limits = [budget.limit for budget in tuple(self.budgets)]
        return sum(limit for limit in limits if limit) if limits and None not in limits else None

    def _give_back(self, wanted: int = 0, at_once: bool = False) -> None:
        """Give unused blocks back to the file system, if the file would have more blocks than its limits allow."""
        if self.process != os.getpid():
            return
        most = self._most
        if not at_once and (most is None or self.resident + wanted <= most):
            return
        with contextlib.suppress(OSError):
            if self._size > self._end:
                os.ftruncate(self._fd, self._end)
                self._size = self._end
        if not self._punches:
            return
        wasted = [part for parts in self._wasted.values() for part in parts]
        free = self._parts.free[:-1]
        for begin, end in [part for part in free if part not in self._holes] + wasted:
            if not self._punch(begin, end):
                return
        self._holes = set(free)
        self._wasted.clear()

    def _punch(self, begin: int, end: int) -> bool:
        """Make a part of the file a hole. Returns whether it is one now; not every file system can do this."""
        call = _fallocate() if self._punches else None
        self._punches = call is not None and call(self._fd, _PUNCH_HOLE | _KEEP_SIZE, begin, end - begin) == 0
        self._has_holes = self._has_holes or self._punches
        return self._punches

    def _apply_release(self, release: Extent | Waste) -> None:
        if isinstance(release, Extent):
            self._wasted.pop(release, None)
            self._parts.give(release)
        else:
            begin = release.extent.offset + release.start
            self._wasted.setdefault(release.extent, []).append((begin, begin + release.room))

    def _apply_releases(self) -> None:
        super()._apply_releases()
        if not self._parts.in_use and self._peaks[-1]:  # all is free, as after every backward
            self._peaks.append(0)

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


_files: weakref.WeakValueDictionary[Any, ScratchFile] = weakref.WeakValueDictionary()


def file_in(directory: str, direct: bool | Literal["auto"], is_limited: bool = False) -> ScratchFile:
    """The file of this process in ``directory`` for stores that have a limit, or for those that have none."""
    key = os.path.realpath(directory), os.getpid(), direct, is_limited
    found = _files.get(key)
    if found is None:
        found = _files[key] = ScratchFile(directory, direct)
    return found
