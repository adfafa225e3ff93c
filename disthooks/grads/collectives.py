"""Process groups of disthooks, the collectives that run on them, and the numbers that travel.

``to_sortable`` turns a number into an int64 of the same order, so that a MAX over ranks keeps NaN and can tell whose
number it took. The ranks compare their counts of steps through the store. This is the only file of grads that imports
torch.distributed.
"""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from disthooks._torch import name_of_next_group
from disthooks.errors import AttachError

# [Note: MAX of integers keeps NaN]
# A MAX of floating-point numbers may drop a NaN: backends differ in that. And it cannot tell which rank's number it
# took. So measures that need the largest number over the ranks send int64. The bits of a float64 compare like integers
# once those of negative numbers are turned around, and NaN gets a key above that of infinity. 40 bits of the key and 24
# bits for the place of the rank in one int64 say both how large the largest is and who has it. The smallest number is
# the largest of the negatives.


_NAN = 0x7FF8 << 48
_FLIP = 0x7FFF_FFFF_FFFF_FFFF
_PLACE_BITS = 24
_PLACES = 2**_PLACE_BITS - 1

#: The key below that of every number: a rank that has no number gives it.
NO_NUMBER = -(2**63)


def to_sortable(values: torch.Tensor) -> torch.Tensor:
    """int64 keys of the same order as the float64 ``values``, with NaN above all of them.

    >>> from_sortable(to_sortable(torch.tensor([-2.5, 0.0, float("inf"), float("nan")], dtype=torch.float64))).tolist()
    [-2.5, 0.0, inf, nan]
    """
    bits = values.double().view(torch.int64)
    keys: torch.Tensor = bits ^ ((bits >> 63) & _FLIP)
    return torch.where(values.isnan(), _NAN, keys)


def from_sortable(keys: torch.Tensor) -> torch.Tensor:
    """The float64 values that ``keys`` were made of; NaN for :data:`NO_NUMBER`."""
    bits: torch.Tensor = keys ^ ((keys >> 63) & _FLIP)
    return bits.view(torch.float64)


def with_rank(values: torch.Tensor, position: int) -> torch.Tensor:
    """Keys of ``values``, rounded to 28 binary digits, that also tell this rank's place among the ranks.

    Of two ranks with the same value the first one wins.

    >>> pairs = [(0.5, 3), (1.5, 7), (1.5, 9)]
    >>> keys = torch.stack([with_rank(torch.tensor(value), rank) for value, rank in pairs])
    >>> rank_of(keys.amax()).item()
    7
    """
    rounded: torch.Tensor = (to_sortable(values) + (1 << (_PLACE_BITS - 1))) >> _PLACE_BITS << _PLACE_BITS
    rounded += _PLACES - position
    return rounded


def rank_of(keys: torch.Tensor) -> torch.Tensor:
    """The place of the rank that gave each of ``keys``; -1 where no rank had a number."""
    places: torch.Tensor = _PLACES - (keys & _PLACES)
    return torch.where(keys == NO_NUMBER, -1, places)


# [Note: groups of our own]
# disthooks makes a process group of its own for the ranks that are attached together, so that none of its collectives
# can be mistaken for one of the training's. It is kept for as long as the default group that it was made under: to make
# one anew can meet the keys that its namesake left in the store, and with NCCL each group holds device memory. It is
# kept weakly: once torch.distributed has destroyed it, it must not live on here with its threads.
# torch names a group of some of the ranks after how many groups the process is in. Ranks of overlapping groups are in
# different numbers of groups, so under torch's names they would wait for each other for ever. The name that disthooks
# gives depends on the ranks of the group alone.

# [Note: the count of steps is agreed on]
# Which steps are logged, and so how many numbers a step reduces, follows from the count of steps, which is a part of
# the state. Where one rank alone loads a state, the all-reduces of the next step have different sizes on the ranks, and
# gloo ends the process ("792 vs 8 bytes"), or NCCL waits for ever. So the ranks compare their counts in the first step
# after attaching, and in the first step after a load. They compare through the store that they met in, with a few
# messages for each rank: a collective of the same group would meet the one that a rank makes which does not compare.


