"""A tensor on its way to an arena and back."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from disthooks.saved.stores.arena import Arena, Extent
from disthooks.saved.stores.buffers import PAGE
from disthooks.saved.stores.staging import Incoming
from disthooks.saved.stores.transfer import Outgoing

if TYPE_CHECKING:
    from disthooks.saved.stores.prefetch import Stream

QUEUED, WRITING, WRITTEN, FAILED, GONE = "queued", "writing", "written", "failed", "gone"


class Ticket:
    """One stored tensor: in memory until it is written, then in a slab, and for a while in memory again."""

    __slots__ = (
        "ahead",
        "at",
        "checksum",
        "device",
        "dropped",
        "dtype",
        "filled",
        "nbytes",
        "offset",
        "outgoing",
        "owed",
        "position",
        "reading",
        "said",
        "seconds",
        "shape",
        "slab",
        "state",
        "stream",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, device: torch.device, stream: Stream) -> None:
        self.tensor: torch.Tensor | None = tensor  # until it is written
        self.outgoing: Outgoing | None = None  # how it got from its device to where it is written from
        self.at: torch.Stream | None = None  # of the device: on which it was filled, and will be wanted
        self.nbytes, self.shape, self.dtype, self.device = tensor.nbytes, tensor.shape, tensor.dtype, device
        self.stream = stream
        self.filled: torch.Event | None = None  # there: of what goes to disk from the device itself
        self.state = GONE  # until it is put
        self.said = 0  # how many failures had been said when it was put
        self.seconds = 0.0  # during which it was written and read, not yet asked for
        self.owed = 0  # bytes of it that an account counts
        self.slab: Slab | None = None
        self.offset = 0  # in the slab
        self.checksum = 0
        self.dropped = False
        self.reading = False  # somebody is to read it
        self.ahead: torch.Tensor | Incoming | None = None  # what was read
        self.position = 0


class Slab:
    """What is written and read in one go: a large tensor, or many small ones, which alone would not be worth it."""

    __slots__ = ("arena", "extent", "freed", "live", "members", "start")

    def __init__(self, arena: Arena, extent: Extent, members: Sequence[Ticket]) -> None:
        self.arena, self.extent, self.members = arena, extent, members
        self.live = set(members)
        self.freed = False
        self.start = 0.0  # when to begin to read it, by ``time.perf_counter``


def taken_together(writes: collections.deque[Ticket], small: int, joined: int) -> list[Ticket]:
    """Take what to write in one go from the front of ``writes``: one tensor, or several of up to ``small`` bytes, until
    they are ``joined`` bytes."""
    found: list[Ticket] = []
    total = 0
    while writes and total < joined:
        if found and writes[0].nbytes > small:
            break
        ticket = writes.popleft()
        if ticket.state == QUEUED:
            ticket.state = WRITING
            found.append(ticket)
            total += padded(ticket.nbytes)  # what it takes in the slab, and in the memory it is joined in
            if ticket.nbytes > small:
                break
    return found


def padded(nbytes: int) -> int:
    """``nbytes`` up to where the next one of joined tensors begins: each has whole pages, which go when it goes."""
    return -(-nbytes // PAGE) * PAGE
