"""What the disk gives to a plain loop of writes and reads in a few threads, past the page cache where it can be."""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable

CHUNK = 8 << 20
THREADS = (1, 2, 4)


class Disk:
    """Bytes a second of the disk under ``folder``, measured each time :meth:`round` is called."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.direct = True
        self._found: dict[tuple[str, int], list[float]] = {}

    def round(self, number: int) -> None:
        """Write a new file and read it, for each number of threads; round -1 is for warming up."""
        for threads in THREADS:
            fd = self._open()
            try:
                for what, move in (("write", os.pwritev), ("read", os.preadv)):
                    figure = self.nbytes / self._timed(move, fd, threads)
                    if number >= 0:
                        self._found.setdefault((what, threads), []).append(figure)
            finally:
                os.close(fd)

    def best(self, what: str) -> float:
        """The median of the number of threads that is fastest."""
        return max(statistics.median(figures) for (name, _), figures in self._found.items() if name == what)

    def figures(self) -> dict[str, object]:
        """All of it, in GB/s."""
        by_threads = {f"{what}, {n} threads": statistics.median(all_) / 1e9 for (what, n), all_ in self._found.items()}
        return {
            "direct": self.direct,
            "bytes": self.nbytes,
            "write_gb_per_second": round(self.best("write") / 1e9, 3),
            "read_gb_per_second": round(self.best("read") / 1e9, 3),
            "gb_per_second": {name: round(figure, 3) for name, figure in by_threads.items()},
        }

    def _open(self) -> int:
        """A file without a name; through the page cache where the file system takes nothing else."""
        if self.direct:
            fd = -1
            try:
                fd = os.open(self.folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
                with mmap.mmap(-1, CHUNK) as page:
                    os.pwritev(fd, [page], 0)
                    os.preadv(fd, [page], 0)
                os.ftruncate(fd, 0)
                return fd
            except (OSError, AttributeError):
                self.direct = False
                if fd >= 0:
                    os.close(fd)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return os.dup(file.fileno())

    def _timed(self, move: Callable[..., int], fd: int, threads: int) -> float:
        """Seconds that ``threads`` threads took, each with every so many-th chunk and memory of its own."""
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is shared gets no huge pages
        memories = [mmap.mmap(-1, CHUNK, flags=private) for _ in range(threads)]
        for memory in memories:
            with contextlib.suppress(AttributeError, OSError):
                memory.madvise(
                    mmap.MADV_HUGEPAGE
                )  # a direct call looks up every page, and small ones halve what is reached
            memory[:] = os.urandom(CHUNK)  # nothing that a disk could make smaller; and every page is there

        def work(first: int) -> None:
            for offset in range(first * CHUNK, self.nbytes, threads * CHUNK):
                if move(fd, [memories[first]], offset) != CHUNK:
                    raise OSError("the disk took or gave a part only; the figure would be of something else")

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            begin = time.perf_counter()
            list(pool.map(work, range(threads)))
            return time.perf_counter() - begin
