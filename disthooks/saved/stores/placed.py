"""The tensors of a ``Tiered``: the tier of each, the tapes that they are on, and what backward needs next."""

# [Note: tiers follow a plan]
# A forward saves what the last one saved, so the place of each tensor is known when it is put (plan.py): the
# tensors that are saved first move to the farthest place, each at its put, so that the link works from the first put
# on; the tensors that are saved last stay.
# Backward asks for the tensors in the reverse order, each as soon as the nearest tier has room for it.
#
# A forward of another length has a plan by guess. The first forward has none: a tensor stays until a newer one needs
# its room, and the oldest tensor makes room first. The same happens if more is put than the plan said. So a wrong plan
# costs time, and no limit depends on it.

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from disthooks._locks import Shared
from disthooks._torch import uncompiled
from disthooks.saved.stores.base import MovingTicket
from disthooks.saved.stores.order import PerThread
from disthooks.saved.stores.plan import Placement, Tapes, make_plan

_CPU = torch.device("cpu")


class Placed(MovingTicket):
    """A tensor in one of the tiers. It moves to the next tier if tensors that backward reads sooner need its room.

    Attributes:
        tier: the number of the tier; -1 if the tensor is in none.
        ticket: the ticket of that tier.
        nbytes: bytes of the tensor.
        at: the stream that filled the tensor if it is on an accelerator; None otherwise.
        device: the device that the tensor was put on.
        tiers: the runtime of the ``Tiered`` that it was put into.
        tape: the tape that it is on; None before it is put.
        index: the position on the tape.
        asked: whether the tier was told that backward reads the tensor soon.
        is_away: whether it was put into a tier that takes it out of the memory that it was in.
        leaves: called when it is, once.
    """

    __slots__ = (
        "__weakref__",
        "_to_let_go",
        "asked",
        "at",
        "device",
        "dropped",
        "index",
        "is_away",
        "leaves",
        "lock",
        "nbytes",
        "tape",
        "ticket",
        "tier",
        "tiers",
    )

    def __init__(self, nbytes: int, at: Any = None, tiers: Any = None, device: torch.device = _CPU) -> None:
        self.lock = threading.Lock()  # held while it is moved or read
        self.tier = -1
        self.ticket: Any = None
        self.nbytes, self.at, self.device = nbytes, at, device
        self.tape: ForwardTape | None = None
        self.index = 0
        self.asked = self.dropped = self.is_away = False
        self.leaves: Callable[[], object] | None = None
        self.tiers = tiers
        self._to_let_go = [True]  # the thread that pops the item lets go of the tensor

    def has_left(self, later: Callable[[], object]) -> bool:
        try:
            with self.lock:
                if not self.is_away:
                    self.leaves = later
                return self.is_away
        finally:
            if self.dropped:
                self.let_go()

    def pop_transfer_seconds(self) -> float:
        try:
            with self.lock:
                is_moving = not self.dropped and isinstance(self.ticket, MovingTicket)
                return self.ticket.pop_transfer_seconds() if is_moving else 0.0
        finally:
            if self.dropped:
                self.let_go()

    def drop(self) -> None:
        """Release the tensor in the tier that it is in; destructors call this. See [Note: destructors]."""
        tape = self.tape
        if tape is not None:
            self.tiers.tapes.release((tape, self.index))
            self.tape = None
        self.dropped = True
        if self.tiers is not None:
            self.let_go()

    def let_go(self) -> None:
        """Let the tier drop the tensor, if it was dropped here and no thread holds its lock. This takes no lock.

        Each thread that takes the lock looks at ``dropped`` under it, and calls this after it has released it. So
        either the lock is free here, or the thread that holds it lets go.
        """
        if not self.dropped or self.lock.locked() or not self._to_let_go:
            return
        try:
            self._to_let_go.pop()
        except IndexError:  # another thread was faster
            return
        tier, self.tier = self.tier, -1
        if tier >= 0:
            self.tiers.stores[tier].drop(self.ticket)
            self.ticket = None

    @uncompiled()
    def __del__(self) -> None:
        if self._to_let_go:  # after Ctrl-C its owner may never have got it
            self.drop()


class ForwardTape:
    """What one thread puts on one device, from the first put after a read to the next one.

    Attributes:
        forwards: the forwards that it is one of.
        entries: by position, the tensors that are not dropped. The tape keeps none of them alive.
        reads: the positions in the order in which backward has read them first.
        back: the positions of the tensors to bring nearer, in the order in which backward is expected to read them.
        asked_bytes: bytes of the tensors whose tier was told that backward reads them soon, and that were not read.
    """

    __slots__ = ("asked_bytes", "back", "entries", "forwards", "reads")

    def __init__(self, forwards: Forwards) -> None:
        self.forwards = weakref.ref(forwards)  # weak, because the forwards hold their newest tape
        self.entries: dict[int, weakref.ref[Placed]] = {}
        self.reads: dict[int, None] = {}
        self.back: collections.deque[int] = collections.deque()
        self.asked_bytes = 0


