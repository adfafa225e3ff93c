"""Ways without a plan on the modelled clock (``clock.py``): the stores before there was one, and those of others.

They are models: what each sends, when, and what it waits for. Bytes are those that a store gets, and a limit is in
bytes. ``planned.py`` has the way of the plan.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from tests.support.sim.clock import Block, Event, Machine, Policy

MIB = 1 << 20


class _Link(Policy):
    """Copies of single tensors with a bound on the bytes that are on their way, as a offload has it.

    Attributes:
        most: bytes of tensors on the device that are sent or were brought ahead; one tensor may be larger.
    """

    is_store = True

    def __init__(self, most: int) -> None:
        self.most = most

    def begin(self, machine: Machine) -> None:
        super().begin(machine)
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
    """``OnCpu()``, which has no plan: each tensor is sent when it is saved, and brought back in the reverse order."""

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
    """``Tiered(OnDevice(limit), OnCpu())`` before the plan: it sends the oldest near the limit, and looks little ahead.

    The window before the limit is an eighth of it, or two of the largest tensor if that is less. In backward it looks
    at the next 8 tensors, and brings those whose bytes together are at most 32 MiB. From the first tensor on that
    backward reads from the host, ``OnCpu`` itself brings the next ones, at least one, and more if the limit allows.
    """

    name = "Tiered before"
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


class SaveOnCpu(Policy):
    """``torch.autograd.graph.save_on_cpu(pin_memory=True)``: copies stand in the stream of the computation.

    A storage is copied once here. torch copies it once for each save, and parameters too, so this is a lower bound.
    """

    name = "torch save_on_cpu"
    is_store = True

    def put(self, block: Block) -> None:
        if block.nbytes:
            self.machine.wait_event(self.machine.compute, self.send([block]))

    def get(self, block: Block) -> None:
        if block.sent is not None and block.brought is None:
            self.bring([block])


class StashOfFive(Policy):
    """TRL's ``OffloadActivations``: five copies at most are on their way, and nothing is read ahead."""

    name = "trl OffloadActivations"
    is_store = True
    most = 5

    def begin(self, machine: Machine) -> None:
        super().begin(machine)
        self._stash: collections.deque[Event] = collections.deque()

    def put(self, block: Block) -> None:
        if len(self._stash) == self.most:
            self.machine.wait_event(self.machine.compute, self._stash.popleft())
        if block.nbytes:
            self._stash.append(self.send([block]))

    def get(self, block: Block) -> None:
        if block.sent is not None and block.brought is None:
            self.bring([block])