_LOW = 0xFFFFFFFF
_MOST = 1 << 21  # numbers that are received at once, 16 MiB


def total(group: Any, numbers: torch.Tensor) -> torch.Tensor:
    """The sum of int64 ``numbers`` over the ranks, modulo 2**64: one all-reduce of twice their size.

    The halves of each number are summed apart, so that no backend has to add beyond 63 bits.

    >>> total(None, torch.tensor([-3, 2**62]))
    tensor([                 -3, 4611686018427387904])
    """
    if group is None:
        return numbers
    halves = torch.stack((numbers & _LOW, (numbers >> 32) & _LOW))
    dist.all_reduce(halves, dist.ReduceOp.SUM, group=group)
    return halves[0] + (halves[1] << 32)


def gather(group: Any, numbers: torch.Tensor) -> list[list[int]]:
    """The int64 ``numbers`` (one dimension, as many on every rank) of each rank, on the host.

    One all-gather for every 16 MiB received, so that memory stays bounded however many ranks there are.

    >>> gather(None, torch.tensor([1, 2]))
    [[1, 2]]
    """
    if group is None:
        return [numbers.tolist()]
    size = dist.get_world_size(group)
    found: list[list[int]] = [[] for _ in range(size)]
    for part in torch.split(numbers, max(1, _MOST // size)):
        rows = part.new_empty(size, part.numel())
        dist.all_gather(list(rows), part, group=group)
        for mine, row in zip(found, rows.tolist(), strict=True):
            mine += row
    return found


# For the ranks of each group the default group that it was made under, and itself. See [Note: groups of our own].
_groups: dict[tuple[int, ...], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
_times_made: dict[tuple[int, ...], int] = {}


def group_of(ranks: Sequence[int]) -> Any:
    """The process group of disthooks for ``ranks``, made at the first call; None for one rank alone.

    It gives up waiting for a rank when the default group does. Every one of ``ranks`` must call this; the others need
    not. See [Note: groups of our own].
    """
    if len(ranks) == 1:
        return None
    default, group = (ref() for ref in _groups.get(tuple(ranks), (_nothing, _nothing)))
    if group is None or default is not dist.group.WORLD:
        group = _made(list(ranks))
        _groups[tuple(ranks)] = (weakref.ref(dist.group.WORLD), weakref.ref(group))
    return group


def _made(ranks: list[int]) -> Any:
    """Make a new group. See [Note: groups of our own]."""
    if len(ranks) == dist.get_world_size():
        return dist.new_group(timeout=_timeout())
    _times_made[tuple(ranks)] = _times_made.get(tuple(ranks), 0) + 1  # the same on each of these ranks
    with name_of_next_group(f"disthooks {'_'.join(map(str, ranks))} {_times_made[tuple(ranks)]}"):
        return dist.new_group(ranks, timeout=_timeout(), use_local_synchronization=True)


def _timeout() -> timedelta | None:
    """The timeout of the default group, which ``new_group`` would not take over by itself."""
    world: Any = dist.group.WORLD
    backends = [world._get_backend(device) for device in world._device_types]
    found: list[timedelta] = [b.options._timeout for b in backends if hasattr(getattr(b, "options", None), "_timeout")]
    return found[0] if found else None


def seconds_to_wait(group: Any) -> float:
    """How long a collective of ``group`` waits for a rank; 0 where there is one rank alone."""
    known = None if group is None else _timeout()
    return 0.0 if group is None else 1800.0 if known is None else known.total_seconds()


def _nothing() -> None:
    """Stands for a weak reference to nothing."""


def device_for(group: Any, device: torch.device) -> torch.device:
    """``device`` if the group can reduce there, else one where it can (gradients offloaded to the CPU, with NCCL)."""
    if group is None:
        return device
    kinds = [able.type for able in group._device_types]
    if device.type in kinds or not kinds:
        return device
    if kinds[0] == "cpu":
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def agree(group: Any, device: torch.device, flag: bool, what: str) -> tuple[bool, bool]:
    """Whether ``flag`` is true on any rank, and whether ``what`` is the same text on all: one collective."""
    if group is None:
        return flag, True
    mark = float(zlib.crc32(what.encode()))  # of 32 bits, so exact in float64
    found = torch.tensor([float(flag), mark, -mark], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    any_flag, most, least = found.tolist()
    return bool(any_flag), most == -least


def reduce(group: Any, packed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the two vectors over the ranks, in place. See [Note: two collectives] in plan.py.

    A vector that is empty here is empty on every rank, and is left alone.
    """
    if group is not None:
        for vector, op in zip(packed, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            if vector.numel():
                dist.all_reduce(vector, op, group=group)
    return packed


_attached: dict[tuple[int, ...], itertools.count[int]] = {}
_WARN_AFTER = 30.0  # seconds


class StepCounts:
    """What one attachment's ranks tell each other of their count of steps: [Note: the count of steps is agreed on].

    Args:
        ranks: the global ranks that are attached together, this one among them.
        rank: this one.
        timeout: how many seconds to wait for the others.
    """

    def __init__(self, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self._ranks, self._rank, self._timeout = tuple(ranks), rank, timeout
        # The backend "fake" simulates the other ranks: nobody answers.
        self._is_alone = len(self._ranks) == 1 or dist.get_backend() == "fake"
        self._is_agreed, self._round, self._prefix = self._is_alone, 0, ""
        if not self._is_alone:
            number = next(_attached.setdefault(self._ranks, itertools.count()))
            self._prefix = f"disthooks steps {self._ranks} {number}"

    def loaded(self) -> None:
        """Compare again in the next step, because this rank has loaded a state."""
        self._is_agreed = self._is_alone

    def check(self, steps: int) -> None:
        """Wait until all ranks have said how many steps they count; only in the first step after :meth:`loaded`.

        Raises:
            AttachError: when two ranks have different counts, or one says nothing in time.
        """
        if self._is_agreed:
            return
        default = dist.distributed_c10d._get_default_store()
        store: Any = dist.distributed_c10d.PrefixStore(f"{self._prefix} {self._round}", default)
        self._round += 1
        said = f"rank {self._rank} counts {steps} steps"
        store.set(f"rank {self._rank}", said)
        first = store.compare_set("first", "", f"{steps}, {said}").decode()
        if first.partition(",")[0] != str(steps):
            store.set("another", said)
        if store.add("there", 1) == len(self._ranks):
            store.set("all", "yes")
        self._wait(store)
        if store.check(["another"]):
            two = f"{first.partition(', ')[2]}, {store.get('another').decode()}"
            raise AttachError(
                f"the ranks {list(self._ranks)} do not go on from the same state ({two}): call load_state_dict() on "
                "every rank, between the same two steps, with what state_dict() gave"
            )
        self._is_agreed = True

    def _wait(self, store: Any) -> None:
        start, pause, warned = time.monotonic(), 0.001, False
        while not store.check(["all"]):
            waited = time.monotonic() - start
            if waited > _WARN_AFTER and not warned:
                warned = True
                warnings.warn(f"{self._waiting(store)}, {waited:.0f} seconds so far", stacklevel=5)
            if waited > self._timeout:
                raise AttachError(f"{self._waiting(store)}, and gave up after {waited:.0f} seconds")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _waiting(self, store: Any) -> str:
        missing = [rank for rank in self._ranks if not store.check([f"rank {rank}"])]
        return (
            f"rank {self._rank} waits in the first step after load_state_dict() or after attaching for the ranks "
            f"{missing}, which have made no such step: each rank has to make the same steps, and to load its state "
            "when the others do"
        )
