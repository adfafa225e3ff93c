"""The library's own plan (``disthooks.saved.stores.plan``) on the modelled clock."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from disthooks.saved.stores.plan import Placement, Tapes, make_plan
from tests.support.sim.clock import Block, Event, Machine, Policy


class _Entry:
    """A saved storage in its place of the tape.

    Attributes:
        position: in the tape.
        ready: when the computation has written it.
        leaves: its memory is given back as soon as it is copied; otherwise when room is needed.
        sent: when it is in host memory; None if it was not sent.
    """

    def __init__(self, position: int, block: Block, ready: Event, leaves: bool) -> None:
        self.position, self.block, self.ready, self.leaves = position, block, ready, leaves
        self.sent: Event | None = None

    @property
    def live(self) -> int:
        """Bytes of it, if it was not dropped."""
        return 0 if self.block.is_dropped else self.block.nbytes


class PlannedTiered(Policy):
    """``Tiered(OnDevice(limit), OnCpu())``: each tensor is sent at its put, if the plan says so.

    The policy remembers its tapes from step to step. Under a plan exactly the storages that do not stay are sent, from
    the first put on, and come back from the first read on into what backward has freed. Without a plan, a tensor is
    sent when what was put after it needs the room, and a window below the limit is left to copies on their way. If
    copies are late, the computation waits rather than pass the limit. A tensor that was read does not count any more.

    Args:
        limit: bytes of saved tensors on the device; those on their way count.
    """

    is_store = True

    def __init__(self, limit: int) -> None:
        self.limit, self._largest = limit, 0
        self.tapes = Tapes(self._plan)
        self._order: list[Block] = []
        self._reads: list[int] = []
        self._early: set[int] = set()  # positions that were dropped in forward

    def _plan(self, sizes: Sequence[int], reads: Sequence[int] | None) -> Placement:
        return make_plan(sizes, [self.limit, None], reads)

    @property
    def plan(self) -> Placement | None:
        """The plan for the newest storage; None if there is none, or if the tape is longer than it said."""
        plan = self.tapes.plan
        return None if plan is None or len(self._order) > len(plan.places) else plan

    def begin(self, machine: Machine) -> None:
        super().begin(machine)
        if self._order:
            needed = [0 if i in self._early else block.nbytes for i, block in enumerate(self._order)]
            self.tapes.end(self._reads, needed)
        self._order, self._reads, self._early = [], [], set()
        self._is_backward = False
        self._here: list[_Entry] = []  # those that stay
        self._pending: collections.deque[_Entry] = collections.deque()  # not yet given to the link
        self._leaving: list[_Entry] = []  # those that are sent, or will be, and are here still; the oldest first
        self._gone: list[_Entry] = []
        self._counted: set[int] = set()  # numbers of the storages that are on the device, for the limit
        self._bytes = 0  # of these

    # -- forward

    def put(self, block: Block) -> None:
        self._largest = max(self._largest, block.nbytes)
        self.tapes.put(block.nbytes)
        self._order.append(block)
        self._count(block)
        plan, position = self.plan, len(self._order) - 1
        entry = _Entry(position, block, self.machine.compute.record(), plan is not None)
        if plan is not None and plan.places[position] and block.nbytes:
            self._send(entry)
        else:
            self._here.append(entry)
        if plan is None:
            self._send_near_limit()
        self._launch_due()
        self._make_room()

    def _send(self, entry: _Entry) -> None:
        self._pending.append(entry)
        self._leaving.append(entry)

    def _send_near_limit(self) -> None:
        """Without a plan, what was saved first makes room for the newest."""
        window = min(self.limit // 8, 2 * self._largest)
        stay = sum(entry.block.nbytes for entry in self._here)
        while len(self._here) > 1 and stay > self.limit - window:
            entry = self._here.pop(0)
            stay -= entry.block.nbytes
            entry.leaves = True
            self._send(entry)

    def _launch_due(self) -> None:
        """A copy begins as soon as the link is free and its storage is written, not when the host comes by."""
        out, now = self.machine.out, self.machine.compute.now
        while self._pending and max(out.now, self._pending[0].ready.time) <= now:
            self._launch(self._pending.popleft())
        for entry in [entry for entry in self._leaving if entry.leaves and entry.sent and entry.sent.time <= now]:
            self._leave(entry)

    def _launch(self, entry: _Entry) -> None:
        entry.sent = self.send(entry.block, entry.ready)
        if entry.leaves:
            self.give_back(entry.block, entry.sent, entry.sent.time)

    def _make_room(self) -> None:
        """Wait until the storages on the device are within the limit."""
        while self._bytes > self.limit and self._leaving:
            entry = next((entry for entry in self._leaving if entry.leaves), self._leaving[0])
            while entry.sent is None:
                self._launch(self._pending.popleft())
            self.machine.wait_event(self.machine.compute, entry.sent)
            self.machine.synchronize(entry.sent)
            if not entry.leaves:
                self.give_back(entry.block, entry.sent, self.machine.compute.now)
            self._leave(entry)
            self._launch_due()

    def _leave(self, entry: _Entry) -> None:
        """``entry`` is not on the device any more, for the limit."""
        self._leaving.remove(entry)
        self._gone.append(entry)
        self._uncount(entry.block)

    def _count(self, block: Block) -> None:
        self._counted.add(block.number)
        self._bytes += block.nbytes

    def _uncount(self, block: Block) -> None:
        if block.number in self._counted:
            self._counted.discard(block.number)
            self._bytes -= block.nbytes

    # -- backward

    def begin_backward(self) -> None:
        self._launch_due()
        self._is_backward = True
        self._pending.clear()  # all that is not on its way may stay: it is within the limit
        self._leaving = [entry for entry in self._leaving if entry.leaves and entry.sent is not None]
        # In the order of the last reads; what is read first is taken from the end.
        plan = self.plan
        turn = {} if plan is None else {position: n for n, position in enumerate(plan.order)}
        self._back = sorted(self._gone + self._leaving, key=lambda entry: -turn.get(entry.position, -entry.position))
        self._refill()

    def _refill(self) -> None:
        """Ask for storages as long as they fit into what is free."""
        self._launch_due()
        while self._back and self._bytes + self._back[-1].live <= self.limit:
            self._bring(self._back.pop())

    def _bring(self, entry: _Entry) -> None:
        block = entry.block
        if block.is_dropped:
            assert entry.sent is not None
            self.machine.host_memory.free(block.nbytes, entry.sent.time)
            return
        self.bring(block)
        self._uncount(block)
        self._count(block)

    def get(self, block: Block) -> None:
        self._reads.append(self._order.index(block))
        self._refill()
        if block.sent is not None and block.brought is None:
            entry = next(entry for entry in self._back if entry.block is block)
            self._back.remove(entry)
            self._bring(entry)
        if block.brought is not None:
            self._uncount(block)
            self._refill()

    def drop(self, block: Block) -> None:
        if not self._is_backward:
            self._early.add(self._order.index(block))
        if block.sent is None or block.brought is not None:
            self._uncount(block)
        if self._is_backward:
            self._refill()
