"""The tensors of a ``Tiered``: the tier of each, the order in which backward reads them, and the plan they follow."""

# [Note: tiers follow a plan]
# A forward saves what the last one saved, so the place of each tensor is known when it is put (plan.py): the
# tensors that are saved first move to the farthest place, each at its put, so that the link works from the first put
# on; the tensors that are saved last stay.
# Backward asks for the tensors in the reverse order, each as soon as the nearest tier has room for it.
#
# A forward of another length has a plan by guess. The first forward has none: a tensor stays until a newer one needs
# its room, and what backward reads last makes room first. The same happens if more is put than the plan said. So a
# wrong plan costs time, and no limit depends on it.

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from disthooks._locks import Shared
from disthooks._torch import uncompiled
from disthooks.saved.stores.base import MovingTicket
from disthooks.saved.stores.order import AccessOrder, Ordered, PerThread
from disthooks.saved.stores.plan import Placement, Tapes, make_plan

_GROUP = 64 << 20  # bytes that backward asks for at once; an eighth of the nearest tier's limit if that is less

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
        turn: its position in the order of reads.
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
        "is_away",
        "leaves",
        "lock",
        "nbytes",
        "ticket",
        "tier",
        "tiers",
        "turn",
    )

    def __init__(self, nbytes: int, at: Any = None, tiers: Any = None, device: torch.device = _CPU) -> None:
        self.lock = threading.Lock()  # held while it is moved or read
        self.tier = -1
        self.ticket: Any = None
        self.nbytes, self.at, self.device = nbytes, at, device
        self.turn: Turn | None = None
        self.asked = self.dropped = self.is_away = False
        self.leaves: Callable[[], object] | None = None
        self._to_let_go = [True]  # the thread that pops the item lets go of the tensor
        self.tiers = tiers  # last: the destructor does nothing before

    def has_left(self, later: Callable[[], object]) -> bool:
        try:
            with self.lock:
                if not self.is_away:
                    self.leaves = later
                return self.is_away
        finally:
            self.let_go()

    def pop_transfer_seconds(self) -> float:
        try:
            with self.lock:
                is_moving = not self.dropped and isinstance(self.ticket, MovingTicket)
                return self.ticket.pop_transfer_seconds() if is_moving else 0.0
        finally:
            self.let_go()

    def drop(self) -> None:
        """Release the tensor in the tier that it is in; destructors call this."""
        self.dropped = True
        if self.tiers is not None:
            self.tiers.turns.drop(self)
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
        self.drop()  # after Ctrl-C its owner may never have got it


class ForwardTape:
    """What one thread puts on one device, from the first put after a read to the next one.

    Attributes:
        turns: the position of each tensor. For a tensor that was dropped it is the number of its bytes, and 0 if that
            was before backward began.
        plan: where they go; None if this tape is not known.
        reads: the indices in the order in which backward has read them first; empty before backward begins.
        next_back: how many groups of ``plan.back`` were asked back.
    """

    __slots__ = ("next_back", "plan", "reads", "turns")

    def __init__(self) -> None:
        self.turns: list[Turn | int] = []
        self.plan: Placement | None = None
        self.reads: dict[int, None] = {}
        self.next_back = 0


class TapeOrder(AccessOrder):
    """An :class:`AccessOrder` that also predicts what the next tape is, and where its tensors go."""

    def __init__(self, limits: Callable[[], list[int | None]]) -> None:
        super().__init__()
        self._limits = limits
        self._planned_for: list[int | None] = []  # the limits at the begin of the newest tape
        self._tapes = Tapes(functools.partial(_planned, limits))  # a method of this object would be a cycle
        self._tape: ForwardTape | None = None  # the newest one, which is put now

    def place(self, turn: Turn, nbytes: int) -> int | None:
        """The tier for the tensor of ``nbytes`` that is put now; None if the tape is not known."""
        self.put(turn)
        if self._tape is None or self._tape.reads:
            self._end()
            self._tape = ForwardTape()
            if self._planned_for != (limits := self._limits()):
                self._planned_for = limits
                self._tapes.replan()
        turn.tape, turn.index = self._tape, len(self._tape.turns)
        self._tape.turns.append(turn)
        self._tapes.put(nbytes)
        self._tape.plan = self._tapes.plan
        return self._tier(turn.index)

    def next_tier(self) -> int | None:
        """The tier of the tensor that is put next, if it is as large as expected; None if the tape is not known."""
        return self._tier(0 if self._tape is None or self._tape.reads else len(self._tape.turns))

    def _tier(self, index: int) -> int | None:
        plan = self._tapes.plan
        return None if plan is None or index >= len(plan) else plan.group(index).place

    def read(self, ticket: Ordered, now: float | None = None) -> None:
        super().read(ticket, now)
        turn = cast(Turn, ticket)
        if turn.tape is not None:
            turn.tape.reads.setdefault(turn.index)

    def drop(self, ticket: Ordered) -> None:
        super().drop(ticket)
        turn = cast(Turn, ticket)
        tape = turn.tape
        if tape is not None:  # a tape and its turns hold each other: no cycle may stay
            tape.turns[turn.index] = turn.nbytes if tape.reads else 0
        if not self._live:
            self._end()

    def _end(self) -> None:
        tape, self._tape = self._tape, None
        if tape is not None:
            sizes = [turn.nbytes if isinstance(turn, Turn) else turn for turn in tape.turns]
            self._tapes.end(tuple(tape.reads) or None, sizes)


