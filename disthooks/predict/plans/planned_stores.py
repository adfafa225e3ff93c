"""Stores that keep no bytes: they count, in each place, what the real stores would hold of a model's fake tensors.

A :class:`PlannedStore` stands for one place behind the device: host memory, a file, or a store of somebody else.
:class:`PlannedTiers` is the real runtime of ``Tiered`` over such stores. :class:`PlacedBytes` has the figures of all.
"""

# [Note: what is in flight]
# A real store needs time to move a tensor, and nobody knows here how much. Its `in_flight` says how many bytes of
# tensors may stay where they are meanwhile: on their way out, or brought back before backward reads them. So a planned
# store holds the newest of these bytes until newer ones come, as a link would that is slower than the computation. In
# backward it brings as many bytes back ahead of the reads. So the predicted memory is the most that the real store may
# take. With a fast link it takes less, by `PlacedBytes.peak["in flight"]` at most.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disthooks._tensors import parse_bytes, resident
from disthooks.saved.stores.base import ByteBudget, Counted, Functions, Store, StoreReport, Tier
from disthooks.saved.stores.cpu import OnCpu
from disthooks.saved.stores.disk import OnDisk
from disthooks.saved.stores.host import PAGE
from disthooks.saved.stores.placed import Placed
from disthooks.saved.stores.tiers import OnDevice, OpenTiered, Tiered

#: The places of bytes: on the device under the limit of a store, in host memory, in files, and in stores of somebody
#: else. Bytes "in flight" are on the device although another place counts them already.
PLACES = ("device", "host", "disk", "elsewhere", "in flight")


class PlacedBytes:
    """The bytes that the stores of a prediction hold, by place.

    Bytes that are dropped are seen at the next put or read, so ``now`` may be a little too large between them.

    Attributes:
        peak: the most bytes that were in each place; the peaks of two places may be of different moments.
    """

    def __init__(self) -> None:
        self.peak = dict.fromkeys(PLACES, 0)
        self._sources: list[tuple[str, Callable[[], int]]] = []

    @property
    def now(self) -> dict[str, int]:
        found = dict.fromkeys(PLACES, 0)
        for place, held in self._sources:
            found[place] += held()
        return found

    def add(self, place: str, held: Callable[[], int]) -> None:
        self._sources.append((place, held))

    def note(self) -> None:
        """Look at all places. Stores call this after each put and each read."""
        held = self.now
        self.peak = {place: max(most, held[place]) for place, most in self.peak.items()}


class _Entry(Counted):
    """A tensor in a :class:`PlannedStore`.

    ``tensor`` is there as long as it is in the memory that it was saved in, or was brought back to (``is_back``).
    """

    __slots__ = ("_kind", "_store", "is_back", "nbytes", "position", "tensor")

    def __init__(self, tensor: torch.Tensor, store: PlannedStore) -> None:
        super().__init__(store.budget)
        self.tensor: torch.Tensor | None = tensor
        self.nbytes, self.position, self.is_back, self._store = tensor.nbytes, 0, False, store
        self._kind = tensor.dtype, tensor.size(), tensor.stride(), tensor.device

    def again(self) -> torch.Tensor:
        dtype, size, stride, device = self._kind
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def drop(self) -> None:
        super().drop()
        self.tensor = None
        self._store.forget(self)


