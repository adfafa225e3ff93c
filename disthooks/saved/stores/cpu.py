"""Keep saved tensors in CPU memory: copy them there during forward, and back before backward reads them."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import torch

from disthooks._fork_safe import ForkSafe, Order
from disthooks._registry import register
from disthooks._streams import current_stream, event_on, on, on_accelerator
from disthooks._tensors import format_bytes, parse_bytes, resident
from disthooks._torch import uncompiled
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, Store, StoreReport, StoreSpec
from disthooks.saved.stores.device_copy import Batch, Carried, Owed, Parcel, Throughput, join, link_of
from disthooks.saved.stores.order import Lane, PerThread
from disthooks.saved.stores.pools import pool_of

SMALL = 64 << 10  # bytes: smaller tensors share one copy, because each copy has a fixed cost (decision 41)
JOINED = 1 << 20  # bytes: when the small tensors of a stream have so many, they are copied
_LOOK = 64  # tickets to look ahead: backward departs from the expected order by a few, so more would only cost time
_MARGIN = 1.5  # a copy is expected to take up to so many times as long as the last copies took


class Courier(ForkSafe[Carried]):
    """Copies tensors of ``device`` to host memory and back, beside the computation.

    It holds at most ``most`` bytes on the device, or one tensor if the newest is larger. Three kinds of tensors are
    held there: tensors that are being copied, tensors that are not sent because backward reads them soon, and tensors
    that were brought back before backward reads them.

    Args:
        device: an accelerator, with its index.
        most: bytes.
        pin: whether host memory is page-locked.

    Attributes:
        out, back: the bytes copied to the host and back, and the time of these copies by the device's clock.
        from_memory, ahead, in_vain, never_written: bytes, as in :class:`StoreReport`.
    """

    def __init__(self, device: torch.device, most: int, pin: bool) -> None:
        super().__init__(Order.MOVER)
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
            while self._bytes + self._coming_bytes > self.most and self._relieve(ticket):
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
            if self._has_room(parcel) or not (self._coming or self._bytes):
                self._bring([parcel], {parcel})

    def drop(self, ticket: Carried) -> None:
        """Release the tensor of ``ticket``; destructors call this. See [Note: destructors].

        Memory that no copy uses is freed at once. The rest is freed when the link is next used.
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
        self.release(ticket)

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
            return self._bytes + self._coming_bytes

    def set_device_limit(self, nbytes: int) -> None:
        """Hold at most ``nbytes`` on the device, in place of ``in_flight``.

        If copies are still under way, the computation on the device waits for them; the host does not.
        """
        with self._lock:
            self._drain_releases()
            self.most, self._is_governed = nbytes, True
            while self._bytes + self._coming_bytes > self.most and self._relieve(None):
                pass

    def wait_for_memory(self) -> bool:
        """Make the host wait for the oldest copy of a dropped tensor. Returns False if there is none."""
        with self._lock:
            had_dropped = bool(self._releases)  # draining them gave bytes back, maybe enough of them
            self._drain_releases()
        return self.owed.wait() or had_dropped

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
        self.owed.poll()
        while self._flying and self._flying[0].outgoing.source is None:
            self._landed(self._flying[0])
        super()._drain_releases()
        if not self._bytes:
            self._batches.clear()  # all tensors in them were dropped
        elif not (self._flying or self._staying or self._batches):
            self._bytes = 0  # an interrupt may have left another value; see [Note: interrupts]
        if not self._coming:
            self._coming_bytes = 0

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
        ticket.parcel = None
        if not parcel.members:
            self._give_up(parcel)

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
            return parcel.from_back(ticket, None)
        # It is in host memory: take the copy that began before, or begin one now.
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
        """Free the copy of ``parcel`` that came back early; if it has no members left, give their bytes back too."""
        if not parcel.members:
            while parcel.owed:
                release, nbytes = parcel.owed.popleft()
                self.owed.give_back(parcel, release, nbytes)
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
        soonest, room = None, self.most - self._bytes
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
            if (self._coming or self._bytes) and not self._has_room(parcel):
                return
            try:
                parcel.coming = self._link.bring(parcel.outgoing, self.back)
            except torch.OutOfMemoryError:
                return  # there may be memory when backward reads the tensor: `get` tries again
            self.read += parcel.nbytes
            self._coming[parcel] = None
            self._coming_bytes += parcel.nbytes

    def _has_room(self, parcel: Parcel) -> bool:
        return self._bytes + self._coming_bytes + parcel.nbytes <= self.most


class _Held(NamedTuple):
    """A tensor in CPU memory, and the device that :meth:`OnCpu.get` returns it on."""

    tensor: torch.Tensor
    device: torch.device
    nbytes: int
    budget: ByteBudget

    def drop(self) -> None:
        """Give the bytes back to the limit."""
        self.budget.release(self.nbytes)


