"""What a store is: it keeps the bytes of tensors and gives them back. Its limit, its figures and its report."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from disthooks._fork_safe import DeferredSum, Order, shared_lock
from disthooks._ranks import local_world_size
from disthooks._tensors import format_bytes, parse_bytes
from disthooks.errors import StoreError, UsageError


class BusyTime:
    """The time during which at least one thread did something.

    >>> busy = BusyTime()
    >>> with busy.one(), busy.one():
    ...     time.sleep(0.001)
    >>> 0.001 <= busy.seconds < 1
    True
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0
        self._begin = 0.0
        self._lock = shared_lock(Order.IO_STATS)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One thread does it inside this context."""
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
class IOStats:
    """Bytes that the threads of a store moved, under the names of a :class:`StoreReport`."""

    written: int = 0
    never_written: int = 0
    from_memory: int = 0
    ahead: int = 0
    in_vain: int = 0
    read: int = 0
    writing: BusyTime = field(default_factory=BusyTime)
    reading: BusyTime = field(default_factory=BusyTime)
    _took: tuple[float, float] = (1e-3, 1e6)  # seconds and bytes of reads, in which the last ones weigh most

    @contextlib.contextmanager
    def one_read(self, nbytes: int) -> Iterator[None]:
        """A thread reads ``nbytes`` inside this context."""
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


#: Names that a subclass of ``Store`` could override before 0.2, and those that took their place.
_RENAMED = {
    "adopt": "put_from_host",
    "allow": "set_device_limit",
    "held": "peek",
    "moves": "leaves_memory",
    "on_device": "device_bytes",
    "rest": "release_idle",
    "took": "pop_transfer_seconds",
    "worth": "min_bytes",
}


class Store(ABC):
    """Keeps the bytes of tensors and gives them back.

    To add a place, write a subclass that is a frozen dataclass. Threads and attachments share a store, so what changes
    lives in its tickets or behind a lock. ``drop`` is called from destructors, in any thread and at any moment, so it
    must not wait.

    Attributes:
        min_bytes: smaller tensors stay where they are, unless a pipeline says otherwise (``AtLeast``).
    """

    min_bytes: ClassVar[int] = 4096  # a page: of ResNet-18's 100 saved tensors 40 are smaller, together 0.04 MB

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in _RENAMED.items():
            # A field of such a name is the user's own affair; an override under the old name would never be called.
            if callable(vars(cls).get(old)) or (old == "worth" and old in vars(cls)):
                raise UsageError(f"{cls.__name__}.{old}: what a Store may override is called {new} since disthooks 0.2")

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> Any:
        """Keep the contents of ``tensor`` (strided, any shape, dtype and device) and return a ticket.

        Raises:
            StoreError: when that is not possible; the tensor is then as it was and nothing is held.
        """

    @abstractmethod
    def get(self, ticket: Any) -> torch.Tensor:
        """A tensor of the shape, dtype, device and bits that were put; this may be called any number of times.

        It is the tensor that was put, or one whose memory nobody else has, so that it may be written to.

        Raises:
            StoreError: when that is not possible; the caller may try again.
        """

    @abstractmethod
    def drop(self, ticket: Any) -> None:
        """Release the contents of ``ticket``; called once."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor`` to put. Nobody else has it, so the store may hold it as it is."""
        return tensor.clone(memory_format=torch.contiguous_format)

    def peek(self, ticket: Any) -> torch.Tensor | None:
        """The tensor if it is still in memory, so that another store can take it without a read; else None."""
        return None

    def put_from_host(self, tensor: torch.Tensor, stream: torch.Stream) -> Any:
        """Like ``put``, for a tensor in host memory that another store copied from the device of ``stream``."""
        return self.put(tensor.to(stream.device))

    def device_bytes(self) -> int:
        """Bytes on accelerators of tensors that it keeps elsewhere: not copied yet, or brought back ahead."""
        return 0

    def set_device_limit(self, nbytes: int) -> None:  # noqa: B027
        """Keep ``device_bytes`` to at most ``nbytes`` from now on, as far as the host need not wait for that."""

    def pop_transfer_seconds(self, ticket: Any) -> float:
        """Seconds for which its bytes were moved beside the computation since the last call; 0 if not known."""
        return 0.0

    def prefetch(self, ticket: Any) -> None:  # noqa: B027
        """Prepare for ``get``, which will be called soon. By default this does nothing."""

    def wait(self) -> None:  # noqa: B027
        """Wait until all tensors that were put have arrived; StoreError when one could not."""

    def release_idle(self) -> None:  # noqa: B027
        """Release threads, memory and space in files that are idle; they come back when they are needed."""

    def rest(self) -> None:
        """The name of :meth:`release_idle` before 0.2."""
        self.release_idle()

    def report(self) -> tuple[StoreReport, ...]:
        """What it holds and what went through it, one entry for each place that it keeps tensors in."""
        return ()

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        """Whether ``put`` takes ``tensor`` out of the memory that it is in."""
        return True


