"""The base class of stores, which keep the bytes of tensors and give them back; their limits, figures and reports."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from disthooks._handles import LoggedRecords
from disthooks._locks import DeferredSum, new_lock
from disthooks._ranks import local_world_size
from disthooks._tensors import format_bytes, parse_bytes
from disthooks._torch import drop_failed_backward, uncompiled
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.copies import Outgoing


class BusyTime:
    """The time for which at least one thread was busy.

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
        self._lock = new_lock()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One thread is busy inside this context."""
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
    _took: tuple[float, float] = (1e-3, 1e6)  # seconds and bytes of all reads; the newest reads weigh most

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
        """Seconds that a thread needs to read one byte, from the reads so far."""
        return self._took[0] / self._took[1]


@dataclass(frozen=True)
class StoreReport:
    """What a store holds, and what went through it in this process, for all attachments that use it.

    Each figure is in bytes, unless its description says seconds or bytes a second.

    >>> print(StoreReport("OnDisk('/tmp')", held=4096, limit=2**30))
    OnDisk('/tmp'): holds 4.0 KiB of 1.0 GiB

    Attributes:
        name: the store, as the user wrote it.
        held: bytes in the store now, those in flight included; of ``OnDevice`` the sum over all devices.
        limit: most bytes that the store may hold in this process; None for no limit. The limit of ``OnDevice`` is for
            each device.
        in_flight: bytes that are still in memory and wait to be written.
        written: bytes that were written to the file, or copied to the host.
        never_written: bytes that were read or dropped before they were written.
        from_memory: bytes that backward read while they still were in memory.
        ahead: bytes that were prefetched: brought back before backward read them.
        in_vain: bytes that were prefetched, and evicted before backward read them.
        read: bytes that were read from the file, or copied back from the host.
        write_seconds: seconds for which at least one write ran, beside the computation or not.
        read_seconds: seconds for which at least one read ran.
        measured_write: speed of the fastest copy to the host, in bytes a second; None for a disk, or if none was timed.
        measured_read: the same for reading.
        why_buffered: why the file goes through the page cache of the system; empty if it does not.
        devices: how many devices ``limit`` was used for, on each anew; 1 if it is for all of them together.
        peak_held: the largest ``held`` since the last record of ``gradients(also=...)`` in this process.
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
    devices: int = 1
    peak_held: int = 0

    def __str__(self) -> str:
        most = "" if self.limit is None else f" of {format_bytes(self.limit)}"
        most += f" on each of {self.devices} devices" if most and self.devices > 1 else ""
        flying = f", {format_bytes(self.in_flight)} of it in flight" if self.in_flight else ""
        lines = [f"{self.name}: holds {format_bytes(self.held)}{most}{flying}"]
        if self.written:
            lines.append(
                f"  wrote {format_bytes(self.written)}{_speed(self.written, self.write_seconds, self.measured_write)}, "
                f"read {format_bytes(self.read)}{_speed(self.read, self.read_seconds, self.measured_read)}"
            )
            lines.append(
                f"  {format_bytes(self.ahead)} read ahead ({format_bytes(self.in_vain)} of it evicted unused), "
                f"{format_bytes(self.from_memory)} read while still in memory, "
                f"{format_bytes(self.never_written)} read or freed before they were written"
            )
        elif self.from_memory:
            lines.append(f"  {format_bytes(self.from_memory)} stayed there until backward read them")
        if self.why_buffered:
            lines.append(f"  through the page cache: {self.why_buffered}")
        return "\n".join(lines)


def _speed(nbytes: int, seconds: float, measured: float | None) -> str:
    if not seconds:
        return ""
    alone = "" if measured is None else f", alone {measured / 1e9:.1f}"
    return f" at {nbytes / seconds / 1e9:.1f} GB/s{alone}"