class _Sent(NamedTuple):
    """A ticket with its courier and budget. Its destructor drops it: after Ctrl-C its owner may never have got it."""

    courier: Courier
    ticket: Carried
    budget: ByteBudget

    def drop(self) -> None:
        """Drop the ticket, unless it is dropped already."""
        owed, self.ticket.owed = self.ticket.owed, 0
        parcel = self.ticket.parcel
        self.courier.drop(self.ticket)
        if owed and parcel is not None and parcel.joined:
            # The tensors of a parcel share one block of host memory. The last of them frees it, and gives these back.
            parcel.owed.append((self.budget.release, owed))
        else:
            self.courier.owed.give_back(parcel, self.budget.release, owed)

    @uncompiled()
    def __del__(self) -> None:
        self.drop()


class OpenOnCpu(Store):
    """An :class:`OnCpu` at work: the bytes under its limit, and a courier for each device.

    Args:
        budget: the bytes of all tensors.
        in_flight: most bytes on each device.
        pin: whether host memory is page-locked.
    """

    def __init__(self, budget: ByteBudget, in_flight: int, pin: bool) -> None:
        self.budget, self._in_flight, self._pin = budget, in_flight, pin
        self.couriers: dict[torch.device, Courier] = {}

    def put(self, tensor: torch.Tensor) -> _Held | _Sent:
        """Copy ``tensor`` to the CPU; hold the tensor itself if it is there already."""
        if on_accelerator(tensor):
            return self._send(tensor, may_stay=True)
        nbytes = max(tensor.nbytes, resident(tensor) if tensor.is_cpu else 0)  # a view keeps its whole storage alive
        self.budget.reserve(nbytes)
        if tensor.is_cpu:
            return _Held(tensor, tensor.device, nbytes, self.budget)
        try:
            return _Held(tensor.cpu(), tensor.device, nbytes, self.budget)
        except BaseException:
            self.budget.release(nbytes)
            raise

    def put_away(self, tensor: torch.Tensor) -> _Held | _Sent:
        """Like :meth:`put`, but a copy begins even if backward reads the tensor soon."""
        return self._send(tensor, may_stay=False) if on_accelerator(tensor) else self.put(tensor)

    def _send(self, tensor: torch.Tensor, may_stay: bool) -> _Sent:
        courier = self.courier(tensor.device)
        self._reserve(tensor.nbytes)
        sent = None
        try:
            sent = _Sent(courier, courier.ticket(tensor), self.budget)
            sent.ticket.owed = tensor.nbytes
            courier.put(sent.ticket, may_stay)
        except BaseException as error:
            if sent is None or not sent.ticket.owed:
                self.budget.release(tensor.nbytes)
            if sent is not None:
                sent.drop()
            if isinstance(error, OSError):
                what = f"OnCpu: the system has no {format_bytes(tensor.nbytes)} of memory left; give OnCpu a limit="
                raise StoreError(what, wanted=tensor.nbytes) from error
            raise
        return sent

    def _reserve(self, nbytes: int) -> None:
        """Take ``nbytes`` of the limit. At the limit, wait until the copies of dropped tensors are done."""
        while True:
            try:
                self.budget.reserve(nbytes)
            except StoreError:
                if not any(courier.wait_for_memory() for courier in list(self.couriers.values())):
                    raise
            else:
                return

    def get(self, ticket: _Held | _Sent) -> torch.Tensor:
        """The tensor, on the device that it was saved on."""
        if isinstance(ticket, _Sent):
            return ticket.courier.get(ticket.ticket)
        return ticket.tensor.to(ticket.device)

    def peek(self, ticket: _Held | _Sent) -> torch.Tensor:
        """The tensor in CPU memory. The host waits until it has arrived."""
        return ticket.courier.in_host(ticket.ticket) if isinstance(ticket, _Sent) else ticket.tensor

    def prefetch(self, ticket: _Held | _Sent) -> None:
        """Begin to bring the tensor back to its device, if there is room."""
        if isinstance(ticket, _Sent):
            ticket.courier.prefetch(ticket.ticket)

    def device_bytes(self, device: torch.device | None = None) -> int:
        """Bytes of saved tensors on ``device``, or on all devices: those that ``in_flight`` limits."""
        return sum(courier.device_bytes for courier in self._of(device))

    def set_device_limit(self, nbytes: int, device: torch.device | None = None) -> None:
        """Hold at most ``nbytes`` on ``device``, or on each device, from now on."""
        for courier in self._of(device):
            courier.set_device_limit(nbytes)

    def _of(self, device: torch.device | None) -> list[Courier]:
        return [courier for at, courier in list(self.couriers.items()) if device is None or at == device]

    def drop(self, ticket: _Held | _Sent) -> None:
        """Give the bytes back to the limit. The memory is freed when no copy needs it."""
        ticket.drop()

    def wait(self) -> None:
        """Wait until all tensors that are to be copied to the CPU have arrived."""
        for courier in list(self.couriers.values()):
            courier.wait()

    def release_idle(self) -> None:
        """Free the host memory that no tensor uses."""
        for courier in list(self.couriers.values()):
            courier.release_idle()

    def report(self) -> tuple[StoreReport, ...]:
        """One entry: the bytes held, and the bytes copied from and to all devices."""
        return (_report(self.budget, list(self.couriers.values())),)

    def courier(self, device: torch.device) -> Courier:
        """The courier that copies tensors of ``device``, an accelerator, for this store."""
        found = self.couriers.get(device)
        if found is None:
            made = Courier(device, self._in_flight, self._pin)
            found = self.couriers.setdefault(device, made)  # another thread may have added one meanwhile
        return found