class PlannedStore(Tier):
    """One place behind the device: it counts the bytes of the tensors that are put, and lets go of their memory."""

    def __init__(self, spec: Store, is_accelerator: bool) -> None:
        self._spec, self._is_accelerator = spec, is_accelerator
        self._name, self.place, limit, grain, flying = repr(spec), "elsewhere", None, 1, 0
        owner = self._name
        if isinstance(spec, OnCpu):
            self._name, owner, self.place, limit = "OnCpu()", "OnCpu", "host", spec.limit
            flying = parse_bytes(spec.in_flight) if is_accelerator else 0
        elif isinstance(spec, OnDisk):
            self._name = f"OnDisk({spec.directory!r})"
            self.place, limit, grain, flying = "disk", spec.limit, PAGE, parse_bytes(spec.in_flight)
            owner = f"OnDisk({spec.directory!r})"
        self.budget = ByteBudget(limit, owner, grain)
        self.reads_ahead: bool = isinstance(spec, OnDisk)  # type: ignore[misc]  # that of the class is for real stores
        self._in_flight = self._limit = flying
        self._flying: dict[_Entry, None] = {}  # whose tensors are in memory; the oldest first
        self._tape: list[_Entry | None] = []  # in the order of puts; None for those that were dropped
        self._live = self._written = self._read = self._ahead = 0

    def __repr__(self) -> str:
        return repr(self._spec)

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        if isinstance(self._spec, OnCpu):
            return self._is_accelerator
        # A store of somebody else may look at the device, and the device of a fake tensor is another one.
        return self._is_accelerator or self._spec.leaves_memory(tensor)

    def put(self, tensor: torch.Tensor) -> _Entry:
        leaves = self.leaves_memory(tensor)
        nbytes = tensor.nbytes if leaves else max(tensor.nbytes, resident(tensor))
        entry = _Entry(tensor.contiguous() if leaves else tensor, self)
        self.budget.reserve(nbytes, entry)
        if leaves:
            entry.position, self._live = len(self._tape), self._live + 1
            self._tape.append(entry)
            self._flying[entry] = None
            self._make_room()
        return entry

    def get(self, ticket: _Entry) -> torch.Tensor:
        found = ticket.tensor
        if found is None:
            found = ticket.again()
            self._read += ticket.nbytes
        elif ticket.is_back:
            ticket.tensor, ticket.is_back = None, False  # its memory belongs to the reader now
            self._flying.pop(ticket, None)
        self._read_ahead(ticket)
        return found

    def peek(self, ticket: _Entry) -> torch.Tensor | None:
        return ticket.again() if ticket.tensor is None and isinstance(self._spec, OnCpu) else ticket.tensor

    def drop(self, ticket: _Entry) -> None:
        ticket.drop()

    def forget(self, entry: _Entry) -> None:
        """Take ``entry``, which was dropped, off the tape. Destructors call this."""
        self._flying.pop(entry, None)
        if entry.position < len(self._tape) and self._tape[entry.position] is entry:
            self._tape[entry.position] = None
            self._live -= 1
            if not self._live:
                self._tape.clear()

    def prefetch(self, ticket: _Entry) -> None:
        if ticket.tensor is None and self.bytes_in_flight + ticket.nbytes <= self._limit:
            self._bring(ticket)

    def device_bytes(self, device: torch.device | None = None) -> int:
        return self.bytes_in_flight

    def device_room(self, device: torch.device) -> int:
        return self._limit - self.bytes_in_flight if self._is_accelerator else super().device_room(device)

    def set_device_limit(self, nbytes: int, device: torch.device) -> int:
        before, self._limit = self.bytes_in_flight, min(nbytes, self._in_flight)
        self._make_room()
        return before

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of tensors that are in the memory they were saved in. See [Note: what is in flight]."""
        return sum(entry.nbytes for entry in self._flying)

    def _make_room(self) -> None:
        """Let go of the oldest tensors in flight, as many as are over the limit; the newest one may be larger."""
        flying = self.bytes_in_flight
        for entry in list(self._flying):
            if flying <= self._limit or (len(self._flying) == 1 and self._limit and self._limit == self._in_flight):
                return
            self._written += 0 if entry.is_back else entry.nbytes
            entry.tensor, entry.is_back = None, False
            flying -= entry.nbytes
            del self._flying[entry]

    def _read_ahead(self, entry: _Entry) -> None:
        """Bring back what backward reads after ``entry``, in the reverse order of puts, as long as there is room."""
        room = self._limit - self.bytes_in_flight
        for position in range(min(entry.position, len(self._tape)) - 1, -1, -1):
            other = self._tape[position]
            if other is None or other.tensor is not None:
                continue
            room -= other.nbytes
            if room < 0:
                return
            self._bring(other)

    def _bring(self, entry: _Entry) -> None:
        entry.tensor, entry.is_back = entry.again(), True
        self._flying[entry] = None
        self._read += entry.nbytes
        self._ahead += entry.nbytes

    def begin_step(self) -> None:
        self._written = self._read = self._ahead = 0

    def report(self) -> tuple[StoreReport, ...]:
        figures: dict[str, Any] = {"written": self._written, "read": self._read, "ahead": self._ahead}
        flying = self.bytes_in_flight
        return (StoreReport(self._name, held=self.budget.held, limit=self.budget.limit, in_flight=flying, **figures),)


class PlannedTiers(OpenTiered):
    """A ``Tiered`` at work, over planned stores: the same code places the tensors."""

    def __init__(self, stores: tuple[Store, ...], name: str, is_accelerator: bool) -> None:
        super().__init__(stores, name)
        self.stands_for_accelerator = is_accelerator

    def _move_down(self, placed: Placed, nbytes: int) -> bool:
        if self.stands_for_accelerator:
            self._leave_room(placed.device, nbytes - placed.nbytes)
        return super()._move_down(placed, nbytes)


class WatchedStore(Store):
    """The store of a pipeline in a prediction. It tells :class:`PlacedBytes` of each put and read."""

    def __init__(self, spec: Store, works: Store, placed: PlacedBytes, is_accelerator: bool) -> None:
        self._spec, self._works, self._placed, self.is_accelerator = spec, works, placed, is_accelerator

    def __repr__(self) -> str:
        return repr(self._spec)

    def put(self, tensor: torch.Tensor) -> Any:
        ticket = self._works.put(tensor)
        self._placed.note()
        return ticket

    def get(self, ticket: Any) -> torch.Tensor:
        found = self._works.get(ticket)
        self._placed.note()
        return found

    def drop(self, ticket: Any) -> None:
        self._works.drop(ticket)

    def report(self) -> tuple[StoreReport, ...]:
        return self._works.report()

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        works = self._works
        if isinstance(works, PlannedTiers):
            return any(store.leaves_memory(tensor) for store in works.specs)
        return works.leaves_memory(tensor)


class PlannedStores:
    """Makes the stores of a prediction. Entries that share a store share what stands for it, and its limits."""

    def __init__(self, placed: PlacedBytes, is_accelerator: bool, say_unknown: Callable[[str], None]) -> None:
        self._placed, self._is_accelerator, self._say_unknown = placed, is_accelerator, say_unknown
        self._made: dict[int, tuple[Store, Store]] = {}  # by the identity of the spec, which is held, too

    def of(self, spec: Store) -> Store:
        if isinstance(spec, Functions):
            return self._functions(spec)
        return WatchedStore(spec, self._working(spec), self._placed, self._is_accelerator)

    def begin_step(self) -> None:
        """Count the bytes that go through the stores from here on. What they hold and have learnt stays."""
        for _, made in self._made.values():
            for store in made.specs if isinstance(made, PlannedTiers) else (made,):
                if isinstance(store, PlannedStore):
                    store.begin_step()
                elif isinstance(store, OnDevice):
                    store.open().begin_count()

    def _working(self, spec: Store) -> Store:
        found = self._made.get(id(spec))
        if found is None:
            found = self._made[id(spec)] = spec, self._make(spec)
        return found[1]

    def _make(self, spec: Store) -> Store:
        if isinstance(spec, Tiered):
            return PlannedTiers(tuple(map(self._working, spec.stores)), repr(spec), self._is_accelerator)
        if isinstance(spec, OnDevice):
            return self._on_device(spec.limit)
        return self._behind(spec)

    def _on_device(self, limit: int | str | None) -> OnDevice:
        """A store of our own with the same limit, so that nothing counts in that of the user."""
        made = OnDevice(limit)
        self._placed.add("device", lambda: made.budget.held)
        return made

    def _behind(self, spec: Store) -> PlannedStore:
        made = PlannedStore(spec, self._is_accelerator)
        self._placed.add(made.place, lambda: made.budget.held)
        self._placed.add("in flight", lambda: made.bytes_in_flight)
        if made.place == "elsewhere":
            self._say_unknown(f"{spec!r} is a store of somebody else: its tensors count as they are, without its time")
        return made

    def _functions(self, spec: Functions) -> Functions:
        """The user's functions; a tensor that they cannot take without its bits stays as it is."""
        stayed: Any = object()

        def pack(tensor: torch.Tensor) -> Any:
            try:
                return spec.pack(tensor)
            except Exception as error:  # functions of the user's may raise anything
                self._say_unknown(
                    f"{spec!r}: pack needs the bits of a tensor ({type(error).__name__}); it counts as kept"
                )
                return stayed, tensor.detach()

        def unpack(value: Any) -> torch.Tensor:
            if isinstance(value, tuple) and value and value[0] is stayed:
                tensor: torch.Tensor = value[1]
                return tensor
            return spec.unpack(value)

        return Functions(pack, unpack)
