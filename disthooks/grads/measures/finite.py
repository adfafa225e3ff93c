"""What is not finite: how many elements, and on which rank it began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks.grads.measures.base import Fact, Local, Look, Measure, Merge, moved, onto, stack, wide
from disthooks.grads.measures.scan import known

#: Ranks that have a bit of their own in a float64, whose mantissa has 52 of them and one that is not stored.
_BITS = 52


@dataclass(frozen=True)
class NonFiniteCount(Measure):
    """How many elements are infinite or not a number."""

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"nonfinite"})

    def local(self, local: Local) -> torch.Tensor:
        """The count for each parameter."""
        found = known(local, self.facts)["nonfinite"]
        if all(other is None for other in local.apart):
            return found
        return found + stack(local.apart, lambda grads: [(~torch.isfinite(g)).sum() for g in grads], local.device)


@dataclass(frozen=True)
class FirstToFail(Measure):
    """Which rank comes first whose own gradient was non-finite: world minus its place, and 0 for none."""

    merge: ClassVar[Merge] = "max"
    looks: ClassVar[frozenset[Look]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        """World minus this rank's place wherever its own gradient was non-finite."""
        return own_nonfinite(local).long() * (local.world - local.position)


@dataclass(frozen=True)
class OwnNonFinite(Measure):
    """Which ranks had a non-finite gradient of their own, in one number for each parameter: :func:`ranks_in`.

    Up to 52 ranks have a bit each, and a sum of different bits loses none. Of more ranks the number has how many there
    are and the sum of their places, since the bytes must not grow with the world: one rank can be told, and all.
    """

    merge: ClassVar[Merge] = "sum"
    looks: ClassVar[frozenset[Look]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        """This rank's number wherever its own gradient was non-finite."""
        return own_nonfinite(local).double() * _mark(local.position, local.world)


def ranks_in(mark: float, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The global ranks that a number of :class:`OwnNonFinite` stands for; None where they cannot be told.

    >>> ranks_in(float(2**0 + 2**3), range(10, 20))
    (10, 13)
    >>> alone, both = _mark(70, 100), _mark(70, 100) + _mark(80, 100)
    >>> ranks_in(alone, range(100)), ranks_in(both, range(100))
    ((70,), None)
    """
    whole, world = int(mark), len(ranks)
    if world <= _BITS:
        return tuple(rank for place, rank in enumerate(ranks) if whole >> place & 1)
    count, places = divmod(whole, 1 << _shift(world))
    if count == world:
        return tuple(ranks)
    return (ranks[places],) if count == 1 else None if count else ()


def own_nonfinite(local: Local) -> torch.Tensor:
    """For each parameter whether any gradient of this rank's own, before the reduction, was not finite."""
    found = [(place, value) for place, seen in enumerate(local.seen) for value in seen.norms or seen.sizes]
    if not found:
        return torch.zeros(len(local.seen), dtype=torch.bool, device=local.device)
    values = [onto(value, local.device) for _, value in found]
    if len({value.dtype for value in values}) > 1:
        values = [value.double() for value in values]
    bad, places = ~torch.isfinite(torch.stack(values)), [place for place, _ in found]
    if places == list(range(len(local.seen))):
        return bad
    counts = torch.zeros(len(local.seen), dtype=torch.int64, device=local.device)
    return counts.index_add_(0, moved(torch.tensor(places), local.device), bad.long()) > 0


def _mark(place: int, world: int) -> float:
    return float(1 << place if world <= _BITS else (1 << _shift(world)) + place)


def _shift(world: int) -> int:
    """Above it is the number of ranks: the sum of all places is below ``2 ** _shift(world)``."""
    return 2 * world.bit_length()


def size_of(grad: torch.Tensor) -> torch.Tensor:
    """A number without dimensions that is finite where all elements of ``grad`` are, by one reading.

    On the CPU it is the sum of the elements, which reads a hundred times as fast as the largest one. The sum of finite
    float32 elements can overflow, and there the host may look whether it did.
    """
    if not grad.is_cpu:
        return torch.linalg.vector_norm(grad, torch.inf, dtype=wide(grad.dtype)) if grad.numel() else grad.new_zeros(())
    total = grad.sum(dtype=None if grad.is_complex() else wide(grad.dtype))
    if bool(torch.isfinite(total)) or not bool(torch.isfinite(grad).all()):
        return total.abs() if total.is_complex() else total
    return torch.zeros(())