class Store(ABC):
    """Keeps the bytes of tensors and gives them back.

    To add a place for tensors, write a subclass that is a frozen dataclass, with ``put``, ``get`` and ``drop``. Threads
    and attachments share a store, so its state is in its tickets or behind a lock. ``drop`` is called from destructors,
    in any thread and at any moment, so it must not wait. :class:`disthooks.testing.StoreTests` tests a store.

    Attributes:
        min_bytes: tensors with fewer bytes stay where they are, unless ``at_least`` says another limit.
        can_be_tier: whether a ``Tiered`` takes it.
    """

    min_bytes: ClassVar[int] = 4096  # a page: of ResNet-18's 100 saved tensors 40 are smaller, together 0.04 MB
    can_be_tier: ClassVar[bool] = True

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> Any:
        """Keep the contents of ``tensor`` (strided, any shape, dtype and device) and return a ticket.

        The ticket may be any object; disthooks gives it back to ``get`` and ``drop``.

        Raises:
            StoreError: if the store cannot keep it. Then the tensor is unchanged, and nothing of it is held.
        """

    @abstractmethod
    def get(self, ticket: Any) -> torch.Tensor:
        """A tensor of the shape, dtype, device and bits that were put. This may be called any number of times.

        It is either the tensor that was put, or a tensor whose memory nothing else uses, so that the caller may write
        to it.

        Raises:
            StoreError: if the tensor cannot be read; the caller may try again.
        """

    @abstractmethod
    def drop(self, ticket: Any) -> None:
        """Release the contents of ``ticket``. This is called once for each ticket."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor`` for :meth:`put`. Nothing else uses it, so the store may hold it as it is."""
        return tensor.clone(memory_format=torch.contiguous_format)

    def prefetch(self, ticket: Any) -> None:  # noqa: B027
        """Prepare for :meth:`get`, which will be called soon. By default this does nothing."""

    def wait(self) -> None:  # noqa: B027
        """Wait until all tensors that were put have arrived; StoreError if one could not be written."""

    def release_idle(self) -> None:  # noqa: B027
        """Release idle threads, idle memory and unused space in files.

        The store makes them again when it needs them.
        """

    def report(self) -> tuple[StoreReport, ...]:
        """What the store holds and what went through it: one entry for each place that it keeps tensors in."""
        return ()

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        """Whether ``put`` takes ``tensor`` out of the memory that it is in."""
        return True


class Tier(Store):
    """What ``Tiered`` asks of its stores beside the methods of :class:`Store`; a user's store needs none of this.

    Attributes:
        reads_ahead: whether it brings tensors nearer by itself, and need not be told which (``prefetch``).
    """

    reads_ahead: ClassVar[bool] = False

    def peek(self, ticket: Any) -> torch.Tensor | None:
        """The tensor if it is still in memory, so that another store can take it without a read; None otherwise."""
        return None

    def host_copy(self, ticket: Any) -> Outgoing | None:
        """The tensor in host memory that the store below may take over, though the copy to it may be under way."""
        return None

    def take_over(self, copy: Outgoing, stream: torch.Stream) -> Any:
        """Like :meth:`put_from_host`, for what :meth:`host_copy` of another store has given."""
        return self.put_from_host(copy.wait(), stream)

    def put_away(self, tensor: torch.Tensor) -> Any:
        """Like :meth:`put`, for a tensor that shall leave its device now, even if backward reads it soon."""
        return self.put(tensor)

    def put_from_host(self, tensor: torch.Tensor, stream: torch.Stream) -> Any:
        """Like :meth:`put`, for a tensor in host memory that another store has copied from the device of ``stream``."""
        return self.put(tensor.to(stream.device))

    def device_bytes(self, device: torch.device | None = None) -> int:
        """Bytes of tensors that belong elsewhere: not copied yet, or brought back early.

        Args:
            device: the accelerator that they are on; None for all of them.
        """
        return 0

    def device_room(self, device: torch.device) -> int:
        """Bytes that :meth:`prefetch` may bring to ``device`` now."""
        return sys.maxsize

    def set_device_limit(self, nbytes: int, device: torch.device) -> int:
        """Keep :meth:`device_bytes` of ``device`` at or below ``nbytes`` from now on, if the host need not wait for it.

        Returns:
            :meth:`device_bytes` before the call.
        """
        return 0


class MovingTicket:
    """A ticket of a store that moves tensors beside the computation."""

    __slots__ = ()

    def pop_transfer_seconds(self) -> float:
        """Seconds for which the tensor was moved beside the computation since the last call."""
        return 0.0

    def has_left(self, later: Callable[[], object]) -> bool:
        """Whether the tensor has left the memory that it was in; if not, ``later`` is called when it does.

        This is asked right after ``put``, where :meth:`Store.leaves_memory` is true.
        """
        return True


Opened = TypeVar("Opened", bound=Store)

#: Held while a store is opened.
opening = new_lock()

# What works in this process for each spec that was used, by the identity of the spec. The second entry removes the
# first one when the spec is gone: Python then calls ``_opened.pop(number, reference)``, a C function, so a destructor
# may do it. Tickets hold what they need of what was opened.
_opened: dict[int, tuple[Any, weakref.ref[Any]]] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_opened.clear)


