"""Copies of the tensors of one device to host memory and back: what is sent, what stays, and what comes back early."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch

from disthooks._fork_safe import ForkSafe, Order
from disthooks._streams import current_stream, event_on, on
from disthooks.errors import StoreError
from disthooks.saved.stores.device_copy import Batch, Carried, Owed, Parcel, Throughput, join, link_of
from disthooks.saved.stores.order import Lane, PerThread
from disthooks.saved.stores.pools import pool_of

SMALL = 64 << 10  # bytes: smaller tensors share one copy, because each copy has a fixed cost (decision 41)
JOINED = 1 << 20  # bytes: when the small tensors of a stream have so many, they are copied
_LOOK = 64  # tickets to look ahead: backward departs from the expected order by a few, so more would only cost time
_MARGIN = 1.5  # a copy is expected to take up to so many times as long as the last copies took


class Courier(ForkSafe[Carried]):
    """Copies tensors of ``device`` to host memory and back, beside the computation.

    It holds at most ``most`` bytes on the device, or one parcel if the newest is larger. Four kinds of tensors are held
    there: tensors that are being copied, tensors that are not sent because backward reads them soon, tensors that were
    brought back before backward reads them, and small tensors that came back because they share a copy with another.

    Args:
        device: an accelerator, with its index.
        most: bytes.
        pin: whether host memory is page-locked.

    Attributes:
        out, back: the bytes copied to the host and back, and the time of these copies by the device's clock.
        from_memory, ahead, in_vain, never_written: bytes, as in :class:`StoreReport`.
    """

    def __init__(self, device: torch.device, most: int, pin: bool) -> None:
        super().__init__(Order.IN_FLIGHT)
        self.device, self.most = device, most
        self._is_governed = False  # whether a ``Tiered`` sets ``most`` and says what comes back early
        self._link, self.pool = link_of(device), pool_of(device, pin)
        self.out, self.back = Throughput(), Throughput()
        self.written = self.read = self.from_memory = self.ahead = self.in_vain = self.never_written = 0
        self._own = PerThread(Lane)  # one lane for each thread that puts
        self._staying: dict[Carried, None] = {}  # the oldest first
        self._batches: dict[int, Batch] = {}  # small tensors, by the stream that made them
        self._flying: collections.deque[Parcel] = collections.deque()  # the oldest first
        self._bytes = 0  # bytes of the tensors in these three
        self._coming: dict[Parcel, None] = {}  # brought back before backward reads them, the oldest first
        self._coming_bytes = 0
        self._cached: dict[Parcel, None] = {}  # joined, and back until all their tensors are read; the oldest first
        self._cached_bytes = 0
        self.owed = Owed()  # bytes of dropped tensors whose host memory is still being copied

    # -- for the threads of the computation

    def ticket(self, tensor: torch.Tensor) -> Carried:
        """A ticket for ``tensor``, to be given to :meth:`put`."""
        return Carried(tensor.detach(), self._own())

    def put(self, ticket: Carried, may_stay: bool = True) -> None:
        """Send the tensor of ``ticket`` to the host, add it to a batch, or keep it if backward reads it soon.

        With ``may_stay=False`` it is not kept. A copy begins when the work that is queued on the current stream now is
        done.

        Raises:
            OSError: if there is no host memory for the tensor, or for another one that has to make room for it.
        """
        with self._lock:
            self._drain_releases()
            ticket.lane.put(ticket)
            if not ticket.nbytes:
                return
            ticket.counted = ticket.nbytes
            self._bytes += ticket.nbytes
            if may_stay and ticket.lane.is_back_soon(ticket, self.most):
                self._staying[ticket] = None
            elif ticket.nbytes > SMALL:
                self._ship([ticket])
            else:
                # Small tensors of one stream share a copy.
                number = ticket.stream.stream_id
                batch = self._batches.get(number)
                if batch is None:
                    batch = self._batches[number] = Batch(min(JOINED, self.most // 8))
                if batch.add(ticket):
                    self._flush([number])
            while self._on_device > self.most and self._relieve(ticket):
                pass

    def get(self, ticket: Carried) -> torch.Tensor:
        """The tensor of ``ticket``, for the current stream: the one that was put if it is on the device, or a copy."""
        with self._lock:
            self._drain_releases()
            if ticket.dropped:
                raise StoreError("a stored tensor was read after it was dropped")
            # In some steps the read is timed, by an event before it and one after it.
            timed = ticket.lane.is_timed(ticket)
            came = event_on(current_stream(self.device), timed=True) if timed else None
            ticket.lane.read(ticket)
            found = self._found(ticket)
            if came is not None:
                ticket.lane.mark(ticket, came, event_on(current_stream(self.device), timed=True))
            if not self._is_governed:
                self._look_ahead(ticket)
            return found

    def prefetch(self, ticket: Carried) -> None:
        """Begin to bring the tensor of ``ticket`` back, because backward reads it soon; only if there is room."""
        with self._lock:
            self._drain_releases()
            parcel = ticket.parcel
            if parcel is None or ticket.dropped or parcel.is_there or parcel.coming:
                return
            if self._has_room(parcel) or not self._on_device:
                self._bring([parcel], {parcel})

    def drop(self, ticket: Carried) -> None:
        """Release the tensor of ``ticket``; destructors call this. See [Note: destructors].

        Memory that no copy uses is freed at once. The rest is freed when the link is next used.
        """
        if ticket.dropped:
            return
        parcel = ticket.parcel
        ticket.dropped, ticket.tensor = True, None  # no interrupt comes before the next call
        self.release(ticket)
        if parcel is not None and not parcel.joined:
            coming = parcel.coming
            if coming is not None and coming.is_done():
                coming.tensor = None
            if parcel.outgoing.is_done():
                parcel.outgoing.source = None

    def wait(self) -> None:
        """Make the host wait until all tensors that are to be sent have arrived."""
        with self._lock:
            self._drain_releases()
            self._flush()
        self._link.wait()
        with self._lock:
            self._drain_releases()

    def in_host(self, ticket: Carried) -> torch.Tensor:
        """The tensor of ``ticket`` in host memory. The host waits for the copy, which may begin only now."""
        with self._lock:
            self._drain_releases()
            tensor = ticket.tensor
            if tensor is not None and not ticket.nbytes:
                return tensor.cpu()
            if tensor is not None:
                self._staying.pop(ticket, None)
                self._ship([ticket])
            parcel = ticket.parcel
        if parcel is None:
            raise StoreError("a stored tensor was read after it was dropped")
        return parcel.in_host(ticket)

    @property
    def in_flight(self) -> int:
        """Bytes on the device that are being copied to the host, or will be."""
        with self._lock:
            self._drain_releases()
            return self._bytes - sum(ticket.counted for ticket in self._staying)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, of any kind."""
        with self._lock:
            self._drain_releases()
            return self._on_device

    def set_device_limit(self, nbytes: int) -> None:
        """Hold at most ``nbytes`` on the device, in place of ``in_flight``.

        If copies are still under way, the computation on the device waits for them; the host does not.
        """
        with self._lock:
            self._drain_releases()
            self.most, self._is_governed = nbytes, True
            while self._on_device > self.most and self._relieve(None):
                pass

    def wait_for_memory(self) -> bool:
        """Make the host wait for the oldest copy of a dropped tensor. Returns False if there is none."""
        with self._lock:
            was_owed = bool(self._releases or self.owed.parcel)  # draining gives bytes back, maybe enough of them
            self._drain_releases()
            parcel = self.owed.parcel
        if parcel is None:
            return was_owed
        parcel.wait()
        with self._lock:
            self._drain_releases()
        return True

    def release_idle(self) -> None:
        """Free the memory of copies that are done, and idle host memory."""
        with self._lock:
            self._drain_releases()
        self.pool.clear()

    # -- to the host, under the lock

    def _flush(self, streams: Iterable[int] | None = None) -> None:
        for number in list(self._batches if streams is None else streams):
            self._ship(self._batches[number].tickets)
            del self._batches[number]

    def _ship(self, tickets: Sequence[Carried]) -> None:
        """Send those of ``tickets`` that were not dropped, in one copy, in the order of the stream that made them."""
        found = [(ticket, ticket.tensor) for ticket in tickets if ticket.parcel is None]
        held = [(ticket, tensor) for ticket, tensor in found if tensor is not None]  # dropped tickets have no tensor
        if not held:
            return
        members, tensors = [ticket for ticket, _ in held], [tensor for _, tensor in held]
        with on(members[0].stream):  # this thread may work on another stream now
            source = join(members, tensors) if len(held) > 1 else tensors[0]
            outgoing = self._link.send(source, self.pool.tensor(source.shape, source.dtype), self.out)
            parcel = Parcel(members, outgoing, joined=len(held) > 1)
        self._flying.append(parcel)
        for ticket in members:
            ticket.parcel, ticket.counted = parcel, 0
            ticket.tensor = None
        self.written += parcel.nbytes

    def _relieve(self, newest: Carried | None) -> bool:
        """Free device memory of one parcel or ticket, but not of ``newest``. The host does not wait.

        Returns:
            Whether there was one.
        """
        if self._cached:  # the host has it, too; a later read brings it again
            self._forget(next(iter(self._cached)))
            return True
        # The oldest copy under way: the computation waits for it, and its memory is used again.
        newly = None if newest is None else newest.parcel
        parcel = next((parcel for parcel in self._flying if parcel is not newly), None)
        if parcel is not None:
            self._link.let_go(parcel.outgoing)
            self._landed(parcel)
            return True
        oldest = next((ticket for ticket in self._staying if ticket is not newest), None)
        if oldest is not None:  # it was to stay, but this forward puts more than the last one did
            self._ship([oldest])
            self._staying.pop(oldest, None)
        return oldest is not None

    def _landed(self, parcel: Parcel) -> None:
        self._flying.remove(parcel)
        self._bytes -= parcel.nbytes

    def _drain_releases(self) -> None:
        self._link.poll()
        while self._flying and self._flying[0].outgoing.source is None:
            self._landed(self._flying[0])
        super()._drain_releases()
        self.owed.poll()
        if not self._bytes:
            self._batches.clear()  # all tensors in them were dropped
        elif not (self._flying or self._staying or self._batches):
            self._bytes = 0  # an interrupt may have left another value; see [Note: interrupts]
        if not self._coming:
            self._coming_bytes = 0
        if not self._cached:
            self._cached_bytes = 0

    def _apply_release(self, release: Carried) -> None:
        release.lane.drop(release)
        self._staying.pop(release, None)
        self._bytes -= release.counted
        self.never_written += release.counted
        release.counted = 0
        if release.parcel is not None:
            self._let_go(release, release.parcel)

    def _let_go(self, ticket: Carried, parcel: Parcel) -> None:
        parcel.members.discard(ticket)
        parcel.done_with(ticket)
        if parcel.whole is None:
            self._forget(parcel)
        if not parcel.members:
            self._give_up(parcel)
        ticket.parcel = None  # last: after an interrupt the release is applied once more

    # -- to the device, under the lock

    def _found(self, ticket: Carried) -> torch.Tensor:
        """The tensor of ``ticket`` for the current stream, from the nearest memory that has it."""
        tensor, parcel = ticket.tensor, ticket.parcel
        source = None if parcel is None else parcel.outgoing.source
        if parcel is None or source is not None:
            self.from_memory += ticket.nbytes
        if parcel is None:  # it was never sent
            assert tensor is not None
            return ticket.itself(tensor)
        if source is not None:  # it was sent, and is still on the device
            return parcel.from_source(ticket, source)
        if parcel.whole is not None:  # it came back with another tensor of its parcel
            return self._part_of(parcel, ticket, None)
        # It is in host memory: take the copy that began before, or begin one now.
        coming = parcel.coming
        if coming is None or coming.tensor is None:  # an interrupted read may have taken the tensor
            coming = parcel.coming = self._link.bring(parcel.outgoing, self.back)
            self.read += parcel.nbytes
        else:
            self.ahead += parcel.nbytes
        back = self._link.take(coming)
        self._is_taken(parcel)
        return self._part_of(parcel, ticket, back)

    def _part_of(self, parcel: Parcel, ticket: Carried, back: torch.Tensor | None) -> torch.Tensor:
        """The tensor of ``ticket`` from ``back``, or from the joined tensor of ``parcel``, which is there already."""
        found = parcel.from_back(ticket, back)
        if parcel.whole is None:
            self._forget(parcel)
            return found
        if parcel not in self._cached:
            self._cached[parcel] = None
            self._cached_bytes += parcel.nbytes
        while self._on_device > self.most and (oldest := next(iter(self._cached))) is not parcel:
            self._forget(oldest)
        return found

    def _forget(self, parcel: Parcel) -> None:
        """Free the joined tensor of ``parcel`` that came back."""
        parcel.whole = None
        if parcel in self._cached:
            del self._cached[parcel]
            self._cached_bytes -= parcel.nbytes

    def _is_taken(self, parcel: Parcel) -> None:
        if parcel in self._coming:
            del self._coming[parcel]
            self._coming_bytes -= parcel.nbytes
        if parcel.coming is not None:
            parcel.came, parcel.coming = parcel.coming.done, None

    def _give_up(self, parcel: Parcel) -> None:
        """Free the copy of ``parcel`` that came back early; if it has no members left, give their bytes back too."""
        if parcel.owed and not parcel.members:
            self.owed.add(parcel, parcel.owed)
        if parcel.coming is not None:
            self.in_vain += parcel.nbytes
            self._is_taken(parcel)  # the link holds the memory on the device until the copy into it is done

    def _look_ahead(self, ticket: Carried) -> None:
        """Bring back the tensors that backward reads after ``ticket``, each just in time.

        A tensor that comes back too early takes memory from the computation.
        """
        times = ticket.lane.times()
        due: dict[Parcel, float] = {}  # in the order of reads, with the time at which backward reads each
        following = cast("Iterable[tuple[Carried, float]]", ticket.lane.after(ticket))
        soonest, room = None, self.most - self._bytes - self._cached_bytes
        for other, _ in itertools.islice(following, _LOOK):
            at, parcel = times.get(other.position), other.parcel
            soonest = at if soonest is None else soonest
            if parcel is None or parcel.is_there or parcel in due:
                continue
            room -= parcel.nbytes
            if due and room < 0:
                break  # the first one may be larger than the room
            due[parcel] = math.nan if at is None else at
        if due:
            count = self._how_many(due, times.get(ticket.position), soonest)
            self._bring([parcel for parcel in itertools.islice(due, count) if parcel.coming is None], due)

    def _how_many(self, due: Mapping[Parcel, float], now: float | None, soonest: float | None) -> int:
        """How many parcels of ``due`` must be on their way before the computation reads next, at ``soonest``."""
        pace = self._link.back.pace
        if pace is None or now is None or soonest is None or any(math.isnan(at) for at in due.values()):
            return len(due)  # the speed or the times are not known: bring as many as fit
        # From the last to the first: the latest moment at which each copy has to begin, so that it and those behind it
        # are done in time.
        latest, count = math.inf, 1
        for place, (parcel, at) in reversed(list(enumerate(due.items()))):
            coming = parcel.coming
            takes = 0.0 if coming is not None and coming.is_done() else _MARGIN * parcel.nbytes * pace
            latest = min(latest, at) - takes
            if latest <= soonest:
                count = max(count, place + 1)
        return count

    def _bring(self, parcels: Iterable[Parcel], wanted: Mapping[Parcel, float] | set[Parcel]) -> None:
        """Begin to copy ``parcels`` back while there is room.

        Parcels that are not in ``wanted`` are given up for them.
        """
        for parcel in parcels:
            needless = [other for other in self._coming if other not in wanted]
            while needless and not self._has_room(parcel):
                self._give_up(needless.pop(0))
            while len(self._cached) > 1 and not self._has_room(parcel):  # backward reads the newest one now
                self._forget(next(iter(self._cached)))
            if self._on_device and not self._has_room(parcel):
                return
            try:
                parcel.coming = self._link.bring(parcel.outgoing, self.back)
            except torch.OutOfMemoryError:
                return  # there may be memory when backward reads the tensor: `get` tries again
            self.read += parcel.nbytes
            self._coming[parcel] = None
            self._coming_bytes += parcel.nbytes

    def _has_room(self, parcel: Parcel) -> bool:
        return self._on_device + parcel.nbytes <= self.most

    @property
    def _on_device(self) -> int:
        return self._bytes + self._coming_bytes + self._cached_bytes
