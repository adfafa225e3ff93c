"""What a measure is, and what it may look at.

A measure is frozen and hashable, so rules and statistics that need the same one share it. It looks at local parts
only and gives some numbers for each parameter, or for each scope (all parameters, a group of them). Merging them
needs nothing but a SUM or a MAX over the ranks, so what travels does not depend on how many ranks there are.

What every statistic is: some measures, and what to write of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from disthooks.engines.base import Engine, Shard
from disthooks.errors import UsageError

Merge = Literal["sum", "max"]
Per = Literal["parameter", "scope", "both"]
LocalFact = Literal["norms", "finite", "accumulated"]
Fact = Literal[
    "count", "sum", "m2", "squares", "abs", "high", "low", "zeros", "nonfinite", "own", "dot", "accumulated", "final"
]

_SMALL_ROW = 1e-14  # squares of float32 below 1e-19 lose digits or vanish: of 1024 elements they could be 1e-35 in all


class LocalStats(NamedTuple):
    """What hooks saw on this rank of one parameter's gradients before any reduction, since the last step.

    Attributes:
        norms: the 2-norm of each micro-batch's gradient, without dimensions; empty if nobody asked, or none came.
        finite_probes: of each of them a number that is not finite where an element is not; empty if nobody asked, or
            ``norms`` tell.
        accumulated: the sum of them, of the whole parameter; None if nobody asked.
    """

    norms: tuple[torch.Tensor, ...] = ()
    finite_probes: tuple[torch.Tensor, ...] = ()
    accumulated: torch.Tensor | None = None


class Local(NamedTuple):
    """What this rank may look at. The sequences have one entry for each parameter.

    Attributes:
        shards: the parameters.
        grads: the local part of the final gradient; None where there is none or another rank owns it.
        seen: what was seen of gradients before their reduction.
        scopes: for each scope the parameters in it, as places in these sequences.
        position: this rank's place among the ranks.
        world: how many ranks there are.
        device: where the result is wanted.
        apart: gradients that no engine reduces and this rank does not own; a NaN in them is on this rank alone.
        before: the local part of the parameter as it was before the update; None where another rank owns it. Empty
            before the update.
        scale: what gradients before their reduction are multiplied by, a number without dimensions; None for 1.
        known: what several measures need, found once for all of them: a float64 for each parameter, on ``device``.
    """

    shards: Sequence[Shard]
    grads: Sequence[torch.Tensor | None]
    seen: Sequence[LocalStats]
    scopes: Sequence[Sequence[int]]
    position: int
    world: int
    device: torch.device
    apart: Sequence[torch.Tensor | None] = ()
    before: Sequence[torch.Tensor | None] = ()
    scale: torch.Tensor | None = None
    known: Mapping[Fact, torch.Tensor] = MappingProxyType({})

    def of(self, indices: Sequence[int]) -> Local:
        """The same, of some of the parameters, which are given in order."""
        if len(indices) == len(self.shards):
            return self
        picked: dict[str, Any] = {
            name: [entries[i] for i in indices] if (entries := getattr(self, name)) else ()
            for name in ("shards", "grads", "seen", "apart", "before")
        }
        return self._replace(**picked, known={fact: take(values, indices) for fact, values in self.known.items()})


class Measure:
    """Some numbers for each parameter, for each scope, or for both (the scopes first).

    Attributes:
        merge: how the numbers of several ranks become one: "sum" of float64, "max" of int64 (see
            :mod:`disthooks.grads.sortable` for how numbers become such integers).
        per: whether there are numbers for each parameter or for each scope.
        facts: what it needs of each gradient that others may need too; :func:`~disthooks.grads.stats.scan.known`
            finds them.
        local_facts: what of the gradients before their reduction it needs.
        after: whether it is measured once the update is made.
    """

    merge: ClassVar[Merge]
    per: ClassVar[Per] = "parameter"
    facts: ClassVar[frozenset[Fact]] = frozenset()
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset()
    after: ClassVar[bool] = False

    def width(self, shard: Shard | None) -> int:
        """How many numbers there are for one parameter; for one scope when ``shard`` is None."""
        return 1

    def accumulates(self, shards: Sequence[Shard]) -> Sequence[int]:
        """The parameters whose whole gradients before the reduction it needs, as places in ``shards``."""
        return ()

    def local(self, local: Local) -> torch.Tensor:
        """The numbers of this rank in one row, on ``local.device``: float64 to be added, or int64 for the largest."""
        raise NotImplementedError


def stack(
    slots: Sequence[torch.Tensor | None],
    measure: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    device: torch.device,
) -> torch.Tensor:
    """``measure`` of those that are there and have elements, in float64; 0 elsewhere.

    Built by stacking: an index made from a list would be copied to the device, and the host would wait.
    """
    there = [slot is not None and slot.numel() > 0 for slot in slots]
    found = measure([slot for slot, is_there in zip(slots, there, strict=True) if slot is not None and is_there])
    if not found:
        return torch.zeros(len(slots), dtype=torch.float64, device=device)
    values = iter([onto(value, device) for value in found])
    zero = torch.zeros((), dtype=found[0].dtype, device=device)
    return torch.stack([next(values) if is_there else zero for is_there in there]).double()


def take(values: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """``values[indices]`` along the last dimension, without waiting for the device.

    >>> take(torch.tensor([1.0, 2.0, 3.0]), [2, 0])
    tensor([3., 1.])
    """
    if list(indices) == list(range(values.shape[-1])):
        return values
    return values.index_select(-1, moved(torch.tensor(indices, dtype=torch.int64), values.device))


def onto(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``tensor`` on ``device``, to be used there at once.

    Nothing waits for a copy to a device. One to the host must have arrived before the host reads it: gradients that
    are offloaded to the CPU, with numbers that NCCL merged on the device.
    """
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def moved(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``; from pinned memory, as the host would wait for a copy of any other."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def real(grad: torch.Tensor) -> torch.Tensor:
    """Magnitudes of complex elements; any other gradient itself."""
    return grad.abs() if grad.is_complex() else grad


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over gradients of ``dtype`` are taken in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """The 2-norm along the last dimension, right for any float32."""
    if not rows.is_cpu:
        wide_norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
        return wide_norm
    found: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=wide(rows.dtype)).double()
    doubt = ~torch.isfinite(found) | (found < _SMALL_ROW)
    if bool(doubt.any()) and rows.shape[-1]:
        doubt &= (rows.amax(-1) != 0) | (rows.amin(-1) != 0)  # rows of zeros are many, and right
        again = rows[doubt].double()
        largest = peaks(again.abs().amax(-1))
        found[doubt] = largest * torch.linalg.vector_norm(again / largest[:, None], dim=-1)
    return found