class StoreSpec(Store, Generic[Opened]):
    """A store that is frozen and says only what the user asked for. ``open()`` gives what works in this process.

    All attachments that use the same object share what it opens, and a forked process opens it anew. What is opened
    lives as long as the spec or a ticket. Each ticket has a ``drop()`` that a destructor may call.
    """

    def open(self) -> Opened:
        """The store that does the work in this process, opened at the first call."""
        found = _opened.get(id(self))
        if found is not None:
            opened: Opened = found[0]
            return opened
        with opening:
            number = id(self)
            if number not in _opened:
                made, gone = self._open(), functools.partial(_opened.pop, number)
                _opened[number] = made, weakref.ref(self, gone)
            opened = _opened[number][0]
            return opened

    @abstractmethod
    def _open(self) -> Opened:
        """Make the store that does the work; StoreError if it cannot work."""

    def put(self, tensor: torch.Tensor) -> Any:
        return self.open().put(tensor)

    def get(self, ticket: Any) -> torch.Tensor:
        return self.open().get(ticket)

    def drop(self, ticket: Any) -> None:
        ticket.drop()  # a destructor calls this, and must not open anything

    def report(self) -> tuple[StoreReport, ...]:
        return self.open().report()

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.open().own(tensor)

    def prefetch(self, ticket: Any) -> None:
        self.open().prefetch(ticket)

    def wait(self) -> None:
        self.open().wait()

    def release_idle(self) -> None:
        self.open().release_idle()


@dataclass(frozen=True)
class Functions(Store):
    """A pair of functions in place of a store, under torch's own contract for saved-tensor hooks.

    ``pack`` is called for each saved tensor when autograd saves it, with the tensor as autograd gives it, parameters
    included. A tensor that is saved twice is packed twice, and in-place changes are not detected. ``unpack`` gets the
    value that ``pack`` returned, and must return a tensor with the same contents. disthooks makes the pair active
    inside the wrapped forward alone, in the thread that runs it.

    Args:
        pack: a function of a tensor that returns any value.
        unpack: a function of that value that returns the tensor.

    Raises:
        UsageError: if one of them cannot be called.

    >>> from disthooks import saving
    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> with saving(Functions(lambda t: t * 4, lambda t: t / 4)):
    ...     y = x**2
    >>> y.backward(); x.grad
    tensor([6.])
    """

    min_bytes: ClassVar[int] = 0
    can_be_tier: ClassVar[bool] = False
    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]

    def __post_init__(self) -> None:
        for name in ("pack", "unpack"):
            if not callable(getattr(self, name)):
                raise UsageError(f"Functions: {name} must be a function, got {getattr(self, name)!r}")

    def put(self, tensor: torch.Tensor) -> Any:
        return self.pack(tensor)

    def get(self, ticket: Any) -> torch.Tensor:
        return self.unpack(ticket)

    def drop(self, ticket: Any) -> None:
        """Do nothing: the value of ``pack`` is freed with the graph node that holds it."""


class Reservation(Protocol):
    """An object that remembers how many bytes of a :class:`ByteBudget` it has to give back."""

    reserved: int


