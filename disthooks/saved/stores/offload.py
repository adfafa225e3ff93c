"""Copies of the tensors of one device to host memory and back: what is sent, what stays, and what comes back early."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch

from disthooks._locks import Shared
from disthooks._streams import current_stream, event_on, handed_over, on, used_on
from disthooks.errors import StoreError
from disthooks.saved.stores.base import ByteBudget
from disthooks.saved.stores.copies import Coming, Outgoing, Throughput, link_of
from disthooks.saved.stores.host import pool_of, tensor_over
from disthooks.saved.stores.order import PerThread, TimedOrder

SMALL = 64 << 10  # bytes: smaller tensors share one copy, because each copy has a fixed cost (decision 41)
JOINED = 1 << 20  # bytes: when the small tensors of a stream have so many, they are copied
_AHEAD = 64  # tensors to look ahead: backward departs from the expected order by a few, so more would only cost time
_MARGIN = 1.5  # a copy is expected to take up to so many times as long as the last copies took


class Offloaded:
    """One tensor of a device in :class:`OnCpu`: still on the device, or in a transfer.

    Attributes:
        tensor: the tensor, until it is sent; None after that.
        own: whether ``tensor`` is a copy that only the store has.
        order: the order in which backward reads, which it is a part of; None if a ``Tiered`` knows it, and says which
            tensors come back early.
        counted: bytes that count as held on the device; 0 once the tensor is in a transfer, which counts instead.
        reserved: bytes of host memory that a budget counts.
        transfer: the transfer that the tensor was sent in.
        offset: the byte of the transfer at which the tensor begins.
        stream: the stream that filled the tensor.
    """

    __slots__ = (
        "counted",
        "device",
        "dropped",
        "dtype",
        "nbytes",
        "offset",
        "order",
        "own",
        "position",
        "reserved",
        "shape",
        "stream",
        "tensor",
        "transfer",
    )

    def __init__(self, tensor: torch.Tensor, order: TimedOrder | None) -> None:
        self.nbytes, self.shape, self.dtype, self.device = tensor.nbytes, tensor.shape, tensor.dtype, tensor.device
        self.order, self.stream = order, current_stream(tensor.device)
        # A copy is contiguous, and a small part of a large storage does not keep that storage alive.
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self.own = not is_plain or tensor.untyped_storage().nbytes() > 2 * self.nbytes
        self.tensor: torch.Tensor | None = _copy(tensor) if self.own else tensor
        self.position, self.dropped = 0, False
        self.counted = self.reserved = self.offset = 0
        self.transfer: Transfer | None = None

    def itself(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which was put, for the current stream.

        If it is the store's own copy, this returns a clone of it: the store may be asked for it again.
        """
        tensor = handed_over(tensor, self.stream)
        return tensor.clone() if self.own else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    used_on(tensor, current_stream(tensor.device))
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class Transfer:
    """The unit of copies: a tensor, or many small ones joined in one 1-D uint8 tensor. It goes and comes back whole.

    Attributes:
        members: the tensors in it that are not dropped.
        joined: whether it was made of several tensors.
        coming: the copy back that began before backward asked for it.
        came: the event at the end of the last copy back.
        whole: the joined tensor that came back, until each of its members was read.
        reserved: bytes of dropped members that a budget counts, because their host memory is still in use.
    """

    __slots__ = ("_stream", "_unread", "came", "coming", "joined", "members", "nbytes", "outgoing", "reserved", "whole")

    def __init__(self, members: Sequence[Offloaded], outgoing: Outgoing) -> None:
        self.members, self.outgoing, self.joined = set(members), outgoing, len(members) > 1
        self.nbytes = outgoing.host.nbytes
        self.coming: Coming | None = None
        self.came: torch.Event | None = None
        self.whole: torch.Tensor | None = None
        self.reserved = 0
        self._stream = current_stream(outgoing.device)  # the stream that fills ``whole``, or the joined source
        self._unread: set[Offloaded] = set()

    @property
    def is_there(self) -> bool:
        return self.outgoing.source is not None or self.whole is not None

    @property
    def is_idle(self) -> bool:
        """Whether no copy reads or writes its host memory any more."""
        # `is_done` is False while a graph is captured, so that `query` is not called then.
        return self.outgoing.is_done() and (self.came is None or self.came.query())

    def wait(self) -> None:
        """Make the host wait until no copy uses its host memory."""
        self.outgoing.wait()
        if self.came is not None:
            self.came.synchronize()

    def from_source(self, entry: Offloaded, source: torch.Tensor) -> torch.Tensor:
        """The tensor of ``entry``, from the ``source`` of the copy to the host, which is still on the device."""
        return self._part(entry, handed_over(source, self._stream)) if self.joined else entry.itself(source)

    def from_back(self, entry: Offloaded, back: torch.Tensor | None) -> torch.Tensor:
        """The tensor of ``entry`` for the current stream, from ``back``, which just came back.

        If ``back`` is None, the transfer came back before, and the tensor is a part of ``whole``.
        """
        if not self.joined and back is not None:
            return back
        if back is not None:
            self.whole, self._stream, self._unread = back, current_stream(back.device), set(self.members)
        assert self.whole is not None
        part = self._part(entry, handed_over(self.whole, self._stream))
        self.done_with(entry)
        return part

    def done_with(self, entry: Offloaded) -> None:
        """Note that ``entry`` was read or dropped; free ``whole`` after the last one."""
        self._unread.discard(entry)
        if not self._unread:
            self.whole = None

    def in_host(self, entry: Offloaded) -> torch.Tensor:
        """The tensor of ``entry`` in host memory. The host waits until it is there."""
        host = self.outgoing.wait()
        return self._part(entry, host) if self.joined else host

    @staticmethod
    def _part(entry: Offloaded, whole: torch.Tensor) -> torch.Tensor:
        # A clone, because the caller may write to it, and because its memory can be freed without the others.
        return whole[entry.offset : entry.offset + entry.nbytes].clone().view(entry.dtype).view(entry.shape)


