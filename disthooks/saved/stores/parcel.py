"""A device's tensor in a store, and what goes to the host and back in one copy."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence

import torch

from disthooks._device import current_stream, handed_over, used_on
from disthooks.saved.stores.lane import Lane
from disthooks.saved.stores.transfer import Coming, Outgoing

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