def _planned(limits: Callable[[], list[int | None]], sizes: Sequence[int], reads: Sequence[int] | None) -> Placement:
    found = limits()
    return make_plan(sizes, found, group=min(_GROUP, (found[0] or 8 * _GROUP) // 8), reads=reads)


class Turn:
    """The position of a :class:`Placed` in the order of its thread's reads. It does not keep the tensor alive.

    Attributes:
        position: among the tensors that are stored.
        nbytes: bytes of the tensor.
        tape: the tape that the tensor is on.
        index: the position on the tape.
    """

    __slots__ = ("dropped", "index", "nbytes", "order", "placed", "position", "tape")

    def __init__(self, placed: Placed, order: TapeOrder) -> None:
        self.placed, self.order = weakref.ref(placed), order
        self.position, self.dropped, self.nbytes = 0, False, placed.nbytes
        self.tape: ForwardTape | None = None
        self.index = 0


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


class Turns(Shared[Turn]):
    """The tapes of each thread and device: where their tensors go, and in which order backward will read them."""

    def __init__(self, limits: Callable[[torch.device], list[int | None]] = lambda device: [None]) -> None:
        super().__init__()
        self._limits = limits
        self._own: PerThread[dict[torch.device, TapeOrder]] = PerThread(dict)

    def put(self, placed: Placed) -> int | None:
        """Note that ``placed`` is the next tensor that this thread puts. Returns its tier; None if there is no plan."""
        with self._lock:
            self._apply_releases()
            order = self._order(placed.device)
            placed.turn = Turn(placed, order)
            return order.place(placed.turn, placed.nbytes)

    def next_tier(self, device: torch.device) -> int | None:
        """The tier of the tensor of ``device`` that this thread puts next; None if there is no plan."""
        with self._lock:
            self._apply_releases()
            return self._order(device).next_tier()

    def _order(self, device: torch.device) -> TapeOrder:
        orders = self._own()
        order = orders.get(device)
        if order is None:
            order = orders[device] = TapeOrder(functools.partial(self._limits, device))
        return order

    def read(self, placed: Placed, look: int) -> list[Placed]:
        """Note that ``placed`` is read now. Returns up to ``look`` tensors that backward will read next."""
        turn = placed.turn
        if turn is None:
            return []
        with self._lock:
            self._apply_releases()
            turn.order.read(turn)
            following = itertools.islice(turn.order.after(turn), look)
            found = [cast(Turn, other).placed() for other, _ in following]
        return [other for other in found if other is not None]

    def to_bring(self, placed: Placed, room: int) -> list[Placed]:
        """The tensors to bring back now, of the tape of ``placed``: by its plan, as far as they fit into ``room``."""
        tape = None if placed.turn is None else placed.turn.tape
        if tape is None or tape.plan is None:
            return []
        found: list[Placed] = []
        with self._lock:
            while room > 0 and tape.next_back < len(tape.plan.back):
                group, members = tape.plan.groups[tape.plan.back[tape.next_back]], []
                for index in range(min(group.last, len(tape.turns) - 1), group.first - 1, -1):
                    turn = tape.turns[index]
                    if not isinstance(turn, Turn) or index in tape.reads:  # what was read need not come again
                        continue
                    other = turn.placed()
                    if other is not None and other.tier > 0 and not other.asked:
                        members.append(other)
                        room -= other.nbytes
                        if room < 0:
                            return found
                tape.next_back += 1
                found += members
        return found

    def of(self, placed: Placed) -> float:
        """When backward will read ``placed``; a larger number is later."""
        turn = placed.turn
        if turn is None:
            return 0.0
        with self._lock:
            return turn.order.turn(turn)

    def drop(self, placed: Placed) -> None:
        """Note that ``placed`` is dropped; destructors call this. See [Note: destructors]."""
        turn = placed.turn
        if turn is not None and not turn.dropped:
            turn.dropped = True
            self.release(turn)

    def _apply_release(self, release: Turn) -> None:
        release.order.drop(release)