class Offload(Shared[Offloaded]):
    """Copies tensors of ``device`` to host memory and back, beside the computation.

    It holds at most ``most`` bytes on the device, or one transfer if the newest is larger. Four kinds of tensors are
    held there: tensors that are being copied, tensors that are not sent because backward reads them soon, tensors that
    were brought back before backward reads them, and small tensors that came back because they share a copy.

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
        self._open: dict[int, list[Offloaded]] = {}  # small tensors that will be joined, by the stream that made them
        self._open_bytes: collections.Counter[int] = collections.Counter()  # of these, by stream
        self._flying: collections.deque[Transfer] = collections.deque()  # the oldest first
        self._bytes = 0  # bytes of the tensors in these three
        self._coming: dict[Transfer, None] = {}  # brought back before backward reads them, the oldest first
        self._cached: dict[Transfer, None] = {}  # joined, and back until all their tensors are read; the oldest first
        self._back_bytes = 0  # bytes of the transfers in these two
        self._alive: set[Offloaded] = set()  # put and not dropped
        self._dropped_in_use: collections.deque[Transfer] = (
            collections.deque()
        )  # dropped, while copies use their host memory

    # -- for the threads of the computation

    def entry(self, tensor: torch.Tensor, of_tiers: bool = False) -> Offloaded:
        """An entry for ``tensor``, to be given to :meth:`put`; ``of_tiers`` if it is a tensor of a ``Tiered``."""
        return Offloaded(tensor.detach(), None if of_tiers else self._own())

    def put(self, entry: Offloaded) -> None:
        """Send the tensor of ``entry`` to the host, join it with others, or keep it if backward reads it soon.

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
            elif entry.nbytes > SMALL:
                self._send([entry])
            else:  # small tensors of one stream share a copy
                stream = entry.stream.stream_id
                self._open.setdefault(stream, []).append(entry)
                self._open_bytes[stream] += entry.nbytes
                if self._open_bytes[stream] >= min(JOINED, self.most // 8):
                    self._flush([stream])
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
            transfer = entry.transfer
            if transfer is None or entry.dropped or transfer.is_there or transfer.coming:
                return
            if self._has_room(transfer) or not self._on_device:
                self._bring([transfer], {transfer})

    def drop(self, entry: Offloaded) -> None:
        """Release the tensor of ``entry``; destructors call this. See [Note: destructors].

        Memory that no copy uses is freed at once. The rest is freed when the link is next used.
        """
        if entry.dropped:
            return
        transfer = entry.transfer
        entry.tensor = None
        is_idle = transfer is None
        if transfer is not None and not transfer.joined:
            coming, is_idle = transfer.coming, transfer.outgoing.is_taken or transfer.is_idle
            if coming is not None and coming.is_done():
                coming.tensor = None
            if transfer.outgoing.is_done():
                transfer.outgoing.source = None
        if is_idle:
            reserved, entry.reserved = entry.reserved, 0
            self.budget.release(reserved)
        entry.dropped = True  # last: after Ctrl-C the destructor does all of this once more
        self.release(entry)

    def wait(self) -> None:
        """Make the host wait until all tensors that are to be sent have arrived."""
        with self._lock:
            self._apply_releases()
            self._flush()
        self._link.wait()
        with self._lock:
            self._apply_releases()

    def host_copy(self, entry: Offloaded) -> Outgoing | None:
        """The copy of ``entry``, for another store; None if it has none, or shares one, or comes back just now."""
        with self._lock:
            self._apply_releases()
            transfer = entry.transfer
            return None if transfer is None or transfer.joined or transfer.coming else transfer.outgoing

    def in_host(self, entry: Offloaded) -> torch.Tensor:
        """The tensor of ``entry`` in host memory. The host waits for the copy, which may begin only now."""
        with self._lock:
            self._apply_releases()
            tensor = entry.tensor
            if tensor is not None and not entry.nbytes:
                return tensor.cpu()
            if tensor is not None:
                self._staying.pop(entry, None)
                self._send([entry])
            transfer = entry.transfer
        if transfer is None:
            raise StoreError("a stored tensor was read after it was dropped")
        return transfer.in_host(entry)

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
            transfer = self._dropped_in_use[0] if self._dropped_in_use else None
        if transfer is None:
            return had_reserved
        transfer.wait()
        with self._lock:
            self._apply_releases()
        return True

    def release_idle(self) -> None:
        with self._lock:
            self._apply_releases()
        self.pool.clear()

    # -- to the host, under the lock

    def _flush(self, streams: Iterable[int] | None = None) -> None:
        for number in list(self._open if streams is None else streams):
            self._send(self._open[number])
            del self._open[number], self._open_bytes[number]

    def _send(self, entries: Sequence[Offloaded]) -> None:
        """Send those of ``entries`` that were not dropped, in one copy, in the order of the stream that made them."""
        found = [(entry, entry.tensor) for entry in entries if entry.transfer is None]
        held = [(entry, tensor) for entry, tensor in found if tensor is not None]  # dropped entries have no tensor
        if not held:
            return
        members, tensors = [entry for entry, _ in held], [tensor for _, tensor in held]
        with on(members[0].stream):  # this thread may work on another stream now
            source = _joined(members, tensors) if len(held) > 1 else tensors[0]
            lease = self.pool.lease(source.nbytes)
            outgoing = self._link.send(source, tensor_over(lease, source.shape, source.dtype), self.out)
            outgoing.lease = lease
            transfer = Transfer(members, outgoing)
        self._flying.append(transfer)
        for entry in members:
            entry.transfer, entry.counted, entry.tensor = transfer, 0, None
        self.written += transfer.nbytes

    def _relieve(self, newest: Offloaded | None) -> bool:
        """Free device memory of one transfer or tensor, but not of ``newest``. The host does not wait.

        Returns:
            Whether there was one.
        """
        if self._cached:  # the host has it, too; a later read brings it again
            self._forget(next(iter(self._cached)))
            return True
        # The oldest copy under way: the computation waits for it, and its memory is used again.
        newly = None if newest is None else newest.transfer
        transfer = next((transfer for transfer in self._flying if transfer is not newly), None)
        if transfer is not None:
            self._link.let_go(transfer.outgoing)
            self._landed(transfer)
            return True
        oldest = next((entry for entry in self._staying if entry is not newest), None)
        if oldest is not None:  # it was to stay, but this forward puts more than the last one did
            self._send([oldest])
            self._staying.pop(oldest, None)
        return oldest is not None

    def _landed(self, transfer: Transfer) -> None:
        self._flying.remove(transfer)
        self._bytes -= transfer.nbytes

    def _apply_releases(self) -> None:
        self._link.poll()
        while self._flying and self._flying[0].outgoing.source is None:
            self._landed(self._flying[0])
        super()._apply_releases()
        while self._dropped_in_use and self._dropped_in_use[0].is_idle:
            transfer = self._dropped_in_use.popleft()
            self.budget.release(transfer.reserved)
        if not self._alive:  # Ctrl-C may have left other values
            self._staying.clear()
            self._open.clear()
            self._open_bytes.clear()
            self._bytes = sum(transfer.nbytes for transfer in self._flying)
        if not (self._coming or self._cached):
            self._back_bytes = 0

    def _apply_release(self, release: Offloaded) -> None:
        entry, transfer = release, release.transfer
        if entry.order is not None:
            entry.order.drop(entry)
        self._alive.discard(entry)
        self._of_tiers.discard(entry)
        self._staying.pop(entry, None)
        self._bytes -= entry.counted
        self.never_written += entry.counted
        entry.counted = 0
        if transfer is None:
            return
        transfer.reserved += entry.reserved
        entry.reserved, entry.transfer = 0, None
        transfer.members.discard(entry)
        transfer.done_with(entry)
        if transfer.whole is None:
            self._forget(transfer)
        if not transfer.members:
            if transfer.reserved:
                self._dropped_in_use.append(transfer)
            self._give_up(transfer)

    # -- to the device, under the lock

    def _found(self, entry: Offloaded) -> torch.Tensor:
        """The tensor of ``entry`` for the current stream, from the nearest memory that has it."""
        tensor, transfer = entry.tensor, entry.transfer
        source = None if transfer is None else transfer.outgoing.source
        if transfer is None or source is not None:
            self.from_memory += entry.nbytes
        if transfer is None:  # it was never sent
            assert tensor is not None
            return entry.itself(tensor)
        if source is not None:  # it was sent, and is still on the device
            return transfer.from_source(entry, source)
        if transfer.whole is not None:  # it came back with another tensor of its transfer
            return self._part_of(transfer, entry, None)
        # It is in host memory: take the copy that began before, or begin one now.
        coming = transfer.coming
        if coming is None or coming.tensor is None:  # an interrupted read may have taken the tensor
            coming = transfer.coming = self._bring_now(transfer)
        else:
            self.ahead += transfer.nbytes
        back = self._link.take(coming)
        self._is_taken(transfer)
        return self._part_of(transfer, entry, back)

    def _bring_now(self, transfer: Transfer) -> Coming:
        coming = self._link.bring(transfer.outgoing.host, transfer.outgoing.done, self.back)
        self.read += transfer.nbytes
        return coming

    def _part_of(self, transfer: Transfer, entry: Offloaded, back: torch.Tensor | None) -> torch.Tensor:
        found = transfer.from_back(entry, back)
        if transfer.whole is None:
            self._forget(transfer)
            return found
        if transfer not in self._cached:
            self._cached[transfer] = None
            self._back_bytes += transfer.nbytes
        while self._on_device > self.most and (oldest := next(iter(self._cached))) is not transfer:
            self._forget(oldest)
        return found

    def _forget(self, transfer: Transfer) -> None:
        """Free the joined tensor of ``transfer`` that came back."""
        transfer.whole = None
        if transfer in self._cached:
            del self._cached[transfer]
            self._back_bytes -= transfer.nbytes

    def _is_taken(self, transfer: Transfer) -> None:
        if transfer in self._coming:
            del self._coming[transfer]
            self._back_bytes -= transfer.nbytes
        if transfer.coming is not None:
            transfer.came, transfer.coming = transfer.coming.done, None

    def _give_up(self, transfer: Transfer) -> None:
        """Free the copy of ``transfer`` that came back early."""
        if transfer.coming is not None:
            self.in_vain += transfer.nbytes
            self._is_taken(transfer)  # the link holds the memory on the device until the copy into it is done

    def _look_ahead(self, entry: Offloaded, order: TimedOrder) -> None:
        """Bring back the tensors that backward reads after ``entry``, each just in time.

        A tensor that comes back too early takes memory from the computation.
        """
        times = order.times()
        due: dict[Transfer, float] = {}  # in the order of reads, with the time at which backward reads each
        following = cast("Iterable[tuple[Offloaded, float]]", order.after(entry))
        soonest, room = None, self.most - self._on_device + sum(transfer.nbytes for transfer in self._coming)
        for other, _ in itertools.islice(following, _AHEAD):
            at, transfer = times.get(other.position), other.transfer
            soonest = at if soonest is None else soonest
            if transfer is None or transfer.is_there or transfer in due:
                continue
            room -= transfer.nbytes
            if due and room < 0:
                break  # the first one may be larger than the room
            due[transfer] = math.nan if at is None else at
        if due:
            count = self._how_many(due, times.get(entry.position), soonest)
            self._bring([transfer for transfer in itertools.islice(due, count) if transfer.coming is None], due)

    def _how_many(self, due: Mapping[Transfer, float], now: float | None, soonest: float | None) -> int:
        """How many transfers of ``due`` must be on their way before the computation reads next, at ``soonest``."""
        pace = self._link.back.pace
        if pace is None or now is None or soonest is None or any(math.isnan(at) for at in due.values()):
            return len(due)  # the speed or the times are not known: bring as many as fit
        # From the last to the first: the latest moment at which each copy has to begin, so that it and those behind it
        # are done in time.
        latest, count = math.inf, 1
        for place, (transfer, at) in reversed(list(enumerate(due.items()))):
            coming = transfer.coming
            takes = 0.0 if coming is not None and coming.is_done() else _MARGIN * transfer.nbytes * pace
            latest = min(latest, at) - takes
            if latest <= soonest:
                count = max(count, place + 1)
        return count

    def _bring(self, transfers: Iterable[Transfer], wanted: Mapping[Transfer, float] | set[Transfer]) -> None:
        """Begin to copy ``transfers`` back while there is room.

        Those that are not in ``wanted`` are given up for them.
        """
        for transfer in transfers:
            needless = [other for other in self._coming if other not in wanted]
            while needless and not self._has_room(transfer):
                self._give_up(needless.pop(0))
            while len(self._cached) > 1 and not self._has_room(transfer):  # backward reads the newest one now
                self._forget(next(iter(self._cached)))
            if self._on_device and not self._has_room(transfer):
                return
            try:
                transfer.coming = self._bring_now(transfer)
            except torch.OutOfMemoryError:
                return  # there may be memory when backward reads the tensor: `get` tries again
            self._coming[transfer] = None
            self._back_bytes += transfer.nbytes

    def _has_room(self, transfer: Transfer) -> bool:
        return self._on_device + transfer.nbytes <= self.most

    @property
    def _on_device(self) -> int:
        return self._bytes + self._back_bytes


def _joined(entries: Sequence[Offloaded], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of ``tensors`` in one tensor, on the current stream; ``offset`` of each entry says where its begin."""
    stream, end = current_stream(tensors[0].device), 0
    for entry, tensor in zip(entries, tensors, strict=True):
        entry.offset = end
        end += entry.nbytes
        used_on(tensor, stream)
    return torch.cat([tensor.detach().view(-1).view(torch.uint8) for tensor in tensors])
