"""Copies between a device and host memory, beside the computation, and the tensors that share one copy."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from disthooks._fork_safe import Order, shared_lock
from disthooks._streams import current_stream, event_on, handed_over, new_stream, on, used_on
from disthooks._torch import capturing
from disthooks.saved.stores.order import Lane

# [Note: both ends of a copy]
# Copies run on two side streams for each device, one for each direction, and events order them. If memory is freed
# while another stream still reads or writes it, the allocator gives it to another tensor, and numbers are wrong. So a
# link holds the source and the target of each copy until the copy's event has happened. It asks the events whenever it
# is used. Nothing here makes the host wait, except ``wait``.
#
# A destructor may ask whether a copy is done. If it is, the destructor frees the memory at once; if not, the link frees
# it later. While a CUDA graph is captured, events must not be asked, so no copy counts as done.

_LARGE = 1 << 20  # bytes: the speed of a link is measured by copies of this size or more; each copy has a fixed cost


class Throughput:
    """Bytes that were copied, and the seconds that the device took for them.

    >>> rate = Throughput()
    >>> rate.add(2_000_000, 0.001); rate.add(1000, 0.001)
    >>> rate.nbytes, rate.seconds, rate.best
    (2001000, 0.002, 2000000000.0)

    Attributes:
        best: bytes a second of the fastest large copy; None before the first large copy.
        pace: seconds for a byte, as a running mean over large copies; None before the first large copy.
    """

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self.best: float | None = None
        self.pace: float | None = None

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a copy that has ended."""
        self.nbytes += nbytes
        self.seconds += seconds
        if nbytes >= _LARGE and seconds > 0:
            self.best = max(self.best or 0.0, nbytes / seconds)
            pace = seconds / nbytes
            self.pace = pace if self.pace is None else 0.9 * self.pace + 0.1 * pace


class _Copy:
    """One copy on a side stream: the events of its begin and its end, and the ``Throughput`` that counts it."""

    __slots__ = ("begin", "device", "done", "host", "rate")

    begin: torch.Event
    done: torch.Event

    def __init__(self, device: torch.device, host: torch.Tensor, rate: Throughput | None) -> None:
        self.device, self.host, self.rate = device, host, rate

    # ``_capturing`` is an argument because destructors ask this, and as Python ends, the globals are gone.
    def is_done(self, _capturing: Callable[[], bool] = capturing) -> bool:
        """Whether the copy has ended. False if an interrupt stopped it before its event, and while a graph is captured.

        See [Note: both ends of a copy].
        """
        return hasattr(self, "done") and not _capturing() and self.done.query()


class Outgoing(_Copy):
    """A copy of a device's tensor to host memory, under way or done.

    Attributes:
        host: a contiguous tensor with the shape and dtype of the source; filled once ``done`` has happened.
        source: the tensor on the device, held until it is copied; None after that.
        done: the event at the end of the copy.
    """

    __slots__ = ("source",)

    def __init__(self, source: torch.Tensor, host: torch.Tensor, rate: Throughput | None = None) -> None:
        super().__init__(source.device, host, rate)
        self.source: torch.Tensor | None = source

    def wait(self) -> torch.Tensor:
        """Make the host wait until ``host`` is filled, and return it; threads that write to disk call this."""
        self.done.synchronize()
        self.source = None
        return self.host


class Coming(_Copy):
    """A tensor on its way back to the device.

    Attributes:
        tensor: the tensor on the device, filled once ``done`` has happened; None after a reader has taken it.
        stream: the stream that its memory belongs to.
        done: the event at the end of the copy.
    """

    __slots__ = ("stream", "tensor")

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, stream: torch.Stream, rate: Throughput | None) -> None:
        super().__init__(tensor.device, host, rate)
        self.tensor: torch.Tensor | None = tensor
        self.stream = stream


