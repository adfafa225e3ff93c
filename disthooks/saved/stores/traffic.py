"""What went through a store, and how fast."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from disthooks._locks import Order, shared
from disthooks._tensors import format_bytes


class Busy:
    """Time during which at least one thread was at it.

    >>> busy = Busy()
    >>> with busy.one(), busy.one():
    ...     time.sleep(0.001)
    >>> 0.001 <= busy.seconds < 1
    True
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0
        self._begin = 0.0
        self._lock = shared(Order.TRAFFIC)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One thread is at it."""
        with self._lock:
            if not self._count:
                self._begin = time.perf_counter()
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self.seconds += time.perf_counter() - self._begin


@dataclass
class Traffic:
    """Bytes through the threads of a store; those of a :class:`StoreReport`."""

    written: int = 0
    never_written: int = 0
    from_memory: int = 0
    ahead: int = 0
    in_vain: int = 0
    read: int = 0
    writing: Busy = field(default_factory=Busy)
    reading: Busy = field(default_factory=Busy)
    _took: tuple[float, float] = (1e-3, 1e6)  # seconds and bytes of reads, the last ones above all

    @contextlib.contextmanager
    def one_read(self, nbytes: int) -> Iterator[None]:
        """A thread reads ``nbytes``."""
        begin = time.perf_counter()
        with self.reading.one():
            yield
        seconds, total = self._took
        self._took = 0.9 * seconds + time.perf_counter() - begin, 0.9 * total + nbytes

    @property
    def pace(self) -> float:
        """Seconds that a thread takes to read a byte."""
        return self._took[0] / self._took[1]


@dataclass(frozen=True)
class StoreReport:
    """What a store holds and what went through it in this process, for all attachments that use it.

    Bytes unless it says seconds, or bytes a second.

    >>> print(StoreReport("OnDisk('/tmp')", held=4096, limit=2**30))
    OnDisk('/tmp'): holds 4.0 KiB of 1.0 GiB

    Attributes:
        name: the store, as it was made.
        held: in it now; those in flight too.
        limit: most bytes it may hold, in this process; None for no limit.
        in_flight: in memory still, waiting to be written.
        written: to its file.
        never_written: wanted or dropped before a thread came to write them.
        from_memory: wanted while they still were in memory.
        ahead: read before they were wanted.
        in_vain: read ahead, and given up again for others.
        read: from its file.
        write_seconds: time during which something was written, beside the computation or not.
        read_seconds: time during which something was read.
        measured_write: what the disk gave alone, in bytes a second; None until 256 MiB were written.
        measured_read: the same for reading.
        why_buffered: why it goes through the page cache of the system; empty when it does not.
        why_staged: why a GPU's tensors go through host memory, where something else was asked for.
    """

    name: str
    held: int = 0
    limit: int | None = None
    in_flight: int = 0
    written: int = 0
    never_written: int = 0
    from_memory: int = 0
    ahead: int = 0
    in_vain: int = 0
    read: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    measured_write: float | None = None
    measured_read: float | None = None
    why_buffered: str = ""
    why_staged: str = ""

    def __str__(self) -> str:
        most = "" if self.limit is None else f" of {format_bytes(self.limit)}"
        flying = f", {format_bytes(self.in_flight)} of it in flight" if self.in_flight else ""
        lines = [f"{self.name}: holds {format_bytes(self.held)}{most}{flying}"]
        if self.written:
            lines.append(
                f"  wrote {format_bytes(self.written)}{_speed(self.written, self.write_seconds, self.measured_write)}, "
                f"read {format_bytes(self.read)}{_speed(self.read, self.read_seconds, self.measured_read)}"
            )
            lines.append(
                f"  {format_bytes(self.ahead)} read ahead ({format_bytes(self.in_vain)} in vain), "
                f"{format_bytes(self.from_memory)} wanted while in memory, "
                f"{format_bytes(self.never_written)} never written"
            )
        if self.why_buffered:
            lines.append(f"  through the page cache: {self.why_buffered}")
        if self.why_staged:
            lines.append(f"  from a GPU through host memory: {self.why_staged}")
        return "\n".join(lines)


def _speed(nbytes: int, seconds: float, measured: float | None) -> str:
    if not seconds:
        return ""
    alone = "" if measured is None else f", alone {measured / 1e9:.1f}"
    return f" at {nbytes / seconds / 1e9:.1f} GB/s{alone}"
