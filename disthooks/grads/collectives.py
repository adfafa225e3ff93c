"""Process groups of disthooks, the collectives that run on them, and the numbers that travel.

``to_sortable`` turns a number into an int64 of the same order, so that a MAX over ranks keeps NaN and tells which
rank's number it took. ``StepCounts`` compares the ranks' counts of steps through the store. This is the only file of
grads that imports torch.distributed.
"""

from __future__ import annotations

import ast
import hashlib
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
# A MAX of floating-point numbers may drop a NaN: some backends keep it, and others do not. And a MAX does not tell
# which rank's number it took. So measures that need the largest number over the ranks send int64 keys (decision 52).
# The bits of positive float64 numbers, read as integers, have the order of the numbers. For negative numbers the order
# is reversed, so their bits are flipped, except the sign. NaN gets a key above that of infinity. To tell the rank too,
# a key keeps its upper 40 bits, and the lower 24 bits have the place of the rank. The smallest number is found as the
# largest of the negated numbers.


_NAN = 0x7FF8 << 48  # the bits of a positive NaN; they are above those of infinity
_FLIP = 0x7FFF_FFFF_FFFF_FFFF  # all bits except the sign
_PLACE_BITS = 24
_PLACES = 2**_PLACE_BITS - 1

#: The key of a rank that has no number. It is below the keys of all numbers.
NO_NUMBER = -(2**63)


def to_sortable(values: torch.Tensor) -> torch.Tensor:
    """int64 keys that have the order of the numbers in ``values``; the key of NaN is above all others.

    See [Note: MAX of integers keeps NaN].

    >>> from_sortable(to_sortable(torch.tensor([-2.5, 0.0, float("inf"), float("nan")], dtype=torch.float64))).tolist()
    [-2.5, 0.0, inf, nan]
    """
    bits = values.double().view(torch.int64)
    keys: torch.Tensor = bits ^ ((bits >> 63) & _FLIP)
    return torch.where(values.isnan(), _NAN, keys)


def from_sortable(keys: torch.Tensor) -> torch.Tensor:
    """The float64 numbers that ``keys`` were made of by :func:`to_sortable`; NaN for :data:`NO_NUMBER`."""
    bits: torch.Tensor = keys ^ ((keys >> 63) & _FLIP)
    return bits.view(torch.float64)


def with_rank(values: torch.Tensor, position: int) -> torch.Tensor:
    """int64 keys of ``values`` that also tell this rank's place among the ranks; :func:`rank_of` reads it.

    The values are rounded to 28 binary digits. If two ranks have the same rounded value, the key of the first rank is
    larger. See [Note: MAX of integers keeps NaN].

    >>> pairs = [(0.5, 3), (1.5, 7), (1.5, 9)]
    >>> keys = torch.stack([with_rank(torch.tensor(value), rank) for value, rank in pairs])
    >>> rank_of(keys.amax()).item()
    7
    """
    rounded: torch.Tensor = (to_sortable(values) + (1 << (_PLACE_BITS - 1))) >> _PLACE_BITS << _PLACE_BITS
    rounded += _PLACES - position
    return rounded


def rank_of(keys: torch.Tensor) -> torch.Tensor:
    """The place of the rank that made each of ``keys`` by :func:`with_rank`; -1 if no rank had a number."""
    places: torch.Tensor = _PLACES - (keys & _PLACES)
    return torch.where(keys == NO_NUMBER, -1, places)


# [Note: groups of our own]
# disthooks makes a process group of its own for the ranks that are attached together, so none of its collectives can be
# taken for one of the training's. The group is kept as long as the default group under which it was made, because a new
# group of the same name could meet keys that the old one left in the store, and because each NCCL group holds device
# memory. The reference is weak: when torch.distributed has destroyed the group, its threads must not live on here.
# torch names a group of some of the ranks after the number of groups that the process is in. Ranks of overlapping
# groups are in different numbers of groups, so with torch's names they would wait for each other for ever. The name
# that disthooks gives depends only on the ranks of the group (decision 90).

