"""Copies of the tensors of one device to host memory and back: what is sent, what stays, and what comes back early."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import cast

import torch

from disthooks._locks import Shared
from disthooks._streams import current_stream, event_on, handed_over, on, used_on
from disthooks.errors import StoreError
from disthooks.saved.stores.base import ByteBudget
from disthooks.saved.stores.copies import Coming, Outgoing, Throughput, link_of
from disthooks.saved.stores.host import pool_of, tensor_over
from disthooks.saved.stores.order import PerThread, TimedOrder

_AHEAD = 64  # tensors to look ahead: backward departs from the expected order by a few, so more would only cost time
_MARGIN = 1.5  # a copy is expected to take up to so many times as long as the last copies took


class Offloaded:
    """One tensor of a device in :class:`OnCpu`: still on the device, in host memory, or on its way.

    Attributes:
        tensor: the tensor, until it is sent; None after that.
        own: whether ``tensor`` is a copy that only the store has.
        counted: bytes that count as held on the device until the tensor is sent.
        order: the order in which backward reads, which it is a part of; None if a ``Tiered`` knows it, and says which
            tensors come back early.
        reserved: bytes of host memory that a budget counts.
        outgoing: the copy to the host, once it is sent.
        coming: the copy back that began before backward asked for it.
        came: the event at the end of the last copy back.
        stream: the stream that filled the tensor.
    """

    __slots__ = (
        "came",
        "coming",
        "counted",
        "device",
        "dropped",
        "nbytes",
        "order",
        "outgoing",
        "own",
        "position",
        "reserved",
        "stream",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, order: TimedOrder | None) -> None:
        self.nbytes, self.device = tensor.nbytes, tensor.device
        self.order, self.stream = order, current_stream(tensor.device)
        # A copy is contiguous, and a small part of a large storage does not keep that storage alive.
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self.own = not is_plain or tensor.untyped_storage().nbytes() > 2 * self.nbytes
        self.tensor: torch.Tensor | None = _copy(tensor) if self.own else tensor
        self.position, self.dropped = 0, False
        self.counted = self.reserved = 0
        self.outgoing: Outgoing | None = None
        self.coming: Coming | None = None
        self.came: torch.Event | None = None

    def itself(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which was put, for the current stream.

        If it is the store's own copy, this returns a clone of it: the store may be asked for it again.
        """
        tensor = handed_over(tensor, self.stream)
        return tensor.clone() if self.own else tensor

    @property
    def is_away(self) -> bool:
        """Whether it is in host memory alone."""
        return self.outgoing is not None and self.outgoing.source is None

    @property
    def is_idle(self) -> bool:
        """Whether no copy reads or writes its host memory any more."""
        # `is_done` is False while a graph is captured, so that `query` is not called then.
        return self.outgoing is None or (self.outgoing.is_done() and (self.came is None or self.came.query()))

    def wait(self) -> None:
        """Make the host wait until no copy uses its host memory."""
        if self.outgoing is not None:
            self.outgoing.wait()
        if self.came is not None:
            self.came.synchronize()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    used_on(tensor, current_stream(tensor.device))
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class Offload(Shared[Offloaded]):
    """Copies tensors of ``device`` to host memory and back, beside the computation.

    It holds at most ``most`` bytes on the device, or one tensor if the newest is larger. Three kinds of tensors are
    held there: tensors that are being copied, tensors that are not sent because backward reads them soon, and tensors
    that were brought back before backward reads them.

    Attributes:
        out, back: the bytes copied to the host and back, and the time of these copies by the device's clock.
        from_memory, ahead, in_vain, never_written: bytes, as in :class:`StoreReport`.
    """

    def __init__(self, device: torch.device, most: int, pin: bool, budget: ByteBudget) -> None:
        super().__init__()
        self.device, self.budget = device, budget
        self._in_flight = self._left = most  # ``_left`` is what a ``Tiered`` leaves of it
        self._of_tiers: set[Offloaded] = set()  # put by a ``Tiered``
        self._link, self.pool = link_of(device), pool_of(device, pin)
        self.out, self.back = Throughput(), Throughput()
        self.written = self.read = self.from_memory = self.ahead = self.in_vain = self.never_written = 0
        self._own = PerThread(TimedOrder)  # one order for each thread that puts
        self._staying: dict[Offloaded, None] = {}  # the oldest first
        self._flying: collections.deque[Offloaded] = collections.deque()  # the oldest first
        self._bytes = 0  # bytes of the tensors in these two
        self._coming: dict[Offloaded, None] = {}  # brought back before backward reads them, the oldest first
        self._back_bytes = 0  # of these
        self._alive: set[Offloaded] = set()  # put and not dropped
        self._dropped_in_use: collections.deque[Offloaded] = collections.deque()  # while copies use their host memory

    # -- for the threads of the computation

    def entry(self, tensor: torch.Tensor, of_tiers: bool = False) -> Offloaded:
        """An entry for ``tensor``, to be given to :meth:`put`; ``of_tiers`` if it is a tensor of a ``Tiered``."""
        return Offloaded(tensor.detach(), None if of_tiers else self._own())

    def put(self, entry: Offloaded) -> None:
        """Send the tensor of ``entry`` to the host, or keep it if backward reads it soon.

        A tensor of a ``Tiered`` is not kept. A copy begins when the work that is queued on the current stream now is
        done.

        Raises:
            OSError: if there is no host memory for the tensor, or for another one that has to make room for it.
        """
        with self._lock:
            self._apply_releases()
            self._alive.add(entry)
            if entry.order is None:
                self._of_tiers.add(entry)
            else:
                entry.order.put(entry)
            if not entry.nbytes:
                return
            entry.counted = entry.nbytes
            self._bytes += entry.nbytes
            if entry.order is not None and entry.order.is_back_soon(entry, self.most):
                self._staying[entry] = None
            else:
                self._send(entry)
            while self._on_device > self.most and self._relieve(entry):
                pass

    def get(self, entry: Offloaded) -> torch.Tensor:
        """The tensor of ``entry``, for the current stream: the one that was put if it is on the device, or a copy."""
        with self._lock:
            self._apply_releases()
            if entry.dropped:
                raise StoreError("a stored tensor was read after it was dropped")
            order = entry.order
            if order is None:
                return self._found(entry)
            # In some steps the read is timed, by an event before it and one after it.
            timed = order.is_timed(entry)
            came = event_on(current_stream(self.device), timed=True) if timed else None
            order.read(entry)
            found = self._found(entry)
            if came is not None:
                order.mark(entry, came, event_on(current_stream(self.device), timed=True))
            self._look_ahead(entry, order)
            return found

    def prefetch(self, entry: Offloaded) -> None:
        with self._lock:
            if entry.dropped or not entry.is_away or entry.coming is not None:
                return
            if self._has_room(entry) or not self._on_device:
                self._bring([entry], {entry})

    def drop(self, entry: Offloaded) -> None:
        """Release the tensor of ``entry``; destructors call this. See [Note: destructors].

        Memory that no copy uses is freed at once. The rest is freed when the link is next used.
        """
        if entry.dropped:
            return
        entry.tensor = None
        outgoing, coming = entry.outgoing, entry.coming
        is_idle = outgoing is None or outgoing.is_taken or entry.is_idle
        if coming is not None and coming.is_done():
            coming.tensor = None
        if outgoing is not None and outgoing.is_done():
            outgoing.source = None
        if is_idle:
            reserved, entry.reserved = entry.reserved, 0
            self.budget.release(reserved)
        entry.dropped = True  # last: after Ctrl-C the destructor does all of this once more
        self.release(entry)

    def wait(self) -> None:
        """Make the host wait until all tensors that are to be sent have arrived."""
        self._link.wait()
        with self._lock:
            self._apply_releases()

    def host_copy(self, entry: Offloaded) -> Outgoing | None:
        """The copy of ``entry``, for another store; None if it has none, or comes back just now."""
        with self._lock:
            self._apply_releases()
            return entry.outgoing if entry.coming is None else None

    def in_host(self, entry: Offloaded) -> torch.Tensor:
        """The tensor of ``entry`` in host memory. The host waits for the copy, which may begin only now."""
        with self._lock:
            self._apply_releases()
            tensor = entry.tensor
            if tensor is not None and not entry.nbytes:
                return tensor.cpu()
            if tensor is not None:
                self._staying.pop(entry, None)
                self._send(entry)
            outgoing = entry.outgoing
        if outgoing is None:
            raise StoreError("a stored tensor was read after it was dropped")
        return outgoing.wait()

    @property
    def in_flight(self) -> int:
        """Bytes on the device that are being copied to the host, or will be."""
        with self._lock:
            self._apply_releases()
            return self._bytes - sum(entry.counted for entry in self._staying)

    @property
    def device_bytes(self) -> int:
        with self._lock:
            self._apply_releases()
            return self._on_device

    @property
    def most(self) -> int:
        """The most bytes on the device: ``in_flight``, or what a ``Tiered`` leaves of it while it has tensors here."""
        return self._left if self._of_tiers else self._in_flight

    @property
    def device_room(self) -> int:
        """Bytes that may be brought back now."""
        with self._lock:
            self._apply_releases()
            return self.most - self._on_device

    def set_device_limit(self, nbytes: int) -> int:
        """Hold at most ``nbytes`` on the device, and at most ``in_flight``, while a ``Tiered`` has tensors here.

        If copies are still under way, the computation on the device waits for them; the host does not.

        Returns:
            The bytes that were on the device before.
        """
        with self._lock:
            self._apply_releases()
            before = now = self._on_device
            self._left = min(nbytes, self._in_flight)
            while now > self._left and self._relieve(None):
                now = self._on_device
            return before

    def wait_for_memory(self) -> bool:
        """Make the host wait for the oldest copy of a dropped tensor. Returns False if there is none."""
        with self._lock:
            had_reserved = bool(
                self._releases or self._dropped_in_use
            )  # applying releases gives bytes back, maybe enough of them
            self._apply_releases()
            entry = self._dropped_in_use[0] if self._dropped_in_use else None
        if entry is None:
            return had_reserved
        entry.wait()
        with self._lock:
            self._apply_releases()
        return True

    def release_idle(self) -> None:
        with self._lock:
            self._apply_releases()
        self.pool.clear()

    # -- to the host, under the lock

    def _send(self, entry: Offloaded) -> None:
        """Send the tensor of ``entry``, unless it was dropped, in the order of the stream that made it."""
        tensor = entry.tensor
        if tensor is None:
            return
        with on(entry.stream):  # this thread may work on another stream now
            lease = self.pool.lease(entry.nbytes)
            outgoing = self._link.send(tensor, tensor_over(lease, tensor.shape, tensor.dtype), self.out)
        outgoing.lease = lease
        self._flying.append(entry)
        entry.outgoing, entry.counted, entry.tensor = outgoing, 0, None
        self.written += entry.nbytes

    def _relieve(self, newest: Offloaded | None) -> bool:
        """Free device memory of one tensor, but not of ``newest``. The host does not wait.

        Returns:
            Whether there was one.
        """
        # The oldest copy under way: the computation waits for it, and its memory is used again.
        entry = next((entry for entry in self._flying if entry is not newest), None)
        if entry is not None:
            if entry.outgoing is not None:  # or its copy has just ended, and it was dropped before
                self._link.let_go(entry.outgoing)
            self._landed(entry)
            return True
        oldest = next((entry for entry in self._staying if entry is not newest), None)
        if oldest is not None:  # it was to stay, but this forward puts more than the last one did
            self._send(oldest)
            self._staying.pop(oldest, None)
        return oldest is not None

    def _landed(self, entry: Offloaded) -> None:
        self._flying.remove(entry)
        self._bytes -= entry.nbytes

    def _apply_releases(self) -> None:
        self._link.poll()
        while self._flying and ((outgoing := self._flying[0].outgoing) is None or outgoing.source is None):
            self._landed(self._flying[0])
        super()._apply_releases()
        while self._dropped_in_use and self._dropped_in_use[0].is_idle:
            entry = self._dropped_in_use.popleft()
            reserved, entry.reserved, entry.outgoing = entry.reserved, 0, None
            self.budget.release(reserved)
        if not self._alive:  # Ctrl-C may have left other values
            self._staying.clear()
            self._bytes = sum(entry.nbytes for entry in self._flying)
        if not self._coming:
            self._back_bytes = 0

    def _apply_release(self, release: Offloaded) -> None:
        entry = release
        if entry.order is not None:
            entry.order.drop(entry)
        self._alive.discard(entry)
        self._of_tiers.discard(entry)
        self._staying.pop(entry, None)
        self._bytes -= entry.counted
        self.never_written += entry.counted
        entry.counted = 0
        self._give_up(entry)
        if entry.reserved:
            self._dropped_in_use.append(entry)
        elif entry.is_away:
            entry.outgoing = None

    # -- to the device, under the lock

    def _found(self, entry: Offloaded) -> torch.Tensor:
        """The tensor of ``entry`` for the current stream, from the nearest memory that has it."""
        tensor = entry.tensor
        if tensor is None and entry.outgoing is not None:
            tensor = entry.outgoing.source  # it was sent, and is still on the device
        if tensor is not None:
            self.from_memory += entry.nbytes
            return entry.itself(tensor)
        # It is in host memory: take the copy that began before, or begin one now.
        coming = entry.coming
        if coming is None or coming.tensor is None:  # an interrupted read may have taken the tensor
            coming = entry.coming = self._bring_now(entry)
        else:
            self.ahead += entry.nbytes
        back = self._link.take(coming)
        self._is_taken(entry)
        return back

    def _bring_now(self, entry: Offloaded) -> Coming:
        outgoing = entry.outgoing
        assert outgoing is not None
        coming = self._link.bring(outgoing.host, outgoing.done, self.back)
        self.read += entry.nbytes
        return coming

    def _is_taken(self, entry: Offloaded) -> None:
        if entry in self._coming:
            del self._coming[entry]
            self._back_bytes -= entry.nbytes
        if entry.coming is not None:
            entry.came, entry.coming = entry.coming.done, None

    def _give_up(self, entry: Offloaded) -> None:
        """Free the copy of ``entry`` that came back early."""
        if entry.coming is not None:
            self.in_vain += entry.nbytes
            self._is_taken(entry)  # the link holds the memory on the device until the copy into it is done

    def _look_ahead(self, entry: Offloaded, order: TimedOrder) -> None:
        """Bring back the tensors that backward reads after ``entry``, each just in time.

        A tensor that comes back too early takes memory from the computation.
        """
        times = order.times()
        due: dict[Offloaded, float] = {}  # in the order of reads, with the time at which backward reads each
        following = cast("Iterable[tuple[Offloaded, float]]", order.after(entry))
        soonest, room = None, self.most - self._on_device + sum(other.nbytes for other in self._coming)
        for other, _ in itertools.islice(following, _AHEAD):
            at = times.get(other.position)
            soonest = at if soonest is None else soonest
            if not other.is_away or other in due:
                continue
            room -= other.nbytes
            if due and room < 0:
                break  # the first one may be larger than the room
            due[other] = math.nan if at is None else at
        if due:
            count = self._how_many(due, times.get(entry.position), soonest)
            self._bring([other for other in itertools.islice(due, count) if other.coming is None], due)

    def _how_many(self, due: Mapping[Offloaded, float], now: float | None, soonest: float | None) -> int:
        """How many tensors of ``due`` must be on their way before the computation reads next, at ``soonest``."""
        pace = self._link.back.pace
        if pace is None or now is None or soonest is None or any(math.isnan(at) for at in due.values()):
            return len(due)  # the speed or the times are not known: bring as many as fit
        # From the last to the first: the latest moment at which each copy has to begin, so that it and those behind it
        # are done in time.
        latest, count = math.inf, 1
        for place, (entry, at) in reversed(list(enumerate(due.items()))):
            coming = entry.coming
            takes = 0.0 if coming is not None and coming.is_done() else _MARGIN * entry.nbytes * pace
            latest = min(latest, at) - takes
            if latest <= soonest:
                count = max(count, place + 1)
        return count

    def _bring(self, entries: Iterable[Offloaded], wanted: Mapping[Offloaded, float] | set[Offloaded]) -> None:
        """Begin to copy ``entries`` back while there is room.

        Those that are not in ``wanted`` are given up for them.
        """
        for entry in entries:
            needless = [other for other in self._coming if other not in wanted]
            while needless and not self._has_room(entry):
                self._give_up(needless.pop(0))
            if self._on_device and not self._has_room(entry):
                return
            try:
                entry.coming = self._bring_now(entry)
            except torch.OutOfMemoryError:
                return  # there may be memory when backward reads the tensor: `get` tries again
            self._coming[entry] = None
            self._back_bytes += entry.nbytes

    def _has_room(self, entry: Offloaded) -> bool:
        return self._on_device + entry.nbytes <= self.most

    @property
    def _on_device(self) -> int:
        return self._bytes + self._back_bytes