def _report(budget: ByteBudget, couriers: Sequence[Courier]) -> StoreReport:
    flying = sum(courier.in_flight for courier in couriers)  # first, because it brings the other counts up to date
    return StoreReport(
        "OnCpu()",
        held=budget.held,
        limit=budget.limit,
        in_flight=flying,
        written=sum(courier.written for courier in couriers),
        never_written=sum(courier.never_written for courier in couriers),
        from_memory=sum(courier.from_memory for courier in couriers),
        ahead=sum(courier.ahead for courier in couriers),
        in_vain=sum(courier.in_vain for courier in couriers),
        read=sum(courier.read for courier in couriers),
        write_seconds=sum(courier.out.seconds for courier in couriers),
        read_seconds=sum(courier.back.seconds for courier in couriers),
        measured_write=max((courier.out.best or 0.0 for courier in couriers), default=0.0) or None,
        measured_read=max((courier.back.best or 0.0 for courier in couriers), default=0.0) or None,
    )


@register("store")
@dataclass(frozen=True)
class OnCpu(StoreSpec["OpenOnCpu"]):
    """Keep saved tensors of a GPU in CPU memory. A tensor that is in CPU memory already stays there, without a copy.

    The copies run beside the computation, on streams of their own. A tensor is copied out as soon as it is saved;
    small tensors (up to 64 KiB) share a copy. It is copied back before backward reads it: the store learns the order
    and the times of the reads from the last backward. The last tensors of a forward are not copied, because backward
    reads them at once.

    Args:
        limit: most bytes of tensors in this process at any time: an int, text such as ``"64 GiB"``, or
            ``"256 GiB per node"``, of which each process of the node (``LOCAL_WORLD_SIZE``) gets an equal part; None
            for no limit. Bytes in flight count, also those of tensors that are dropped: at the limit the host waits
            until these copies are done.
        pin_memory: whether host memory is page-locked, so that a GPU can copy to and from it while it computes: True,
            False, or ``"auto"`` to lock memory if the system allows it. One eighth of the node's memory is never
            locked.
        in_flight: most bytes of saved tensors that stay on each device, an int or text. They are tensors that are
            being copied, tensors that are not copied because backward reads them soon, and tensors that were brought
            back before they are read. One new tensor may be larger than this. If there would be more, the computation
            on the device waits for a copy; the host does not wait. 512 MiB take 10 to 20 ms over a link with 25 to 55
            GB/s. If the model makes tensors faster than the link for longer than this, a larger value hides no more
            of the copies. If its operators take longer, a smaller value is enough.

    Raises:
        UsageError: if ``limit`` or ``in_flight`` is not a size, or ``pin_memory`` is none of the three values.
        StoreError: in forward, if the limit is reached or the system has no memory.

    >>> store = OnCpu("64 GiB")
    >>> x = torch.ones(3)
    >>> store.get(store.put(x)).data_ptr() == x.data_ptr()
    True
    """

    limit: int | str | None = None
    pin_memory: bool | Literal["auto"] = field(default="auto", kw_only=True)
    in_flight: int | str = field(default="512 MiB", kw_only=True)

    def __post_init__(self) -> None:
        if self.pin_memory not in (True, False, "auto"):
            raise UsageError(f"OnCpu: pin_memory must be True, False or 'auto', got {self.pin_memory!r}")
        parse_bytes(self.in_flight, "OnCpu in_flight")
        ByteBudget(self.limit, "OnCpu")

    @property
    def budget(self) -> ByteBudget:
        """The bytes in use in this process, and their limit."""
        return self.open().budget

    def _open(self) -> OpenOnCpu:
        in_flight = parse_bytes(self.in_flight, "in_flight")
        return OpenOnCpu(ByteBudget(self.limit, "OnCpu"), in_flight, self.pin_memory is not False)

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is elsewhere than in CPU memory."""
        return not tensor.is_cpu
