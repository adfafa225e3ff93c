"""Several stores in a row: saved tensors that backward reads first stay in the first store, the others go further."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._locks import new_lock
from disthooks._registry import register
from disthooks._streams import handed_over, on, stream_of
from disthooks._tensors import resident
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, Counted, DeviceBudgets, Store, StoreReport, StoreSpec, Tier
from disthooks.saved.stores.copies import Outgoing
from disthooks.saved.stores.placed import ForwardTape, NoRoom, Placed, PlacedTensors, comparing


class _There(Counted):
    """A tensor, and the stream that filled it if it is on an accelerator."""

    __slots__ = ("stream", "tensor")

    def __init__(self, tensor: torch.Tensor, budget: ByteBudget) -> None:
        super().__init__(budget)
        self.tensor, self.stream = tensor, stream_of(tensor)


class OpenOnDevice(Tier):
    """An :class:`OnDevice` at work: the bytes on each device under its limit."""

    def __init__(self, budget: DeviceBudgets) -> None:
        self.budget = budget
        self._read = 0  # no lock: an update that another thread overwrites only makes the figure inexact
        self._below: tuple[weakref.ref[Tier], ...] = ()

    @property
    def below(self) -> list[Tier]:
        """The stores behind it in each :class:`Tiered`. What they hold on the device counts against its limit, too."""
        return [store for ref in self._below if (store := ref()) is not None]

    def add_below(self, stores: Sequence[Tier]) -> None:
        self._below = tuple(map(weakref.ref, dict.fromkeys([*self.below, *stores])))

    def put(self, tensor: torch.Tensor) -> _There:
        nbytes = max(tensor.nbytes, resident(tensor))  # a view keeps its whole storage alive
        there = _There(tensor, self.budget.of(tensor.device))
        there.budget.reserve(nbytes, there)
        return there

    def get(self, ticket: _There) -> torch.Tensor:
        self._read += ticket.reserved
        return ticket.tensor if ticket.stream is None else handed_over(ticket.tensor, ticket.stream)

    def peek(self, ticket: _There) -> torch.Tensor:
        return ticket.tensor

    def drop(self, ticket: _There) -> None:
        ticket.drop()

    def begin_count(self) -> None:
        self._read = 0

    def report(self) -> tuple[StoreReport, ...]:
        return (
            StoreReport(
                "OnDevice()",
                held=self.budget.held,
                limit=self.budget.limit,
                from_memory=self._read,
                devices=max(1, self.budget.devices),
                peak_held=self.budget.peak,
            ),
        )


@register("store")
@dataclass(frozen=True)
class OnDevice(StoreSpec["OpenOnDevice"]):
    """Keep saved tensors on the device that they are on, up to a limit on each device.

    Use it as the first store of a :class:`Tiered`, or behind codecs that make tensors smaller. It copies nothing. A
    view counts with all the bytes of its storage, because it keeps them alive.

    Args:
        limit: most bytes of this process on each device at any time: an int, text such as ``"8 GiB"``, or
            ``"64 GiB per node"``; None for no limit. A process with two GPUs (``nn.DataParallel``, a model that is
            split) may hold ``"8 GiB"`` on each of them; the CPU counts as a device of its own. ``per node`` divides the
            bytes equally among the processes of the node (``LOCAL_WORLD_SIZE``), and each device of a process may hold
            that part. In a ``Tiered``, bytes that the stores behind it hold on the device for a while count, too.

    Raises:
        UsageError: if ``limit`` is not a size.
        StoreError: in forward, if the limit is reached.

    >>> store = OnDevice("1 MiB")
    >>> x = torch.ones(3)
    >>> store.get(store.put(x)).data_ptr() == x.data_ptr()
    True
    """

    limit: int | str | None = None

    def __post_init__(self) -> None:
        ByteBudget(self.limit, "OnDevice")

    @property
    def budget(self) -> DeviceBudgets:
        """The bytes in use in this process, and their limit on each device."""
        return self.open().budget

    def _open(self) -> OpenOnDevice:
        return OpenOnDevice(DeviceBudgets(self.limit, "OnDevice"))

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        """False: the tensor stays where it is."""
        return False


class Queue:
    """The tensors of one tier, the oldest first: backward reads them last. It keeps none of them alive.

    >>> queue, old, new = Queue(0), Placed(8), Placed(8)
    >>> for placed in (old, new):
    ...     placed.tier = 0
    ...     queue.add(placed)
    >>> queue.oldest() is old
    True
    """

    def __init__(self, tier: int) -> None:
        self._tier = tier
        self._entries: collections.deque[weakref.ref[Placed]] = collections.deque()
        self._most = 1024  # with more entries than this, entries of dropped and moved tensors are removed
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, placed: Placed) -> None:
        with self._lock:
            if len(self._entries) > self._most:
                self._entries = collections.deque(entry for entry in self._entries if self._there(entry) is not None)
                self._most = 2 * len(self._entries) + 1024
            self._entries.append(weakref.ref(placed))

    def oldest(self) -> Placed | None:
        """The tensor that was put into this tier first; None if the tier is empty."""
        with self._lock:
            while self._entries:
                found = self._there(self._entries[0])
                if found is not None:
                    return found
                self._entries.popleft()
        return None

    def _there(self, entry: weakref.ref[Placed]) -> Placed | None:
        """The tensor of ``entry``; None if it was dropped, or is in another tier now."""
        placed = entry()
        return None if placed is None or placed.dropped or placed.tier != self._tier else placed


_AHEAD = 32 << 20  # most bytes that tiers are asked to bring nearer where no limit says how many there is room for


class OpenTiered(Store):
    """A :class:`Tiered` at work: which tensor is in which tier, and the order in which backward reads them.

    Attributes:
        specs: the stores, as the user gave them.
        stores: these at work in this process.
        largest: bytes of the largest tensor of each device that was put without a plan so far.
        stands_for_accelerator: whether tensors without streams stand for those of an accelerator, in a prediction.
        most: the most bytes of each accelerator that were in use under the limit of the first tier since ``most`` was
            cleared, those on their way to the tiers below included.
    """

    stands_for_accelerator = False

    def __init__(self, stores: tuple[Store, ...], name: str) -> None:
        self.specs, self._name = stores, name
        self.stores = tuple(map(_at_work, stores))
        self._last = len(stores) - 1
        self._behind = [store for store in self.stores[1:] if isinstance(store, Tier)]
        self._queues: dict[tuple[int, torch.device | None], Queue] = {}
        limits = weakref.WeakMethod(self._limits)  # weak: the tapes lie in this object, and no cycle may stay
        is_told = [tier > 0 and not getattr(store, "reads_ahead", False) for tier, store in enumerate(self.stores)]
        self.tapes = PlacedTensors(lambda device: found(device) if (found := limits()) is not None else [None], is_told)
        self.largest: dict[torch.device, int] = {}
        self.most: dict[torch.device, int] = {}
        self._broken: set[int] = set()  # tiers that failed, until they are empty
        self._device = self.stores[0] if isinstance(self.stores[0], OpenOnDevice) else None
        if self._device is not None:
            self._device.add_below(self._behind)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in the memory of the tier that it will be put into, which need not copy it again."""
        tier = self.tapes.next_tier(tensor.device)
        if tier is None:
            budgets = [self._budget(each, tensor.device) for each in range(len(self.stores))]
            tier = next((each for each, of in enumerate(budgets) if of is None or of.has_room(tensor.nbytes)), 0)
        return self.stores[tier].own(tensor)

    def put(self, tensor: torch.Tensor) -> Placed:
        placed = Placed(tensor.nbytes, None if tensor.is_cpu else stream_of(tensor), self, tensor.device)
        is_accelerator = placed.at is not None or self.stands_for_accelerator
        tier = self.tapes.put(placed)
        try:
            if tier:  # see [Note: tiers follow a plan] in placed.py
                try:  # noqa: SIM105  # `suppress` would be three calls for each saved tensor
                    self._place(placed, tensor, tier)
                except StoreError:  # no tier from there on has room: try the nearer ones
                    pass
            if placed.tier < 0:
                if is_accelerator:
                    self._make_way(placed, is_planned=tier is not None)
                self._place(placed, tensor, 0)
        except BaseException:
            placed.drop()
            raise
        if placed.tier > 0 and is_accelerator:
            self._leave_room(placed.device)
        return placed

    def get(self, ticket: Placed) -> torch.Tensor:
        if comparing.is_under_way:
            return self._get_for_comparison(ticket)
        tape = ticket.tape
        self.tapes.read(ticket)
        try:
            with ticket.lock:
                tensor = self._read(ticket)
        finally:
            if ticket.dropped:
                ticket.let_go()
        is_accelerator = ticket.at is not None or self.stands_for_accelerator
        if is_accelerator:
            self._leave_room(ticket.device)
        if tape is not None and tape.back:
            self._bring_nearer(tape, ticket.device, is_accelerator)
        return tensor

    def _get_for_comparison(self, ticket: Placed) -> torch.Tensor:
        """The tensor. Forward goes on after this, so no other is brought back.

        Raises:
            NoRoom: if the comparison can wait, and the limit of the first tier leaves no room for the tensor and for
                what is computed from it.
        """
        budget, wanted = self._nearest(ticket.device), 2 * ticket.nbytes
        is_accelerator = ticket.at is not None or self.stands_for_accelerator
        if is_accelerator and budget is not None and budget.limit is not None:
            if comparing.can_wait and wanted > budget.limit:
                raise NoRoom
            while budget.held + wanted > budget.limit and self._make_room(0, ticket.device, wanted):
                pass
            self._leave_room(ticket.device, wanted)
        try:
            with ticket.lock:
                tensor = self._read(ticket)
        finally:
            ticket.let_go()
        if is_accelerator:
            self._leave_room(ticket.device)  # the room that was wanted is there now, and not left for later puts
        return tensor

    def _read(self, ticket: Placed) -> torch.Tensor:
        """The tensor, from the tier that it is in. The caller holds its lock."""
        if ticket.dropped:
            raise StoreError("a stored tensor was read after it was dropped")
        store = self.stores[ticket.tier]
        try:
            return store.get(ticket.ticket)
        except StoreError:
            # The error may be about another tensor: a store raises the error of a failed write once, at the next call
            # (decision 36). If this tensor is still in memory, backward can use it.
            held = store.peek(ticket.ticket) if isinstance(store, Tier) else None
            tensor = store.get(ticket.ticket) if held is None else held
            return tensor if ticket.at is None else tensor.to(ticket.at.device)

    def prefetch(self, ticket: Placed) -> None:
        if ticket.lock.locked():
            return  # it is moved or read just now
        try:
            with ticket.lock:
                if not ticket.dropped:
                    self.stores[ticket.tier].prefetch(ticket.ticket)
        finally:
            ticket.let_go()

    def _bring_nearer(self, tape: ForwardTape, device: torch.device, is_accelerator: bool) -> None:
        """Ask the tiers to bring back what backward reads next, as far as there is room."""
        room = self._room(device, is_accelerator)
        if room is None:
            room = _AHEAD - tape.asked_bytes
        while (placed := self.tapes.next_to_bring(tape, room)) is not None:
            room -= placed.nbytes
            self.prefetch(placed)

    def drop(self, ticket: Placed) -> None:
        ticket.drop()

    def wait(self) -> None:
        for store in self.stores:
            store.wait()

    def release_idle(self) -> None:
        for store in self.stores:
            store.release_idle()

    def report(self) -> tuple[StoreReport, ...]:
        return tuple(report for store in self.stores for report in store.report())

    def _place(self, placed: Placed, tensor: torch.Tensor | Outgoing, first: int) -> None:
        """Put ``tensor`` into the first tier from number ``first`` on that takes it."""
        # Only the text and the figure of the error: its traceback would hold this frame, which would be a cycle.
        why, free = "", None
        for tier in range(first, self._last + 1):
            try:
                placed.ticket = self._put_at(tier, tensor, placed)
            except StoreError as error:
                why, free = str(error), error.free
                continue
            placed.tier = tier
            # What another tier has copied to host memory is away already.
            if not placed.is_away and self.specs[tier].leaves_memory(tensor):  # type: ignore[arg-type]
                placed.is_away = True
                if placed.leaves is not None:
                    placed.leaves()
            if tier < self._last:
                self.queue(tier, placed.device).add(placed)
            return
        said = f"{self._name}: the last tier is full, or failed: {why}"
        raise StoreError(said, wanted=placed.nbytes, free=free)

    def _put_at(self, tier: int, tensor: torch.Tensor | Outgoing, placed: Placed) -> Any:
        """A ticket of one tier; StoreError if no room can be made there."""
        store, at, device = self.stores[tier], placed.at, placed.device
        if tier in self._broken:
            self._mend(tier)
        while True:
            try:
                if isinstance(tensor, Outgoing):
                    if at is not None and isinstance(store, Tier):
                        return store.take_over(tensor, at)
                    tensor = tensor.wait()
                if at is None or tier == 0 or not isinstance(store, Tier):
                    return store.put(tensor if at is None else tensor.to(at.device))
                return store.put_from_host(tensor, at) if tensor.is_cpu else store.put_away(tensor)
            except StoreError:
                budget = self._budget(tier, device)
                if budget is None or budget.has_room(placed.nbytes):
                    self._broken.add(tier)  # the tier failed for another reason than its limit
                    raise
                # The tier is full: make room and try again, if a tensor can be moved down.
                if not budget.could_have_room(placed.nbytes) or not self._make_room(tier, device):
                    raise

    def _mend(self, tier: int) -> None:
        """Allow a tier that failed to be used again if it is empty; StoreError if it is not."""
        budget = getattr(self.stores[tier], "budget", None)
        if isinstance(budget, (ByteBudget, DeviceBudgets)) and budget.held:
            raise StoreError(f"{self.specs[tier]!r} failed, and is not empty yet")
        self._broken.discard(tier)

    def queue(self, tier: int, device: torch.device) -> Queue:
        """The tensors that have to make room in ``tier`` for a tensor of ``device``.

        In an ``OnDevice`` these are the tensors of this device. The limit of any other store is for all devices
        together.
        """
        key = tier, device if isinstance(self.stores[tier], OpenOnDevice) else None
        found = self._queues.get(key)
        return self._queues.setdefault(key, Queue(tier)) if found is None else found

    def _budget(self, tier: int, device: torch.device) -> ByteBudget | None:
        """The bytes under the limit of ``tier`` that holds for a tensor of ``device``; None if that is not known."""
        budget = getattr(self.stores[tier], "budget", None)
        if isinstance(budget, DeviceBudgets):
            return budget.of(device)
        return budget if isinstance(budget, ByteBudget) else None

    def _make_room(self, tier: int, device: torch.device, nbytes: int = 0) -> bool:
        """Move the oldest tensor of ``tier``, which backward reads last, to a tier below.

        Returns:
            Whether a tensor was moved.
        """
        if tier == self._last:
            return False
        while (oldest := self.queue(tier, device).oldest()) is not None:
            try:
                with oldest.lock:
                    if oldest.tier != tier or oldest.dropped:
                        continue  # another thread has moved or dropped it meanwhile
                    return self._move_down(oldest, nbytes)
            finally:
                oldest.let_go()
        return False

    def _move_down(self, placed: Placed, nbytes: int) -> bool:
        """Move ``placed`` to a tier below, for a new tensor of ``nbytes``. The caller holds its lock.

        Returns:
            False if it is on a disk, because moving it would take a read.
        """
        tier, before = placed.tier, placed.ticket
        store, held = self.stores[tier], None
        if isinstance(store, Tier):
            held = store.host_copy(before) or store.peek(before)
        if held is None:
            return False
        if placed.at is None:
            self._place(placed, held, tier + 1)
        else:
            self._leave_room(placed.device, nbytes - placed.nbytes)
            with on(placed.at):  # the copy of the next tier must come after the work that fills the tensor
                self._place(placed, held, tier + 1)
        store.drop(before)
        return True

    def _limits(self, device: torch.device) -> list[int | None]:
        """The bytes of each tier that a plan for tensors of ``device`` may use; None for no limit."""
        budgets = [self._budget(tier, device) for tier in range(len(self.stores))]
        return [None if budget is None else budget.limit for budget in budgets]

    # -- the device

    def _window(self, limit: int, device: torch.device) -> int:
        """The part of the ``limit`` of the first tier that is left to copies on their way to the tiers below.

        Only for tensors that come without a plan. A plan sends the first ones, so its copies are over when the limit is
        reached (decision 194).

        A tensor that moves down takes memory of the device until it is copied. In a window of up to an eighth of the
        limit, a tensor of the largest size can be on its way while the next one comes, so that the computation need not
        wait for the copy (decision 85).
        """
        return min(limit // 8, 2 * self.largest.get(device, 0))

    def _make_way(self, placed: Placed, is_planned: bool) -> None:
        """Make room for a new tensor, which is on the device already.

        Without a plan, tensors begin to move down before the limit is reached.
        """
        device, nbytes = placed.device, placed.nbytes
        budget = self._nearest(device)
        if budget is None or budget.limit is None:
            return
        self.largest[device] = max(self.largest.get(device, 0), nbytes)
        limit = budget.limit
        early = limit if is_planned else limit - self._window(limit, device)
        with contextlib.suppress(StoreError):  # if the tiers below are full, `put` of the new tensor raises it
            while nbytes <= limit and budget.held + nbytes > early and self._make_room(0, device, nbytes):
                pass
        self._leave_room(device, nbytes)

    def _leave_room(self, device: torch.device, nbytes: int = 0) -> None:
        """Limit the bytes that the tiers below hold on ``device``, for a new tensor of ``nbytes``.

        They may hold what the first tier leaves of its limit, less ``nbytes`` (decision 85).
        """
        budget = self._nearest(device)
        if budget is None or budget.limit is None:
            return
        below, limit = self._below(), budget.limit
        left = limit - budget.held - nbytes
        held = [store.device_bytes(device) for store in below] if len(below) > 1 else [0]
        for store, own in zip(below, held, strict=False):  # one store needs not be asked before
            most = max(0, left - sum(held) + own)
            used = limit - most + store.set_device_limit(most, device)
            self.most[device] = max(self.most.get(device, 0), min(limit, used))

    def _room(self, device: torch.device, is_accelerator: bool) -> int | None:
        """Bytes that may be brought back to ``device``; None if no limit says it."""
        budget = self._nearest(device)
        if budget is None or budget.limit is None or len(self._behind) < self._last:
            return None
        if not is_accelerator:
            return budget.limit - budget.held
        return min(store.device_room(device) for store in self._behind)  # `_leave_room` has said what is left to them

    def _nearest(self, device: torch.device) -> ByteBudget | None:
        """The bytes of ``device`` under the limit of the first tier; None if the first tier is another place."""
        return None if self._device is None else self._device.budget.of(device)

    def _below(self) -> list[Tier]:
        return [] if self._device is None else self._device.below


def _at_work(store: Store) -> Store:
    """What works in this process for ``store``; a subclass that moves tensors in its own way is taken as it is."""
    is_plain = (type(store).put, type(store).get) == (StoreSpec.put, StoreSpec.get)
    return store.open() if isinstance(store, StoreSpec) and is_plain else store


def _tiered(stores: Sequence[Store]) -> Tiered:
    return Tiered(*stores)


@register("store", build=_tiered)
@dataclass(frozen=True)
class Tiered(StoreSpec["OpenTiered"]):
    """Several stores, the fastest first. The tensors that backward reads first stay in the first store.

    Backward reads the tensors that were saved first at its end. So from the second forward with the same sizes on, the
    tensors that were saved first are sent to the stores behind, each when it is saved, and those that were saved last
    stay. Backward brings the others back as soon as the first store has room for them.

    A forward with other sizes fills the first store. If a store is full, the tensors in it that backward reads last
    move to the next one. If such a tensor would have to be read from a disk to move it, the new tensor goes to the next
    store instead. A store that fails counts as full until it is empty. A tensor that is still in memory when its write
    fails is not lost.

    Each device of the process has a plan of its own, and the limit of an ``OnDevice`` for itself. The limits of other
    stores are for all devices together.

    Args:
        stores: two or more, such as ``OnDevice("8 GiB"), OnCpu("64 GiB per node"), OnDisk("/scratch")``.

    Raises:
        UsageError: if there are fewer than two stores, if one of them cannot be a tier (``Functions``, another
            ``Tiered``), or if an ``OnDevice`` with stores behind it has no limit.
        StoreError: in forward, if the last store is full too.

    >>> tiers = Tiered(OnDevice(8), OnDevice(100))
    >>> tickets = [tiers.put(torch.ones(1)) for _ in range(5)]
    >>> [report.held for report in tiers.report()]
    [8, 12]
    >>> tiers.tier_of(tickets[0]), tiers.tier_of(tickets[4])
    (1, 0)
    """

    can_be_tier: ClassVar[bool] = False
    stores: tuple[Store, ...]

    def __init__(self, *stores: Store) -> None:
        if len(stores) < 2 or not all(isinstance(store, Store) and store.can_be_tier for store in stores):
            raise UsageError(f"Tiered takes two or more stores, not Functions and no other Tiered, got {stores!r}")
        if any(isinstance(store, OnDevice) and store.budget.limit is None for store in stores[:-1]):
            raise UsageError(
                f"{stores!r}: OnDevice() without a limit takes everything, and the stores behind it get nothing; "
                "give it one, such as OnDevice('8 GiB')"
            )
        object.__setattr__(self, "stores", stores)

    @property
    def min_bytes(self) -> int:  # type: ignore[override]
        """The largest ``min_bytes`` of the stores."""
        return max(store.min_bytes for store in self.stores)

    def _open(self) -> OpenTiered:
        return OpenTiered(self.stores, repr(self))

    def __repr__(self) -> str:
        return f"Tiered({', '.join(map(repr, self.stores))})"

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        *others, last = self.stores  # mostly the last one does, and each saved tensor asks
        return last.leaves_memory(tensor) or any(store.leaves_memory(tensor) for store in others)

    def tier_of(self, ticket: Placed) -> int:
        """The number of the tier that a tensor is in now; the first is 0."""
        return ticket.tier
