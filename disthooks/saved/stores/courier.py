"""A device's tensor in a store, and what goes to the host and back in one copy.

Tensors of one device that are kept in host memory: sent while the forward goes on, back before they are wanted.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch

from disthooks._fork_safe import Order, shared
from disthooks._streams import current_stream, event_on, handed_over, on, used_on
from disthooks.errors import StoreError
from disthooks.saved.stores.order import PerThread
from disthooks.saved.stores.pools import pool_of
from disthooks.saved.stores.transfer import Coming, Lane, Outgoing, Throughput, link_of

SMALL = 64 << 10  # bytes: smaller ones go together, for a copy has its price whatever its size
JOINED = 1 << 20  # bytes of small ones that are worth a copy


class Carried:
    """One tensor of a device that was put: there still, or in a parcel.

    Attributes:
        tensor: itself, as long as it was not sent.
        own: whether that is a copy of what was put, which nobody else knows.
        counted: bytes of it that count as held on the device, apart from its parcel.
        parcel: what it was sent in.
        offset: where it begins in that.
        stream: the one in whose order the tensor was filled, as far as it was when it was put.
    """

    __slots__ = (
        "counted",
        "device",
        "dropped",
        "dtype",
        "lane",
        "nbytes",
        "offset",
        "owed",
        "own",
        "parcel",
        "position",
        "shape",
        "stream",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, lane: Lane) -> None:
        self.nbytes, self.shape, self.dtype, self.device = tensor.nbytes, tensor.shape, tensor.dtype, tensor.device
        self.lane, self.stream = lane, current_stream(tensor.device)
        # A part of something much larger would keep all of it.
        self.own = not _is_plain(tensor) or tensor.untyped_storage().nbytes() > 2 * self.nbytes
        self.tensor: torch.Tensor | None = _copy(tensor) if self.own else tensor
        self.position, self.dropped = 0, False
        self.counted = self.owed = 0
        self.parcel: Parcel | None = None
        self.offset = 0

    def itself(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which was put, for the current stream: a copy where nobody else is to write to it."""
        tensor = handed_over(tensor, self.stream)
        return tensor.clone() if self.own else tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    used_on(tensor, current_stream(tensor.device))
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class Parcel:
    """What goes in one copy, each way: a tensor, or many small ones in one 1-D uint8 tensor.

    Attributes:
        members: the tickets in it that are not dropped.
        coming: what is on its way back, before anybody wants it.
        came: the end of the last copy back.
        whole: small ones that came back, until each of them was read.
    """

    __slots__ = (
        "__weakref__",
        "_stream",
        "_unread",
        "came",
        "coming",
        "joined",
        "members",
        "nbytes",
        "outgoing",
        "owed",
        "whole",
    )

    def __init__(self, members: Sequence[Carried], outgoing: Outgoing, joined: bool) -> None:
        self.members, self.outgoing, self.joined = set(members), outgoing, joined
        self.nbytes = outgoing.host.nbytes
        self.coming: Coming | None = None
        self.came: torch.Event | None = None
        self.whole: torch.Tensor | None = None
        self._stream = current_stream(outgoing.device)  # that fills ``whole``, or the source of several
        self._unread: set[Carried] = set()
        # Of members that were dropped: who counts their bytes, which are host memory as long as another one is alive.
        self.owed: collections.deque[tuple[Callable[[int], None], int]] = collections.deque()

    @property
    def is_there(self) -> bool:
        """Whether it is on the device, for anybody who wants it."""
        return self.outgoing.source is not None or self.whole is not None

    @property
    def is_idle(self) -> bool:
        """Whether no copy is at its host memory any more."""
        return self.outgoing.is_done() and (self.came is None or self.came.query())  # nobody captures: see is_done

    def wait(self) -> None:
        """Wait on the host until that is so."""
        self.outgoing.wait()
        if self.came is not None:
            self.came.synchronize()

    def from_source(self, ticket: Carried, source: torch.Tensor) -> torch.Tensor:
        """The tensor of ``ticket`` from what is still held of what was sent."""
        if self.joined:
            return self._part(ticket, handed_over(source, self._stream))
        return ticket.itself(source)

    def from_back(self, ticket: Carried, back: torch.Tensor | None) -> torch.Tensor:
        """The tensor of ``ticket`` from what came ``back`` now, for the current stream; None: which came before."""
        if not self.joined and back is not None:
            return back
        if back is not None:
            self.whole, self._stream, self._unread = back, current_stream(back.device), set(self.members)
        assert self.whole is not None
        part = self._part(ticket, handed_over(self.whole, self._stream))
        self.done_with(ticket)
        return part

    def done_with(self, ticket: Carried) -> None:
        """``ticket`` was read, or is dropped."""
        self._unread.discard(ticket)
        if not self._unread:
            self.whole = None

    def in_host(self, ticket: Carried) -> torch.Tensor:
        """The tensor of ``ticket`` in host memory, once it is there; the host waits."""
        host = self.outgoing.wait()
        return self._part(ticket, host) if self.joined else host

    @staticmethod
    def _part(ticket: Carried, whole: torch.Tensor) -> torch.Tensor:
        # Its own memory: it may be written to, and is let go of alone.
        return whole[ticket.offset : ticket.offset + ticket.nbytes].clone().view(ticket.dtype).view(ticket.shape)


