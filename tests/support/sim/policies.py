"""Ways to offload on the modelled clock (``clock.py``): today's stores, and the plan that is made from the last tape.

They are models of the stores, not the stores: what each sends, when, and what it waits for. Bytes are those that a
store gets, and a limit is in bytes.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from tests.support.sim.clock import Block, Event, Policy, Tape, reads

MIB = 1 << 20


class _Link(Policy):
    """Copies of single tensors with a bound on the bytes that are on their way, as a courier has it.

    Attributes:
        most: bytes of tensors on the device that are sent or were brought ahead; one tensor may be larger.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._flying: collections.deque[Block] = collections.deque()  # sent; the oldest first
        self._ahead: dict[int, Block] = {}  # brought before they are read
        self._order: list[Block] = []  # in which they were put

    def _held(self) -> int:
        """Bytes on the device that are on their way at the time of the computation, or were brought ahead."""
        now = self.machine.compute.now
        while self._flying and _sent(self._flying[0]).time <= now:
            self._flying.popleft()
        return sum(block.nbytes for block in (*self._flying, *self._ahead.values()))

    def _give(self, block: Block) -> None:
        """Send ``block``; the computation waits until what is sent already leaves room for it."""
        while self._held() + block.nbytes > self.most and self._flying:
            self.machine.wait_event(self.machine.compute, _sent(self._flying.popleft()))
        self.send([block])
        self._flying.append(block)

    def _bring_ahead(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.sent is None or block.brought is not None or block.is_dropped:
                continue
            if self._held() + block.nbytes > self.most:
                return
            self.bring([block])
            self._ahead[block.number] = block

    def _read(self, block: Block) -> None:
        if block.sent is not None and block.brought is None:
            self.bring([block])
        self._ahead.pop(block.number, None)


def _sent(block: Block) -> Event:
    assert block.sent is not None
    return block.sent


class EverythingOut(_Link):
    """``OnCpu()``: each tensor is sent when it is saved, and brought back before it is read, in the reverse order.

    Args:
        in_flight: as of the store, bytes.
    """

    name = "OnCpu"

    def __init__(self, in_flight: int = 512 * MIB) -> None:
        super().__init__(in_flight)

    def put(self, block: Block) -> None:
        if block.nbytes:
            self._order.append(block)
            self._give(block)

    def begin_backward(self) -> None:
        self._bring_ahead(self._order[::-1])

    def get(self, block: Block) -> None:
        self._read(block)

    def drop(self, block: Block) -> None:
        while self._order and self._order[-1].is_dropped:
            self._order.pop()
        self._bring_ahead(self._order[::-1])


class NearTheLimit(_Link):
    """``Tiered(OnDevice(limit), OnCpu())`` as it is: it sends the oldest near the limit, and looks a little ahead.

    The window before the limit is an eighth of it, or two of the largest tensor if that is less. In backward it looks
    at the next 8 tensors, and brings those whose bytes together are at most 32 MiB. From the first tensor on that
    backward reads from the host, ``OnCpu`` itself brings the next ones, at least one, and more if the limit allows.

    Args:
        limit: bytes of saved tensors on the device.
        in_flight: of the ``OnCpu``, bytes.
    """

    name = "Tiered"
    look, ahead = 8, 32 * MIB

    def __init__(self, limit: int, in_flight: int = 512 * MIB) -> None:
        super().__init__(0)
        self.limit, self.in_flight, self._largest, self._bytes = limit, in_flight, 0, 0
        self._here: collections.deque[Block] = collections.deque()  # the oldest first

    def put(self, block: Block) -> None:
        nbytes = block.nbytes
        if not nbytes:
            return
        self._order.append(block)
        self._largest = max(self._largest, nbytes)
        early = self.limit - min(self.limit // 8, 2 * self._largest)
        while nbytes <= self.limit and self._here and self._bytes + nbytes > early:
            self._evict(nbytes)
        if nbytes > self.limit:
            self._leave(0)
            self._give(block)
            return
        self._here.append(block)
        self._bytes += nbytes

    def _evict(self, wanted: int) -> None:
        block = self._here.popleft()
        self._leave(wanted - block.nbytes)
        self._give(block)
        self._bytes -= block.nbytes

    def _leave(self, nbytes: int) -> None:
        """Let copies hold on the device what the limit leaves, less ``nbytes``."""
        self.most = min(self.in_flight, max(0, self.limit - self._bytes - nbytes))

    def get(self, block: Block) -> None:
        self._read(block)
        self._leave(0)
        while self._order and self._order[-1].is_dropped:
            self._order.pop()
        place = next((i for i, other in enumerate(self._order) if other is block), len(self._order))
        following = self._order[:place][::-1]
        if block.sent is not None:
            out = [other for other in following if other.sent is not None and other.brought is None]
            if out and not self._ahead:
                self.bring(out[:1])
                self._ahead[out[0].number] = out[0]
            self._bring_ahead(out)
            return
        left, wanted = self.ahead, []
        for other in following[: self.look]:
            left -= other.nbytes if other.sent is not None else 0
            if left < 0:
                break
            wanted.append(other)
        self._bring_ahead(wanted)

    def drop(self, block: Block) -> None:
        if block.nbytes and block.sent is None:
            self._bytes -= block.nbytes
            self._here.remove(block)


class FirstSavedFirst(Policy):
    """The plan: of ``T`` bytes that the last tape saved, the first ``T - limit`` are sent from the first put on.

    The last saved stays, because backward reads it first. Groups come back from the start of backward on, in the order
    in which the last backward read them, into the memory that backward frees.

    Args:
        tape: the last one of the same signature.
        limit: bytes of saved tensors on the device, those on their way included. If copies are late, the computation
            waits for them rather than pass the limit.
        group: bytes of a copy at least, but for the last one.
    """

    name = "first saved goes first"

    def __init__(self, tape: Tape, limit: int, group: int = 64 * MIB) -> None:
        self.limit, self.group = limit, group
        self._sends = _first(tape, tape.nbytes - limit)
        self._turn = {number: turn for turn, number in enumerate(reads(tape))}
        self._open: list[Block] = []  # the group that is being filled
        self._groups: list[list[Block]] = []  # sent, and not yet asked back
        self._flying: collections.deque[list[Block]] = collections.deque()
        self._bytes = 0  # of saved tensors on the device, as the computation sees it

    def put(self, block: Block) -> None:
        if not block.nbytes:
            return
        self._bytes += block.nbytes
        if block.number in self._sends:
            self._open.append(block)
            if sum(each.nbytes for each in self._open) >= self.group or len(self._groups_left()) == 0:
                self._flush()
        self._settle()
        while self._bytes > self.limit and self._flying:
            self.machine.wait_event(self.machine.compute, _sent(self._flying[0][0]))
            self._settle()

    def _groups_left(self) -> set[int]:
        """Storages that are to be sent and were not put yet."""
        self._sends -= {block.number for block in self._open}
        return self._sends

    def _flush(self) -> None:
        if self._open:
            self.send(self._open)
            self._flying.append(self._open)
            self._groups.append(self._open)
            self._open = []

    def _settle(self) -> None:
        now = self.machine.compute.now
        while self._flying and _sent(self._flying[0][0]).time <= now:
            self._bytes -= sum(block.nbytes for block in self._flying.popleft())

    def begin_backward(self) -> None:
        self._flush()
        # What is read first comes last, so that it is taken from the end.
        self._groups.sort(key=lambda group: -min(self._turn.get(block.number, 0) for block in group))
        self._refill()

    def _refill(self) -> None:
        """Ask groups back as long as they fit into what is free."""
        self._settle()
        while self._groups and self._bytes + sum(block.nbytes for block in self._groups[-1]) <= self.limit:
            self._ask(self._groups.pop())

    def _ask(self, group: list[Block]) -> None:
        wanted = [block for block in group if not block.is_dropped]
        if group in self._flying:  # its memory is given back before it is taken again
            self.machine.wait_event(self.machine.compute, _sent(group[0]))
            self._settle()
        if wanted:
            self.bring(wanted)
            self._bytes += sum(block.nbytes for block in wanted)

    def get(self, block: Block) -> None:
        if block.sent is not None and block.brought is None:
            group = next(group for group in self._groups if block in group)
            self._groups.remove(group)
            self._ask(group)

    def drop(self, block: Block) -> None:
        if block.sent is None or block.brought is not None:
            self._bytes -= block.nbytes
        self._refill()


def _first(tape: Tape, nbytes: int) -> set[int]:
    """The storages that were saved first, as many as have at least ``nbytes`` bytes together."""
    found, left = set(), nbytes
    for kind, value in tape.steps:
        if kind == "put" and left > 0 and tape.saved[int(value)].stored:
            found.add(int(value))
            left -= tape.saved[int(value)].stored
    return found