# [Note: the count of steps is agreed on]
# The count of steps decides which steps are logged, and so how many numbers a step reduces. The count is a part of the
# state. If only one rank loads a state, the all-reduces of the next step have different sizes on the ranks: gloo ends
# the process ("792 vs 8 bytes"), or NCCL waits for ever. So the ranks compare their counts in the first step after
# attaching, and in the first step after a load. A rank that has not loaded does not compare. Its next collective would
# meet a comparison by a collective of the same group. So ranks compare through the store in which they met, by a few
# messages of each rank (decision 94).


_LOW = 0xFFFFFFFF  # the lower half of 64 bits
_MOST = 1 << 21  # the most numbers that are received at once, 16 MiB


def total(group: Any, numbers: torch.Tensor) -> torch.Tensor:
    """The sum of int64 ``numbers`` over the ranks, modulo 2**64: one all-reduce of twice their size.

    The upper and lower halves of the numbers are summed apart, so no sum in a backend exceeds 63 bits.

    >>> total(None, torch.tensor([-3, 2**62]))
    tensor([                 -3, 4611686018427387904])
    """
    if group is None:
        return numbers
    halves = torch.stack((numbers & _LOW, (numbers >> 32) & _LOW))
    dist.all_reduce(halves, dist.ReduceOp.SUM, group=group)
    return halves[0] + (halves[1] << 32)