class Link:
    """The copies between one device and the host in this process. See [Note: both ends of a copy].

    A caller may give a ``Throughput`` of its own, which counts the copies of that caller alone.

    Args:
        device: an accelerator, with its index.

    Attributes:
        out: the bytes and seconds of all copies to the host.
        back: the bytes and seconds of all copies to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = new_stream(device), new_stream(device)
        self._sent: collections.deque[Outgoing] = collections.deque()
        self._coming: collections.deque[Coming] = collections.deque()
        self.out, self.back = Throughput(), Throughput()
        self._lock = shared_lock(Order.LINK)

    # -- to the host

    def send(self, tensor: torch.Tensor, host: torch.Tensor, rate: Throughput | None = None) -> Outgoing:
        """Begin to copy ``tensor`` into ``host``, when the work now queued on the current stream is done.

        The link holds both until the copy is done. :meth:`let_go` releases ``tensor`` before that.
        """
        source = tensor.detach().contiguous()
        with self._lock:
            self.poll()
            self._out.wait_event(event_on(current_stream(self.device)))
            outgoing = Outgoing(source, host, rate)
            self._sent.append(outgoing)  # before the copy begins: after an interrupt, `_mend` finds it here
            with on(self._out):
                outgoing.begin = event_on(self._out, timed=True)
                host.copy_(source, non_blocking=True)
                outgoing.done = event_on(self._out, timed=True)
            return outgoing

    def let_go(self, outgoing: Outgoing) -> None:
        """Release the source of ``outgoing`` now. The host does not wait.

        The current stream waits for the copy, so the copy counts as one of its operators. If the source lies in memory
        of the current stream, later operators of this stream use that memory again, in the right order. If it lies in
        memory of another stream, as a batch of a data loader may, the allocator is told that the current stream uses
        it too, as for any operator.
        """
        source = outgoing.source
        if source is not None and not outgoing.is_done():
            stream = current_stream(self.device)
            stream.wait_event(outgoing.done)
            used_on(source, stream)
        outgoing.source = None

    # -- to the device

    def bring(self, outgoing: Outgoing, rate: Throughput | None = None) -> Coming:
        """Begin to copy ``outgoing.host`` to the device, into memory of the current stream.

        :meth:`take` returns the tensor.
        """
        with self._lock:
            self.poll()
            stream, host = current_stream(self.device), outgoing.host
            coming = Coming(torch.empty(host.shape, dtype=host.dtype, device=self.device), host, stream, rate)
            self._back.wait_event(event_on(stream))  # the new memory may have been another tensor's until now
            self._back.wait_event(outgoing.done)  # the host memory is filled then
            self._coming.append(coming)  # before the copy begins, as in `send`
            tensor = coming.tensor
            assert tensor is not None
            with on(self._back):
                coming.begin = event_on(self._back, timed=True)
                tensor.copy_(host, non_blocking=True)
                coming.done = event_on(self._back, timed=True)
            return coming

    def take(self, coming: Coming) -> torch.Tensor:
        """The tensor of ``coming``, for the current stream; it can be taken once."""
        tensor = coming.tensor
        assert tensor is not None
        stream = current_stream(self.device)
        stream.wait_event(coming.done)
        if stream != coming.stream:
            used_on(tensor, stream)
        coming.tensor = None
        return tensor

    # -- both

    def poll(self) -> None:
        """Release the source and the target of the copies that are done, and count these copies."""
        with self._lock:
            self._mend()
            while self._sent and self._sent[0].is_done():
                outgoing = self._sent[0]
                outgoing.source = None
                _count(outgoing, self.out)
                self._sent.popleft()
            while self._coming and self._coming[0].is_done():
                _count(self._coming[0], self.back)
                self._coming.popleft()

    def wait(self) -> None:
        """Make the host wait until all tensors that were sent have arrived."""
        with self._lock:
            self._mend()
            last = self._sent[-1] if self._sent else None
        if last is not None:
            last.done.synchronize()
        self.poll()

    def _mend(self) -> None:
        """Give events to a copy that an interrupt stopped half way.

        The copy counts as done when the work that is queued on its stream now is done.
        """
        for copies, stream in ((self._sent, self._out), (self._coming, self._back)):
            if copies and not hasattr(copies[-1], "done"):
                copies[-1].begin = copies[-1].done = event_on(stream, timed=True)


def _count(copy: _Copy, total: Throughput) -> None:
    seconds = copy.begin.elapsed_time(copy.done) / 1000
    for rate in filter(None, (total, copy.rate)):
        rate.add(copy.host.nbytes, seconds)


@functools.cache
def link_of(device: torch.device) -> Link:
    """The link of ``device`` in this process."""
    return Link(device)


class Carried:
    """One tensor of a device in :class:`OnCpu`: still on the device, or in a parcel.

    Attributes:
        tensor: the tensor, until it is sent; None after that.
        own: whether ``tensor`` is a copy that only the store has.
        counted: bytes that count as held on the device; 0 once the tensor is in a parcel, which counts instead.
        parcel: the parcel that the tensor was sent in.
        offset: the byte of the parcel at which the tensor begins.
        stream: the stream that filled the tensor.
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
        # A copy is contiguous, and a small part of a large storage does not keep that storage alive.
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self.own = not is_plain or tensor.untyped_storage().nbytes() > 2 * self.nbytes
        self.tensor: torch.Tensor | None = _copy(tensor) if self.own else tensor
        self.position, self.dropped = 0, False
        self.counted = self.owed = 0
        self.parcel: Parcel | None = None
        self.offset = 0

    def itself(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which was put, for the current stream.

        If it is the store's own copy, this returns a clone of it: the store may be asked for it again.
        """
        tensor = handed_over(tensor, self.stream)
        return tensor.clone() if self.own else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    used_on(tensor, current_stream(tensor.device))
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class Parcel:
    """The unit of copies: a tensor, or many small ones joined in one 1-D uint8 tensor. It goes and comes back whole.

    Attributes:
        members: the tickets in it that are not dropped.
        joined: whether it was made of several tensors.
        coming: the copy back that began before backward asked for it.
        came: the event at the end of the last copy back.
        whole: the joined tensor that came back, until each of its members was read.
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
        self._stream = current_stream(outgoing.device)  # the stream that fills ``whole``, or the joined source
        self._unread: set[Carried] = set()
        # The debts of dropped members (``ByteBudget.debt``): their host memory is in use while another member is alive.
        self.owed: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def is_there(self) -> bool:
        """Whether its bytes are on the device."""
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

    def from_source(self, ticket: Carried, source: torch.Tensor) -> torch.Tensor:
        """The tensor of ``ticket``, from the ``source`` of the copy to the host, which is still on the device."""
        if self.joined:
            return self._part(ticket, handed_over(source, self._stream))
        return ticket.itself(source)

    def from_back(self, ticket: Carried, back: torch.Tensor | None) -> torch.Tensor:
        """The tensor of ``ticket`` for the current stream, from ``back``, which just came back.

        If ``back`` is None, the parcel came back before, and the tensor is a part of ``whole``.
        """
        if not self.joined and back is not None:
            return back
        if back is not None:
            self.whole, self._stream, self._unread = back, current_stream(back.device), set(self.members)
        assert self.whole is not None
        part = self._part(ticket, handed_over(self.whole, self._stream))
        self.done_with(ticket)
        return part

    def done_with(self, ticket: Carried) -> None:
        """Note that ``ticket`` was read or dropped; free ``whole`` after the last one."""
        self._unread.discard(ticket)
        if not self._unread:
            self.whole = None

    def in_host(self, ticket: Carried) -> torch.Tensor:
        """The tensor of ``ticket`` in host memory. The host waits until it is there."""
        host = self.outgoing.wait()
        return self._part(ticket, host) if self.joined else host

    @staticmethod
    def _part(ticket: Carried, whole: torch.Tensor) -> torch.Tensor:
        # A clone, because the caller may write to it, and because its memory can be freed without the others.
        return whole[ticket.offset : ticket.offset + ticket.nbytes].clone().view(ticket.dtype).view(ticket.shape)


class Batch:
    """Small tensors of one stream that will be sent together when they are ``enough`` bytes."""

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self.tickets: list[Carried] = []
        self.nbytes = 0

    def add(self, ticket: Carried) -> bool:
        """Add ``ticket``, and return whether the batch is full now."""
        self.tickets.append(ticket)
        self.nbytes += ticket.nbytes
        return self.nbytes >= self._enough


def join(tickets: Sequence[Carried], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of ``tensors`` in one tensor, on the current stream; ``offset`` of each ticket says where its begin."""
    stream, end = current_stream(tensors[0].device), 0
    for ticket, tensor in zip(tickets, tensors, strict=True):
        ticket.offset = end
        end += ticket.nbytes
        used_on(tensor, stream)
    return torch.cat([tensor.detach().view(-1).view(torch.uint8) for tensor in tensors])


class Owed:
    """Bytes of dropped tensors in host memory that copies still use: they count until the copies are done."""

    def __init__(self) -> None:
        self._all: collections.deque[tuple[Parcel, Iterable[Callable[[], None]]]] = collections.deque()
        #: Pay the debts when the copies of their parcel are done: a C function, which destructors may call.
        self.append: Callable[[tuple[Parcel, Iterable[Callable[[], None]]]], None] = self._all.append

    def add(self, parcel: Parcel, debts: Iterable[Callable[[], None]]) -> None:
        """Pay ``debts`` when the copies of ``parcel`` are done."""
        self.append((parcel, debts))

    @property
    def parcel(self) -> Parcel | None:
        """The parcel of the oldest debt; None if nothing is owed."""
        return self._all[0][0] if self._all else None

    def poll(self) -> None:
        """Pay the debts whose copies are done, the oldest first. The caller holds the lock of the courier.

        After an interrupt a debt is paid once more, which gives nothing back. A signal handler may call this, too.
        """
        while self._all:
            first = self._all[0]
            parcel, debts = first
            if not parcel.is_idle:
                return
            for pay in tuple(debts):
                pay()
            if self._all and self._all[0] is first:
                self._all.popleft()
