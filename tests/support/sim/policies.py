"""``OnCpu`` on the modelled clock: what it sends, when, what it waits for. ``planned.py`` has the way of the plan."""

from __future__ import annotations

import collections

from tests.support.sim.clock import Block, Event, Machine, Policy

MIB = 1 << 20


class EverythingOut(Policy):
    """``OnCpu()``, which has no plan: each tensor is sent when it is saved, and brought back in the reverse order.

    Of the tensors on the device at most ``in_flight`` bytes are sent or were brought ahead; one tensor may be larger.
    """

    is_store = True

    def __init__(self, in_flight: int = 512 * MIB) -> None:
        self.most = in_flight

    def begin(self, machine: Machine) -> None:
        super().begin(machine)
        self._flying: collections.deque[Block] = collections.deque()  # sent; the oldest first
        self._ahead: dict[int, Block] = {}  # brought before they are read
        self._order: list[Block] = []  # in which they were put

    def put(self, block: Block) -> None:
        """Send ``block``; the computation waits until what is sent already leaves room for it."""
        if not block.nbytes:
            return
        self._order.append(block)
        while self._held() + block.nbytes > self.most and self._flying:
            self.machine.wait_event(self.machine.compute, _sent(self._flying.popleft()))
        event = self.send(block, self.machine.compute.record())
        self.give_back(block, event, event.time)
        self._flying.append(block)

    def _held(self) -> int:
        """Bytes on the device that are on their way at the time of the computation, or were brought ahead."""
        now = self.machine.compute.now
        while self._flying and _sent(self._flying[0]).time <= now:
            self._flying.popleft()
        return sum(block.nbytes for block in (*self._flying, *self._ahead.values()))

    def begin_backward(self) -> None:
        for block in self._order[::-1]:
            if block.sent is None or block.brought is not None or block.is_dropped:
                continue
            if self._held() + block.nbytes > self.most:
                return
            self.bring(block)
            self._ahead[block.number] = block

    def get(self, block: Block) -> None:
        if block.sent is not None and block.brought is None:
            self.bring(block)
        self._ahead.pop(block.number, None)

    def drop(self, block: Block) -> None:
        while self._order and self._order[-1].is_dropped:
            self._order.pop()
        self.begin_backward()


def _sent(block: Block) -> Event:
    assert block.sent is not None
    return block.sent