class ByteBudget:
    """Bytes in use under a limit. ``release`` takes no lock, so destructors may call it.

    >>> budget = ByteBudget("1 KiB", "OnCpu")
    >>> budget.reserve(1000); budget.release(1000); budget.held
    0
    """

    def __init__(self, limit: int | str | None, owner: str, grain: int = 1) -> None:
        self._grain = grain
        if limit is not None:
            # "64 GiB per node" is divided among the processes of the node.
            total, per_node, _ = limit.partition(" per node") if isinstance(limit, str) else (limit, "", "")
            nbytes = parse_bytes(total, f"{owner} limit")
            limit = nbytes // local_world_size() if per_node else nbytes
        self._limit = limit
        self._owner = owner
        self._taken = self._most = self._peak = self._record = 0
        self._released = DeferredSum()
        #: Gives bytes back. It takes no lock, so that destructors may call it; see [Note: destructors].
        self.release: Callable[[int], None] = self._released.change
        self._lock = new_lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ByteBudget, (self._limit, self._owner, self._grain)

    @property
    def limit(self) -> int | None:
        """Most bytes that may be in use; None for no limit."""
        return self._limit

    @property
    def held(self) -> int:
        with self._lock:
            return self._taken - self._released.total()

    @property
    def most(self) -> int:
        """The most bytes that were in use since the limit was set last."""
        return self._most

    @property
    def peak(self) -> int:
        """The most bytes that were in use since the last record of a log."""
        used = self.held
        return max(self._peak, used) if self._record == LoggedRecords.count else used

    def set_limit(self, limit: int) -> None:
        with self._lock:
            self._limit, self._most = limit, self._taken - self._released.total()

    def has_room(self, count: int) -> bool:
        return self._limit is None or self.held + self.size(count) <= self._limit

    def could_have_room(self, count: int) -> bool:
        """Whether ``count`` bytes would fit if nothing else was held."""
        return self._limit is None or self.size(count) <= self._limit

    def size(self, count: int) -> int:
        """The bytes that count for a tensor of ``count`` bytes: rounded up to whole grains.

        >>> ByteBudget(None, "OnDisk", grain=4096).size(5000)
        8192
        """
        return -(-count // self._grain) * self._grain

    def reserve(self, count: int, holder: Reservation | None = None) -> None:
        """Take ``size(count)`` bytes for one tensor; ``release(budget.size(count))`` gives them back.

        Raises:
            StoreError: if more than the limit would be in use then. It has ``wanted`` and ``free``, in bytes.
        """
        if not self.has_room(count):
            drop_failed_backward()  # its graph holds bytes, and no code of the user's can free it
        count = self.size(count)
        with self._lock:
            used = self._taken - self._released.total()
            if self._limit is not None and used + count > self._limit:
                free = max(0, self._limit - used)
                raise StoreError(
                    f"{self._owner} is full: wanted {format_bytes(count)} more, {format_bytes(free)} free of its "
                    f"limit of {format_bytes(self._limit)}; raise the limit, or save fewer modules or larger "
                    "tensors only (at_least). What a forward saved counts as long as its graph is alive: after an "
                    "error in forward or backward delete the outputs, the loss and the exception",
                    wanted=count,
                    free=free,
                )
            if self._record != LoggedRecords.count:
                self._record, self._peak = LoggedRecords.count, 0
            self._peak = max(self._peak, used + count)
            self._most = max(self._most, used + count)  # first: no call may stand between the two lines that follow
            self._taken += count
            if holder is not None:
                holder.reserved = count


class Counted:
    """A ticket whose bytes a budget counts. Its destructor gives them back, since after Ctrl-C nobody may own it.

    ``budget.reserve(nbytes, ticket)`` takes the bytes.

    Attributes:
        reserved: the bytes that ``budget`` counts.
    """

    __slots__ = ("budget", "reserved")

    def __init__(self, budget: ByteBudget) -> None:
        self.budget, self.reserved = budget, 0

    def drop(self) -> None:
        reserved, self.reserved = self.reserved, 0
        if reserved:
            self.budget.release(reserved)

    @uncompiled()
    def __del__(self) -> None:
        self.drop()


class DeviceBudgets:
    """A :class:`ByteBudget` for each device that is used, all with the same limit. The CPU is a device, too.

    >>> budgets = DeviceBudgets("1 KiB", "OnDevice")
    >>> for device in ("cpu", "meta"):
    ...     budgets.of(torch.device(device)).reserve(1000)
    >>> budgets.held, budgets.limit
    (2000, 1024)
    """

    def __init__(self, limit: int | str | None, owner: str) -> None:
        self._limit, self._owner = ByteBudget(limit, owner).limit, owner
        self._all: dict[torch.device, ByteBudget] = {}

    def of(self, device: torch.device) -> ByteBudget:
        found = self._all.get(device)
        if found is None:
            made = ByteBudget(self._limit, f"{self._owner} ({device})")
            found = self._all.setdefault(device, made)  # another thread may have added one meanwhile
        return found

    @property
    def limit(self) -> int | None:
        """Most bytes that may be in use on each device; None for no limit."""
        return self._limit

    def set_limit(self, limit: int) -> None:
        self._limit = limit
        for budget in tuple(self._all.values()):
            budget.set_limit(limit)

    @property
    def held(self) -> int:
        return sum(budget.held for budget in tuple(self._all.values()))

    @property
    def peak(self) -> int:
        """The sum of the most bytes that were in use on each device since the last record of a log."""
        return sum(budget.peak for budget in tuple(self._all.values()))

    @property
    def devices(self) -> int:
        return len(self._all)