def peaks(largest: torch.Tensor) -> torch.Tensor:
    """What to divide by: 1 where the largest is 0, infinite or NaN."""
    return torch.where(torch.isfinite(largest) & (largest > 0), largest, 1.0)


#: What a statistic keeps from one logged step to the next, on the CPU and the same on every rank.
State = dict[str, torch.Tensor]


class Found(NamedTuple):
    """What was measured in a logged step, merged over the ranks and on the CPU.

    Attributes:
        names: of the parameters.
        groups: for each named group its parameters, as places in ``names``.
        rows: for each measure its numbers: a row for each parameter (or each scope, if it is measured so).
        ranks: the global ranks that took part.
    """

    names: Sequence[str]
    groups: Mapping[str, Sequence[int]]
    rows: Mapping[Measure, torch.Tensor]
    ranks: Sequence[int]


@dataclass(frozen=True)
class Stat:
    """Numbers of all gradients together, of each group of parameters, and if asked for of each parameter.

    Args:
        per_parameter: also log ``<name>/param/<parameter>`` for each parameter.
    """

    per_parameter: bool = field(default=False, kw_only=True)

    alone: ClassVar[bool] = False  # two of the kind would write the same names

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Raise UsageError when it cannot be right here; on every rank alike."""

    def start(self, scopes: int) -> State:
        """The state before the first step, for so many scopes; empty when it has none."""
        return {}

    def measures(self) -> tuple[Measure, ...]:
        """What it needs."""
        raise NotImplementedError

    def always(self) -> tuple[Measure, ...]:
        """The measures of every step, logged or not; a part of :meth:`measures`."""
        return ()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The numbers by name.

        Args:
            values: for each measure a row for each scope, merged over the scope's parameters: float64, or int64 of
                a MAX (see :mod:`disthooks.grads.sortable`).

        Returns:
            One float64 for each scope.
        """
        raise NotImplementedError

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """What goes into the log: ``name`` of all, ``name/group/<group>``, ``name/param/<parameter>``.

        Args:
            found: what was measured.
            state: what :meth:`start` gave, to be changed in place.
        """
        columns = self.numbers([self.scoped(found, measure) for measure in self.measures()])
        return self.named(found, {name: column.tolist() for name, column in columns.items()})

    def named(self, found: Found, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Each column's entries under its name and that of the scope."""
        suffixes = scope_names(found, self.per_parameter)
        return {f"{name}{suffix}": column[i] for i, suffix in enumerate(suffixes) for name, column in columns.items()}

    def scoped(self, found: Found, measure: Measure) -> torch.Tensor:
        """A row for each scope: all, every group, and if asked for every parameter."""
        rows = found.rows[measure]
        if measure.per == "both":
            return rows if self.per_parameter else rows[: 1 + len(found.groups)]
        if measure.per == "scope":
            return rows
        merged = [merge(measure, rows), *(merge(measure, rows[list(group)]) for group in found.groups.values())]
        return torch.cat([torch.stack(merged), rows]) if self.per_parameter else torch.stack(merged)


def merge(measure: Measure, rows: torch.Tensor) -> torch.Tensor:
    """The numbers of several parameters as if they were one."""
    return rows.sum(0) if measure.merge == "sum" else rows.amax(0)


def scope_names(found: Found, per_parameter: bool) -> list[str]:
    """What is appended to the name of a number for each scope."""
    groups = [f"/group/{group}" for group in found.groups]
    return ["", *groups, *(f"/param/{name}" for name in found.names if per_parameter)]


def check_real(stat: Stat, shards: Sequence[Shard]) -> None:
    """Raise UsageError when a parameter is complex."""
    for shard in shards:
        if shard.parameter.is_complex():
            raise UsageError(
                f"{type(stat).__name__}: {shard.name!r} is complex, and complex numbers have no order and no signed "
                "mean; Norm, MaxAbs, Zeros and Histogram are of magnitudes"
            )


def check_own_data(stat: Stat, engine: Engine) -> None:
    """Raise UsageError when several ranks may work on the same part of the batch."""
    if not engine.has_own_batch():
        raise UsageError(
            f"{type(stat).__name__} compares gradients of ranks that have different data, and under {engine.label} "
            "with tensor parallelism several ranks work on the same, each on a part of the layer; leave it out here"
        )