def gather(group: Any, numbers: torch.Tensor) -> list[list[int]]:
    """The ``numbers`` of each rank, as lists on the host, in the order of the ranks' places.

    There is one all-gather for every 16 MiB received, so memory stays bounded for any number of ranks.

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


# For the ranks of each group, the default group under which it was made, and the group. See [Note: groups of our own].
_groups: dict[tuple[int, ...], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
# How many groups were made for the same ranks: a part of the name, so that no two groups have the same name.
_times_made: dict[tuple[int, ...], int] = {}


def group_of(ranks: Sequence[int]) -> Any:
    """The process group of disthooks for ``ranks``; it is made at the first call. None for one rank alone.

    The group has the timeout of the default group. Each of ``ranks`` must call this function; other ranks need not. See
    [Note: groups of our own].
    """
    if len(ranks) == 1:
        return None
    key = tuple(ranks)
    refs = _groups.get(key)
    default, group = (refs[0](), refs[1]()) if refs else (None, None)
    if group is not None and default is dist.group.WORLD:
        return group
    if len(ranks) == dist.get_world_size():
        group = dist.new_group(timeout=_timeout())
    else:
        _times_made[key] = _times_made.get(key, 0) + 1  # the same on each of these ranks
        with name_of_next_group(f"disthooks {'_'.join(map(str, ranks))} {_times_made[key]}"):
            group = dist.new_group(list(ranks), timeout=_timeout(), use_local_synchronization=True)
    _groups[key] = (weakref.ref(dist.group.WORLD), weakref.ref(group))
    return group


def _timeout() -> timedelta | None:
    """The timeout of the default group, which ``new_group`` does not take over; None if no backend has one."""
    world: Any = dist.group.WORLD
    backends = [world._get_backend(device) for device in world._device_types]
    found: list[timedelta] = [b.options._timeout for b in backends if hasattr(getattr(b, "options", None), "_timeout")]
    return found[0] if found else None


def seconds_to_wait(group: Any) -> float:
    """How many seconds a collective of ``group`` waits for a rank; 0 for one rank alone."""
    if group is None:
        return 0.0
    timeout = _timeout()
    return 1800.0 if timeout is None else timeout.total_seconds()  # 1800 seconds is torch's own default


def device_for(group: Any, device: torch.device) -> torch.device:
    """``device`` if the group can reduce tensors on it, else a device on which it can.

    The devices differ if gradients are offloaded to the CPU and the group has only NCCL.
    """
    if group is None:
        return device
    kinds = [able.type for able in group._device_types]
    if device.type in kinds or not kinds:
        return device
    if kinds[0] == "cpu":
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def agree(group: Any, device: torch.device, flag: bool, what: str) -> tuple[bool, bool]:
    """Whether ``flag`` is true on any rank, and whether ``what`` is the same text on all ranks.

    This takes one collective. Texts are compared by their checksums of 32 bits.
    """
    if group is None:
        return flag, True
    mark = float(zlib.crc32(what.encode()))  # 32 bits, so float64 holds it exactly
    # The texts are the same if the largest mark equals the smallest one, which is the negated MAX of the negated marks.
    found = torch.tensor([float(flag), mark, -mark], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    any_flag, most, least = found.tolist()
    return bool(any_flag), most == -least


def is_alone(group: Any) -> bool:
    """Whether no other rank tells anything: there is none, or the backend "fake" simulates them."""
    return group is None or dist.get_backend(group) == "fake"


def gather_distinct(group: Any, device: torch.device, item: Any) -> list[Any]:
    """The distinct values that the ranks give, in the order of the first rank of each; all ranks must call it.

    Each rank gives a checksum, and of equal values the first rank alone sends its text. So the time depends on how many
    values differ, and not on how many ranks there are.

    >>> gather_distinct(None, torch.device("cpu"), ("a", [1, (2, True)]))
    [('a', [1, (2, True)])]
    """
    if is_alone(group):
        return [item]
    text = repr(item).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    told = gather(group, torch.tensor([digest, len(text)], device=device))
    found = []
    for place in sorted({tuple(numbers): place for place, numbers in reversed(list(enumerate(told)))}.values()):
        if place == dist.get_rank(group):
            sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        else:
            sent = torch.empty(told[place][1], dtype=torch.uint8, device=device)
        dist.broadcast(sent, dist.get_global_rank(group, place), group=group)
        found.append(ast.literal_eval(bytes(sent.tolist()).decode()))
    return found


def reduce(group: Any, packed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the two vectors over the ranks, in place: the first by a SUM, the second by a MAX.

    An empty vector takes no collective, because it is empty on every rank. See [Note: two collectives] in plan.py.
    """
    if group is not None:
        for vector, op in zip(packed, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            if vector.numel():
                dist.all_reduce(vector, op, group=group)
    return packed


# For the ranks of each attachment, how many were made before: a part of the names of their keys in the store.
_attached: dict[tuple[int, ...], itertools.count[int]] = {}
_WARN_AFTER = 30.0  # seconds of waiting


class StepCounts:
    """Compares the counts of steps of the ranks of one attachment. See [Note: the count of steps is agreed on]."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self._ranks, self._rank, self._timeout = tuple(ranks), rank, timeout
        # The backend "fake" simulates the other ranks, so no rank would answer.
        self._is_alone = len(self._ranks) == 1 or dist.get_backend() == "fake"
        self._is_agreed, self._round, self._prefix = self._is_alone, 0, ""
        if not self._is_alone:
            number = next(_attached.setdefault(self._ranks, itertools.count()))
            self._prefix = f"disthooks steps {self._ranks} {number}"

    def loaded(self) -> None:
        """Make the next :meth:`check` compare again, because this rank has loaded a state."""
        self._is_agreed = self._is_alone

    def check(self, steps: int) -> None:
        """Wait until all ranks have written their counts of steps, and compare them.

        This happens in the first step after attaching and in the first step after :meth:`loaded`. All other calls
        return at once.

        Raises:
            AttachError: when two ranks have different counts, or a rank has not written its count in time.
        """
        if self._is_agreed:
            return
        default = dist.distributed_c10d._get_default_store()
        store: Any = dist.distributed_c10d.PrefixStore(f"{self._prefix} {self._round}", default)
        self._round += 1
        said = f"rank {self._rank} counts {steps} steps"
        store.set(f"rank {self._rank}", said)
        # The rank that comes first sets the count with which all others compare theirs.
        first = store.compare_set("first", "", f"{steps}, {said}").decode()
        if first.partition(",")[0] != str(steps):
            store.set("another", said)
        # The last rank tells the others that all ranks have come. By then each rank with another count has told it.
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
        # The store's own `wait` could not warn, and its error would not say which ranks are missing.
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