class Forwards:
    """The tapes of one thread on one device. The last ones tell where the tensors of the newest one go."""

    def __init__(self, limits: Callable[[], list[int | None]]) -> None:
        self._limits = limits
        self._planned_for: list[int | None] = []  # the limits at the begin of the newest tape
        self._tapes = Tapes(functools.partial(_planned, limits))  # a method of this object would be a cycle
        self._tape: ForwardTape | None = None  # the newest one, which is put now

    def put(self, placed: Placed) -> int | None:
        """The tier for ``placed``, which is put now; None if the tape is not known."""
        tape = self._tape
        if tape is None or tape.reads:
            tape = self._begin()
        placed.tape, placed.index = tape, len(self._tapes.sizes)
        tape.entries[placed.index] = weakref.ref(placed)
        return self._tapes.put(placed.nbytes)

    def next_tier(self) -> int | None:
        """The tier of the tensor that is put next, if it is as large as expected; None if the tape is not known."""
        return self._tapes.place(0 if self._tape is None or self._tape.reads else len(self._tapes.sizes))

    def order(self) -> Iterable[int]:
        """The positions on the newest tape in the order in which backward is expected to read them."""
        count, plan = len(self._tapes.sizes), self._tapes.plan
        planned = () if plan is None else plan.order
        return [*range(count - 1, len(planned) - 1, -1), *(position for position in planned if position < count)]

    def end(self, tape: ForwardTape | None) -> None:
        """End ``tape``, if it is the newest one."""
        if tape is not None and tape is self._tape:
            self._tape = None
            # What a forward without a backward saved was dropped at once, and needed no place.
            self._tapes.end(tuple(tape.reads), None if tape.reads else [0] * len(self._tapes.sizes))

    def _begin(self) -> ForwardTape:
        self.end(self._tape)
        self._tape = ForwardTape(self)
        if self._planned_for != (limits := self._limits()):
            self._planned_for = limits
            self._tapes.replan()
        return self._tape


def _planned(limits: Callable[[], list[int | None]], sizes: Sequence[int], reads: Sequence[int] | None) -> Placement:
    return make_plan(sizes, limits(), reads)


class PlacedTensors(Shared[tuple[ForwardTape, int]]):
    """The tapes of each thread and device: where their tensors go, and in which order backward will read them.

    Args:
        limits: gives the bytes of each tier for tensors of a device; None for no limit.
        is_told: for each tier whether it is told what backward reads soon.
    """

    def __init__(self, limits: Callable[[torch.device], list[int | None]], is_told: Sequence[bool]) -> None:
        super().__init__()
        self._limits, self._is_told, self._tells = limits, is_told, any(is_told)
        self._own: PerThread[dict[torch.device, Forwards]] = PerThread(dict)

    def put(self, placed: Placed) -> int | None:
        """Note that ``placed`` is the next tensor that this thread puts. Returns its tier; None if there is no plan."""
        forwards = self._forwards(placed.device)
        with self._lock:
            if self._releases:
                self._apply_releases()
            return forwards.put(placed)

    def next_tier(self, device: torch.device) -> int | None:
        """The tier of the tensor of ``device`` that this thread puts next; None if there is no plan."""
        if self._releases:
            with self._lock:
                self._apply_releases()
        return self._forwards(device).next_tier()

    def _forwards(self, device: torch.device) -> Forwards:
        own = self._own()
        if device not in own:
            own[device] = Forwards(functools.partial(self._limits, device))
        return own[device]

    def read(self, placed: Placed) -> None:
        """Note that backward reads ``placed`` now."""
        tape = placed.tape
        if tape is None:
            return
        with self._lock:
            if self._releases:
                self._apply_releases()
            if not tape.reads and self._tells and (forwards := tape.forwards()) is not None:
                tape.back.extend(forwards.order())
            if placed.index not in tape.reads:
                tape.reads[placed.index] = None
            if placed.asked:
                tape.asked_bytes -= placed.nbytes
                placed.asked = False

    def next_to_bring(self, tape: ForwardTape, room: int) -> Placed | None:
        """The tensor of ``tape`` to bring nearer now; None if there is none, or if it has more than ``room`` bytes."""
        with self._lock:
            while tape.back:
                entry = tape.entries.get(tape.back[0])
                placed = None if entry is None or tape.back[0] in tape.reads else entry()
                may_come = placed is not None and placed.tier > 0 and self._is_told[placed.tier]
                if placed is not None and may_come and placed.nbytes > room:
                    return None
                tape.back.popleft()
                if placed is not None and may_come:
                    placed.asked = True
                    tape.asked_bytes += placed.nbytes
                    return placed
        return None

    def _apply_release(self, release: tuple[ForwardTape, int]) -> None:
        tape, position = release
        tape.entries.pop(position, None)
        if not tape.entries and (forwards := tape.forwards()) is not None:
            forwards.end(tape)


class NoRoom(Exception):
    """A comparison that can wait has no room."""


class _Comparing(threading.local):
    """Whether this thread reads stored tensors for a comparison during forward, and whether that can wait."""

    is_under_way = can_wait = False


comparing = _Comparing()


@contextlib.contextmanager
def for_comparison(can_wait: bool) -> Iterator[None]:
    """Reads of this thread inside are no sign that backward has begun, so nothing is brought back early for them."""
    comparing.is_under_way, comparing.can_wait = True, can_wait
    try:
        yield
    finally:
        comparing.is_under_way = comparing.can_wait = False