@dataclass(frozen=True)
class Functions(Store):
    """Any pair of functions in place of a store, under torch's own contract for saved-tensor hooks.

    ``pack`` is called once for each saved tensor, at once, with the tensor as autograd gives it, parameters
    too; nothing is shared and nothing is checked for in-place changes. ``unpack`` gets what ``pack`` returned
    and must return a tensor of the same contents. What disthooks adds is where the pair is active: inside the
    wrapped forward, in its own thread.

    Args:
        pack: tensor to anything.
        unpack: what ``pack`` returned to the tensor.

    Raises:
        UsageError: when one of them cannot be called.

    >>> from disthooks import saving
    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> with saving(Functions(lambda t: t * 4, lambda t: t / 4)):
    ...     y = x**2
    >>> y.backward(); x.grad
    tensor([6.])
    """

    min_bytes: ClassVar[int] = 0
    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]

    def __post_init__(self) -> None:
        for name in ("pack", "unpack"):
            if not callable(getattr(self, name)):
                raise UsageError(f"Functions: {name} must be a function, got {getattr(self, name)!r}")

    def put(self, tensor: torch.Tensor) -> Any:
        """What ``pack`` makes of ``tensor``."""
        return self.pack(tensor)

    def get(self, ticket: Any) -> torch.Tensor:
        """What ``unpack`` makes of ``ticket``."""
        return self.unpack(ticket)

    def drop(self, ticket: Any) -> None:
        """Nothing: what ``pack`` returned dies with the graph node that held it."""


class ByteBudget:
    """Bytes in use under a limit. ``release`` takes no lock, so destructors may call it.

    Args:
        limit: most bytes; None for no limit.
        owner: the store's name, for the error message.
        grain: bytes of each tensor are rounded up to a multiple of it, as a file has whole pages.

    >>> budget = ByteBudget("1 KiB", "OnCpu")
    >>> budget.reserve(1000); budget.release(1000); budget.held
    0
    """

    def __init__(self, limit: int | str | None, owner: str, grain: int = 1) -> None:
        self._grain = grain
        self._limit = None if limit is None else _share(limit, f"{owner} limit")
        self._owner = owner
        self._taken = 0
        self._released = DeferredSum()
        #: Give so many bytes back; for destructors, too.
        self.release: Callable[[int], None] = self._released.change
        self._lock = shared_lock(Order.BUDGET)

    def __reduce__(self) -> tuple[Any, ...]:
        return ByteBudget, (self._limit, self._owner, self._grain)

    @property
    def limit(self) -> int | None:
        """Most bytes in use."""
        return self._limit

    @property
    def held(self) -> int:
        """Bytes in use now."""
        with self._lock:
            return self._taken - self._released.total()

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more bytes would fit now."""
        return self._limit is None or self.held + self.size(count) <= self._limit

    def could_have_room(self, count: int) -> bool:
        """Whether ``count`` bytes would fit if nothing else were held."""
        return self._limit is None or self.size(count) <= self._limit

    def size(self, count: int) -> int:
        """How many bytes ``count`` bytes of one tensor count as.

        >>> ByteBudget(None, "OnDisk", grain=4096).size(5000)
        8192
        """
        return -(-count // self._grain) * self._grain

    def reserve(self, count: int) -> None:
        """Take ``size(count)`` bytes for one tensor; ``release(budget.size(count))`` gives them back.

        Raises:
            StoreError: when that would go over the limit.
        """
        taken, count = 0, self.size(count)
        try:
            with self._lock:
                used = self._taken - self._released.total()
                if self._limit is not None and used + count > self._limit:
                    free = max(0, self._limit - used)
                    raise StoreError(
                        f"{self._owner} is full: wanted {format_bytes(count)} more, {format_bytes(free)} free of its "
                        f"limit of {format_bytes(self._limit)}; raise the limit, or save fewer modules or larger "
                        "tensors only (AtLeast)",
                        wanted=count,
                        free=free,
                    )
                self._taken += count
                taken = count
        except BaseException:
            self.release(taken)  # an interrupt came at the end
            raise


def _share(limit: int | str, what: str) -> int:
    """The bytes of this process: all of ``limit``, or an equal part of it if it is ``"... per node"``."""
    total, per_node, _ = limit.partition(" per node") if isinstance(limit, str) else (limit, "", "")
    nbytes = parse_bytes(total, what)
    return nbytes // local_world_size() if per_node else nbytes
