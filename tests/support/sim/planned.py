"""The library's own plan (``disthooks.saved.stores.plan``) on the modelled clock."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence

from disthooks.saved.stores.plan import Placement, Tapes, make_plan
from tests.support.sim.clock import Block, Event, Machine, Policy

MIB = 1 << 20


class _Group:
    """Storages that move together.

    Attributes:
        first, last: their positions in the tape.
        ready: when the computation has written them.
        place: where they go; 0 if they stay.
        leaves: its memory is given back as soon as it is copied; otherwise when room is needed.
        sent: when it is in host memory; None if it was not sent.
        far: when it is at its place.
        near: when it is in host memory again, for a group that was on a disk.
    """

    def __init__(self, first: int, blocks: Sequence[Block], ready: Event, place: int, leaves: bool) -> None:
        self.first, self.last, self.blocks = first, first + len(blocks) - 1, list(blocks)
        self.ready, self.place, self.leaves = ready, place, leaves
        self.nbytes = sum(block.nbytes for block in blocks)
        self.sent: Event | None = None
        self.far: Event | None = None
        self.near: Event | None = None

    @property
    def live(self) -> int:
        """Bytes of the storages that were not dropped."""
        return sum(block.nbytes for block in self.blocks if not block.is_dropped)


def _place_of(plan: Placement, first: int, last: int) -> int:
    """The furthest place of the entries ``first`` to ``last``: for a group that was cut by another plan."""
    return max((group.place for group in plan.groups if group.first <= last and first <= group.last), default=0)


class Planned(Policy):
    """One tape, several places: device, host and disk.

    The policy remembers its tapes from step to step. A step whose tape is not known sends every full group, and keeps
    its memory until another storage needs the room. Under a plan exactly the groups that do not stay are sent, from the
    first put on, and come back from the first read on into what backward has freed.

    Args:
        limits: bytes of saved tensors in each place, the nearest first; None for no limit. On the device those on their
            way count. If copies are late, the computation waits rather than pass the limit.
        group: bytes of a group at least.
        window: bytes of the device's limit that are left to copies on their way without a plan.
        is_joined: a group is one copy, which is sent when it is complete. Otherwise each storage is sent at its put.
        is_written_through: of a tape that is not known everything is sent; otherwise what passes the limit.
    """

    name = "plan"
    is_store = True

    def __init__(
        self,
        limits: Sequence[int | None],
        group: int = 64 * MIB,
        *,
        window: int = 0,
        is_joined: bool = True,
        is_written_through: bool = True,
    ) -> None:
        self.limits, self.group, self.window = limits, group, window
        self.is_joined, self.is_written_through = is_joined, is_written_through
        self.limit = limits[0]
        self.tapes = Tapes(self._plan)
        self._order: list[Block] = []
        self._reads: list[int] = []
        self._early: set[int] = set()  # positions that were dropped in forward

    def _plan(self, sizes: Sequence[int], reads: Sequence[int] | None) -> Placement:
        return make_plan(sizes, self.limits, group=self.group, reads=reads)

    @property
    def plan(self) -> Placement | None:
        """The plan for the newest storage; None if there is none, or if the tape is longer than it said."""
        plan = self.tapes.plan
        return None if plan is None or len(self._order) > len(plan) else plan

    def begin(self, machine: Machine) -> None:
        super().begin(machine)
        if self._order:
            needed = [0 if i in self._early else block.nbytes for i, block in enumerate(self._order)]
            self.tapes.end(self._reads, needed)
        self._order, self._reads, self._early = [], [], set()
        self._is_backward = False
        self._open: list[Block] = []  # the group that is being filled
        self._here: list[_Group] = []  # groups that stay
        self._pending: collections.deque[_Group] = collections.deque()  # not yet given to the link
        self._leaving: list[_Group] = []  # groups that are sent, or will be, and are here still; the oldest first
        self._gone: list[_Group] = []
        self._counted: set[int] = set()  # numbers of the storages that are on the device, for the limit
        self._bytes = 0  # of these
        self._host_bytes = 0
        self._in_host: collections.deque[_Group] = collections.deque()  # groups that are to stay in host memory
        self._host_frees: list[tuple[float, int]] = []  # when bytes of the host are given back, a heap

    # -- forward

    def put(self, block: Block) -> None:
        changed = self.tapes.put(block.nbytes)
        self._order.append(block)
        self._open.append(block)
        self._count(block)
        plan, position = self.plan, len(self._order) - 1
        nbytes = sum(other.nbytes for other in self._open)
        if not self.is_joined or (nbytes >= self.group if plan is None else plan.group(position).last == position):
            self._close()
        if changed and self.is_written_through:
            self._send_late()
        if plan is None and not self.is_written_through:
            self._send_near_limit()
        self._launch_due()
        self._make_room()

    def _close(self) -> None:
        """The open group is complete."""
        if not self._open:
            return
        plan, first = self.plan, len(self._order) - len(self._open)
        place = int(self.is_written_through) if plan is None else _place_of(plan, first, len(self._order) - 1)
        group = _Group(first, self._open, self.machine.compute.record(), place, plan is not None)
        self._open = []
        if group.place and group.nbytes:
            self._pending.append(group)
            self._leaving.append(group)
        else:
            self._here.append(group)

    def _send_near_limit(self) -> None:
        """Without a plan, what was saved first makes room for the newest."""
        stay = sum(group.nbytes for group in self._here)
        while self.limit is not None and len(self._here) > 1 and stay > self.limit - self.window:
            group = self._here.pop(0)
            stay -= group.nbytes
            group.place, group.leaves = 1, True
            self._pending.append(group)
            self._leaving.append(group)

    def _send_late(self) -> None:
        """Groups that stayed under another plan are sent, if they do not stay under this one."""
        plan, stay = self.plan, list[_Group]()
        for group in self._here:
            group.place = 1 if plan is None else _place_of(plan, group.first, group.last)
            group.leaves = plan is not None
            if group.place and group.nbytes:
                self._pending.append(group)
                self._leaving.append(group)
            else:
                stay.append(group)
        self._here = stay

    def _launch_due(self) -> None:
        """A copy begins as soon as the link is free and its group is written, not when the host comes by."""
        out, now = self.machine.out, self.machine.compute.now
        while self._pending and max(out.now, self._pending[0].ready.time) <= now:
            self._launch(self._pending.popleft())
        for group in [group for group in self._leaving if group.leaves and group.sent and group.sent.time <= now]:
            self._leave(group)

    def _launch(self, group: _Group) -> None:
        machine = self.machine
        # What is saved first goes furthest: if the plan has left no room in host memory, it moves on to the disk.
        event = group.sent = group.far = machine.to_host(group.nbytes, group.ready, self._host_room(group.nbytes))
        machine.host_memory.allocate(group.nbytes, event.time - group.nbytes / machine.rates.to_host)
        if group.place > 1:
            self._to_disk(group)
        else:
            self._in_host.append(group)
        if group.leaves:
            self._give_back(group, event.time)

    def _to_disk(self, group: _Group) -> None:
        assert group.sent is not None
        group.place, group.far = 2, self.machine.to_disk(group.nbytes, group.sent)
        self._free_host(group.nbytes, group.far)

    def _host_room(self, nbytes: int) -> Event:
        """Take bytes of the host's limit: the event after which they are free."""
        limit, at = self.limits[1], 0.0
        while limit is not None and self._host_bytes + nbytes > limit and (self._host_frees or self._in_host):
            if self._host_frees:
                at, freed = heapq.heappop(self._host_frees)
                self._host_bytes -= freed
            else:
                self._to_disk(self._in_host.popleft())
        self._host_bytes += nbytes
        return Event(at)

    def _free_host(self, nbytes: int, event: Event) -> None:
        self.machine.host_memory.free(nbytes, event.time)
        heapq.heappush(self._host_frees, (event.time, nbytes))

    def _make_room(self) -> None:
        """Wait until the storages on the device are within the limit."""
        while self.limit is not None and self._bytes > self.limit:
            if not self._leaving and self.plan is None:
                self._close()
            if not self._leaving:
                return
            group = next((group for group in self._leaving if group.leaves), self._leaving[0])
            while group.sent is None:
                self._launch(self._pending.popleft())
            self._wait(group.sent)
            if not group.leaves:
                self._give_back(group, self.machine.compute.now)
            self._leave(group)
            self._launch_due()

    def _wait(self, event: Event) -> None:
        self.machine.wait_event(self.machine.compute, event)
        self.machine.synchronize(event)

    def _give_back(self, group: _Group, at: float) -> None:
        """The device memory of ``group`` is free at the second ``at``."""
        for block in group.blocks:
            block.sent = group.sent
            if not (block.saved.is_whole and block.in_forward):  # `release` frees what forward reads still
                self.free(block, at)

    def _leave(self, group: _Group) -> None:
        """``group`` is not on the device any more, for the limit."""
        self._leaving.remove(group)
        self._gone.append(group)
        for block in group.blocks:
            self._uncount(block)

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
        self._leaving = [group for group in self._leaving if group.leaves and group.sent is not None]
        groups = self._gone + self._leaving
        # In the order of the last reads; what is read first is taken from the end.
        plan = self.plan
        turn = {} if plan is None else {plan.groups[i].first: -n for n, i in enumerate(plan.back)}

        def last_first(group: _Group) -> tuple[int, int]:
            first = group.first if plan is None else plan.group(group.first).first
            return turn.get(first, -len(turn)), group.first

        groups.sort(key=last_first)
        self._back = groups
        self._on_disk = [group for group in groups if group.place > 1]
        self._refill()

    def _refill(self) -> None:
        """Ask groups back as long as they fit into what is free."""
        self._launch_due()
        self._read_ahead()
        while self._back and self._fits(self._back[-1]):
            self._bring(self._back.pop())
            self._read_ahead()

    def _fits(self, group: _Group) -> bool:
        return self.limit is None or self._bytes + group.live <= self.limit

    def _read_ahead(self) -> None:
        """Read groups from the disk into what is free of the host's memory, or will be."""
        limit = self.limits[1] if len(self.limits) > 1 else None
        while self._on_disk:
            free = sum(nbytes for _, nbytes in self._host_frees)
            if limit is not None and self._host_bytes - free + self._on_disk[-1].nbytes > limit:
                return
            self._read_disk(self._on_disk.pop())

    def _read_disk(self, group: _Group) -> None:
        machine, room = self.machine, self._host_room(group.nbytes)
        assert group.far is not None
        group.near = machine.from_disk(group.nbytes, room, machine.compute.record(), group.far)
        machine.host_memory.allocate(group.nbytes, group.near.time - group.nbytes / machine.rates.disk_read)

    def _bring(self, group: _Group) -> None:
        machine = self.machine
        if group in self._on_disk:
            self._on_disk.remove(group)
            self._read_disk(group)
        at, wanted = group.near or group.far, [block for block in group.blocks if not block.is_dropped]
        assert at is not None
        if wanted:
            event = machine.to_device(group.live, machine.compute.record(), at)
            begin = event.time - machine.rates.copy_s - group.live / machine.rates.to_device
            for block in wanted:
                block.brought, block.is_resident = event, True
                machine.memory.allocate(block.nbytes, begin)
                self._uncount(block)
                self._count(block)
            at = event
        self._free_host(group.nbytes, at)

    def get(self, block: Block) -> None:
        self._reads.append(next(i for i, other in enumerate(self._order) if other is block))
        self._refill()
        if block.sent is not None and block.brought is None:
            group = next(group for group in self._back if block in group.blocks)
            self._back.remove(group)
            self._bring(group)

    def drop(self, block: Block) -> None:
        if not self._is_backward:
            self._early.add(next(i for i, other in enumerate(self._order) if other is block))
        if block.sent is None or block.brought is not None:
            self._uncount(block)
        if self._is_backward:
            self._refill()


class PlannedTiered(Planned):
    """``Tiered(OnDevice(limit), OnCpu())``: each tensor is sent at its put, if the plan says so.

    Without a plan, a tensor is sent when what was put after it needs the room, and a window below the limit is left to
    copies on their way. A tensor that was read does not count any more.
    """

    name = "Tiered"

    def __init__(self, limit: int) -> None:
        super().__init__([limit, None], is_joined=False, is_written_through=False)
        self._most, self._largest = limit, 0

    def put(self, block: Block) -> None:
        self._largest = max(self._largest, block.nbytes)
        self.window = min(self._most // 8, 2 * self._largest)
        self.group = max(1, min(64 * MIB, self._most // 8))
        super().put(block)

    def get(self, block: Block) -> None:
        super().get(block)
        if block.brought is not None:
            self._uncount(block)
            self._refill()