class Batch:
    """Small tensors that were made on one stream and will go together, about ``enough`` bytes."""

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self.tickets: list[Carried] = []
        self.nbytes = 0

    def add(self, ticket: Carried) -> bool:
        """Whether it is full with ``ticket``."""
        self.tickets.append(ticket)
        self.nbytes += ticket.nbytes
        return self.nbytes >= self._enough


def join(tickets: Sequence[Carried], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of ``tensors`` one behind the other, on the current stream; each ticket knows where its own begin."""
    stream, end = current_stream(tensors[0].device), 0
    for ticket, tensor in zip(tickets, tensors, strict=True):
        ticket.offset = end
        end += ticket.nbytes
        used_on(tensor, stream)
    return torch.cat([tensor.detach().view(-1).view(torch.uint8) for tensor in tensors])


class Owed:
    """Bytes of host memory that nobody wants any more and that copies are still at: they count until those are done."""

    def __init__(self) -> None:
        self._all: collections.deque[tuple[Parcel, Callable[[int], None], int]] = collections.deque()

    def give_back(self, parcel: Parcel | None, release: Callable[[int], None], nbytes: int) -> None:
        """``release`` these bytes of ``parcel``, now or later; called from destructors."""
        if parcel is None or parcel.is_idle:
            release(nbytes)
        elif nbytes:
            self._all.append((parcel, release, nbytes))

    def settle(self) -> bool:
        """Give back what can be by now, in the order of the copies; whether anything was owed."""
        owed = bool(self._all)
        with contextlib.suppress(IndexError):  # there are none, or another thread was faster
            while True:
                parcel, release, nbytes = self._all.popleft()
                if not parcel.is_idle:
                    self._all.appendleft((parcel, release, nbytes))
                    break
                release(nbytes)
        return owed

    def wait(self) -> bool:
        """Wait on the host for the oldest; False when nothing was owed."""
        if not self.settle():
            return False
        with contextlib.suppress(IndexError):
            self._all[0][0].wait()
        self.settle()
        return True


_LOOK = 64  # tickets: backward leaves the expected order by a few, so more would only cost time
_MARGIN = 1.5  # a copy may take so many times what the last ones took


class Courier:
    """Takes tensors of ``device`` to host memory and brings them back, beside the computation.

    On the device it holds at most ``most`` bytes, and always the newest tensor: what is being copied, what was not
    sent because it comes back at once, and what was brought back before it is wanted.

    Args:
        device: an accelerator, with its index.
        most: bytes.
        pin: whether host memory is page-locked.

    Attributes:
        out, back: what was copied, and how long that took, by the device's clock.
        from_memory, ahead, in_vain, never_written: bytes, as in :class:`StoreReport`.
    """

    def __init__(self, device: torch.device, most: int, pin: bool) -> None:
        self.device, self.most, self._own_most = device, most, most
        self._link, self.pool = link_of(device), pool_of(device, pin)
        self.out, self.back = Throughput(), Throughput()
        self.written = self.read = self.from_memory = self.ahead = self.in_vain = self.never_written = 0
        self._own = PerThread(Lane)  # the lane of each thread that puts
        self._staying: dict[Carried, None] = {}  # the oldest first
        self._batches: dict[int, Batch] = {}  # by the stream that made what is in them
        self._flying: collections.deque[Parcel] = collections.deque()  # the oldest first
        self._bytes = 0  # of these three
        self._coming: dict[Parcel, None] = {}  # ahead, the oldest first
        self._coming_bytes = 0
        self._dropped: collections.deque[Carried] = collections.deque()
        self.owed = Owed()
        self._lock = shared(Order.MOVER)

    # -- for the threads of the computation

    def ticket(self, tensor: torch.Tensor) -> Carried:
        """A ticket to put."""
        return Carried(tensor.detach(), self._own())

    def put(self, ticket: Carried) -> None:
        """Have the tensor of ``ticket`` sent, after what the current stream was given so far; or later, or never.

        Raises:
            OSError: when there is no host memory for it, or for one that has to make room for it.
        """
        with self._lock:
            self._settle()
            ticket.lane.put(ticket)
            if not ticket.nbytes:
                return
            ticket.counted = ticket.nbytes
            self._bytes += ticket.nbytes
            if ticket.lane.is_back_soon(ticket, self.most):
                self._staying[ticket] = None
            else:
                self._send(ticket)
            while self._bytes + self._coming_bytes > self.most and self._relieve(ticket):
                pass

    def get(self, ticket: Carried) -> torch.Tensor:
        """The tensor of ``ticket`` for the current stream: what was put while that is held, or a copy."""
        with self._lock:
            self._settle()
            if ticket.dropped:
                raise StoreError("a stored tensor is asked for after it was dropped")
            timed = ticket.lane.is_timed(ticket)
            came = event_on(current_stream(self.device), timed=True) if timed else None
            ticket.lane.read(ticket)
            found = self._found(ticket)
            if came is not None:
                ticket.lane.mark(ticket, came, event_on(current_stream(self.device), timed=True))
            self._look_ahead(ticket)
            return found

    def prefetch(self, ticket: Carried) -> None:
        """``ticket`` will be wanted soon."""
        with self._lock:
            self._settle()
            parcel = ticket.parcel
            if parcel is not None and not (ticket.dropped or parcel.is_there or parcel.coming):
                self._bring([parcel], {parcel})

    def drop(self, ticket: Carried) -> None:
        """``ticket`` is not wanted any more; called from destructors, so it waits for nothing and takes no lock.

        What the device is done with goes at once, the rest when the link is next used.
        """
        if ticket.dropped:
            return
        ticket.dropped, ticket.tensor = True, None
        parcel = ticket.parcel
        if parcel is not None and not parcel.joined:
            coming = parcel.coming
            if coming is not None and coming.is_done():
                coming.tensor = None
            if parcel.outgoing.is_done():
                parcel.outgoing.source = None
        self._dropped.append(ticket)

    def wait(self) -> None:
        """Wait on the host until all that is to be sent has arrived."""
        with self._lock:
            self._settle()
            self._flush()
        self._link.wait()
        with self._lock:
            self._settle()

    def in_host(self, ticket: Carried) -> torch.Tensor:
        """The tensor of ``ticket`` in host memory; the host waits for the copy, which may only begin now."""
        with self._lock:
            self._settle()
            tensor = ticket.tensor
            if tensor is not None and not ticket.nbytes:
                return tensor.cpu()
            if tensor is not None:
                self._staying.pop(ticket, None)
                self._ship([ticket])
            parcel = ticket.parcel
        if parcel is None:
            raise StoreError("a stored tensor is asked for after it was dropped")
        return parcel.in_host(ticket)

    @property
    def in_flight(self) -> int:
        """Bytes on the device that are being copied, or will be."""
        with self._lock:
            self._settle()
            return self._bytes - sum(ticket.counted for ticket in self._staying)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, of any kind."""
        with self._lock:
            self._settle()
            return self._bytes + self._coming_bytes

    def set_device_limit(self, nbytes: int) -> None:
        """Hold at most ``nbytes`` on the device, if that is less than ``most``; the computation waits if it has to."""
        with self._lock:
            self._settle()
            self.most = min(self._own_most, nbytes)
            while self._bytes + self._coming_bytes > self.most and self._relieve(None):
                pass

    def wait_for_memory(self) -> bool:
        """Wait on the host for the oldest copy of what nobody wants any more; False when there is none."""
        with self._lock:
            had_dropped = bool(self._dropped)
            self._settle()
        return self.owed.wait() or had_dropped

    def release_idle(self) -> None:
        """Let go of what is done, and of host memory that is idle."""
        with self._lock:
            self._settle()
        self.pool.clear()

    # -- to the host, under the lock

    def _send(self, ticket: Carried) -> None:
        if ticket.nbytes > SMALL:
            self._ship([ticket])
            return
        number = ticket.stream.stream_id
        batch = self._batches.get(number)
        if batch is None:
            batch = self._batches[number] = Batch(min(JOINED, self.most // 8))
        if batch.add(ticket):
            self._flush([number])

    def _flush(self, streams: Iterable[int] | None = None) -> None:
        for number in list(self._batches if streams is None else streams):
            self._ship(self._batches[number].tickets)
            del self._batches[number]

    def _ship(self, tickets: Sequence[Carried]) -> None:
        """Send what there still is of ``tickets``, on the stream that made them, in one copy."""
        found = [(ticket, ticket.tensor) for ticket in tickets if ticket.parcel is None]
        held = [(ticket, tensor) for ticket, tensor in found if tensor is not None]  # the others were dropped
        if not held:
            return
        members, tensors = [ticket for ticket, _ in held], [tensor for _, tensor in held]
        with on(members[0].stream):  # whoever is in need of room, or of a copy, may work on another one
            source = join(members, tensors) if len(held) > 1 else tensors[0]
            outgoing = self._link.send(source, self.pool.tensor(source.shape, source.dtype), self.out)
            parcel = Parcel(members, outgoing, joined=len(held) > 1)
        self._flying.append(parcel)
        for ticket in members:
            ticket.parcel, ticket.counted = parcel, 0
            ticket.tensor = None
        self.written += parcel.nbytes

    def _relieve(self, newest: Carried | None) -> bool:
        """Hold less on the device, without waiting on the host; False when there is no way."""
        newly = None if newest is None else newest.parcel
        parcel = next((parcel for parcel in self._flying if parcel is not newly), None)
        if parcel is not None:
            self._link.let_go(parcel.outgoing)
            self._landed(parcel)
            return True
        oldest = next((ticket for ticket in self._staying if ticket is not newest), None)
        if oldest is not None:  # more is put than was expected
            self._ship([oldest])
            self._staying.pop(oldest, None)
        return oldest is not None

    def _landed(self, parcel: Parcel) -> None:
        self._flying.remove(parcel)
        self._bytes -= parcel.nbytes

    def _settle(self) -> None:
        self._link.poll()
        self.owed.settle()
        while self._flying and self._flying[0].outgoing.source is None:
            self._landed(self._flying[0])
        while self._dropped:
            ticket = self._dropped[0]
            ticket.lane.drop(ticket)
            self._staying.pop(ticket, None)
            self._bytes -= ticket.counted
            self.never_written += ticket.counted
            ticket.counted = 0
            if ticket.parcel is not None:
                self._let_go(ticket, ticket.parcel)
            self._dropped.popleft()  # now: after an interrupt, all of it is done again
        if not self._bytes:
            self._batches.clear()  # all that was in them is dropped
        elif not (self._flying or self._staying or self._batches):
            self._bytes = 0  # whatever an interrupt left it at
        if not self._coming:
            self._coming_bytes = 0

    def _let_go(self, ticket: Carried, parcel: Parcel) -> None:
        parcel.members.discard(ticket)
        parcel.done_with(ticket)
        ticket.parcel = None
        if not parcel.members:
            self._give_up(parcel)

    # -- to the device, under the lock

    def _found(self, ticket: Carried) -> torch.Tensor:
        tensor, parcel = ticket.tensor, ticket.parcel
        source = None if parcel is None else parcel.outgoing.source
        if parcel is None or source is not None:
            self.from_memory += ticket.nbytes
        if parcel is None:
            assert tensor is not None
            return ticket.itself(tensor)
        if source is not None:
            return parcel.from_source(ticket, source)
        if parcel.whole is not None:
            return parcel.from_back(ticket, None)
        coming = parcel.coming
        if coming is None:
            coming = parcel.coming = self._link.bring(parcel.outgoing, self.back)
            self.read += parcel.nbytes
        else:
            self.ahead += parcel.nbytes
        back = self._link.take(coming)
        self._is_taken(parcel)
        return parcel.from_back(ticket, back)

    def _is_taken(self, parcel: Parcel) -> None:
        if parcel in self._coming:
            del self._coming[parcel]
            self._coming_bytes -= parcel.nbytes
        if parcel.coming is not None:
            parcel.came, parcel.coming = parcel.coming.done, None

    def _give_up(self, parcel: Parcel) -> None:
        if not parcel.members:
            while parcel.owed:
                release, nbytes = parcel.owed.popleft()
                self.owed.give_back(parcel, release, nbytes)
        if parcel.coming is not None:
            self.in_vain += parcel.nbytes
            self._is_taken(parcel)  # the link holds its memory until the copy into it is done

    def _look_ahead(self, ticket: Carried) -> None:
        """Bring what will be wanted after ``ticket``, each just in time: what is there early takes memory."""
        times = ticket.lane.times()
        due: dict[Parcel, float] = {}  # in order, and when each is wanted
        following = cast("Iterable[tuple[Carried, float]]", ticket.lane.after(ticket))
        soonest, room = None, self.most - self._bytes
        for other, _ in itertools.islice(following, _LOOK):
            at, parcel = times.get(other.position), other.parcel
            soonest = at if soonest is None else soonest
            if parcel is None or parcel.is_there or parcel in due:
                continue
            room -= parcel.nbytes
            if due and room < 0:
                break
            due[parcel] = math.nan if at is None else at
        if due:
            count = self._how_many(due, times.get(ticket.position), soonest)
            self._bring([parcel for parcel in itertools.islice(due, count) if parcel.coming is None], due)

    def _how_many(self, due: Mapping[Parcel, float], now: float | None, soonest: float | None) -> int:
        """How many of ``due`` have to be on their way before the computation comes to its next read, ``soonest``."""
        pace = self._link.back.pace
        if pace is None or now is None or soonest is None or any(math.isnan(at) for at in due.values()):
            return len(due)  # nothing is known: as many as there is room for
        latest, count = math.inf, 1
        for place, (parcel, at) in reversed(list(enumerate(due.items()))):
            coming = parcel.coming
            takes = 0.0 if coming is not None and coming.is_done() else _MARGIN * parcel.nbytes * pace
            latest = min(latest, at) - takes  # when the copy has to begin, for it and all behind it to be in time
            if latest <= soonest:
                count = max(count, place + 1)
        return count

    def _bring(self, parcels: Iterable[Parcel], wanted: Mapping[Parcel, float] | set[Parcel]) -> None:
        """Begin to copy them back, as long as there is room; others than ``wanted`` make some."""
        for parcel in parcels:
            needless = [other for other in self._coming if other not in wanted]
            while needless and not self._has_room(parcel):
                self._give_up(needless.pop(0))
            if (self._coming or self._bytes) and not self._has_room(parcel):
                return
            try:
                parcel.coming = self._link.bring(parcel.outgoing, self.back)
            except torch.OutOfMemoryError:
                return  # who wants it may find some
            self.read += parcel.nbytes
            self._coming[parcel] = None
            self._coming_bytes += parcel.nbytes

    def _has_room(self, parcel: Parcel) -> bool:
        return self._bytes + self._coming_bytes + parcel.nbytes <= self.most
