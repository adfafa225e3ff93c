"""``Measure``: what is computed on each rank and merged over ranks. ``Stat``: named numbers that are made of measures.

A measure is frozen and hashable, so that rules and statistics that need the same measure share it. It reads only this
rank's parts of the gradients, and gives some numbers for each parameter, or for each scope (all parameters, or a group
of them). A SUM or a MAX over the ranks merges the numbers, so the bytes that travel do not depend on how many ranks
there are.

To add a statistic, write a frozen dataclass under ``@register("stat")`` with ``measures()`` and ``numbers(values)``,
beside the measure that it needs. Its tests subclass ``disthooks.testing.StatTests``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from disthooks._match import Pattern
from disthooks.engines.base import Engine, Shard
from disthooks.errors import UsageError

Merge = Literal["sum", "max"]
Per = Literal["parameter", "scope", "both", "module", "step"]
LocalFact = Literal["norms", "lead", "largest", "finite", "time", "fingerprint"]
Fact = Literal["count", "sum", "m2", "squares", "abs", "high", "low", "zeros", "nonfinite", "own"]

# Squares of float32 numbers below 1e-19 lose digits or become zero. In a row of 1024 elements they are below 1e-35
# together, so the norm of a row is right if it is above this.
SMALL_ROW = 1e-14


class LocalStats(NamedTuple):
    """The numbers that the hooks of this rank kept of one parameter's gradients since the last step.

    These are this rank's own gradients, before any reduction.

    Attributes:
        norms: the 2-norm of each micro-batch's gradient, a scalar tensor; empty if no measure needs it.
        finite_probes: for each micro-batch a scalar that is finite only if all elements of the gradient are, unless the
            host knows that they are; empty if no measure needs it, or ``norms`` tell it.
        largest: the largest magnitude of each micro-batch's gradient, a scalar tensor; empty if no measure needs it.
        fingerprint: that of the micro-batches' gradients, in their order; None if no measure needs it.
    """

    norms: tuple[torch.Tensor, ...] = ()
    finite_probes: tuple[torch.Tensor, ...] = ()
    largest: tuple[torch.Tensor, ...] = ()
    fingerprint: torch.Tensor | None = None


#: What a rank does in a step before it waits for others; see [Note: whose time] in forward_hooks.py.
PHASES = ("input", "forward", "backward")


_NOTHING = torch.empty(0)


class ForwardFacts(NamedTuple):
    """What the forwards since the last step have left on this rank.

    In a step that is not logged there is only the loss.

    Attributes:
        loss: the sum of the losses of the micro-batches, and how many there were: float64, of shape (2,).
        outputs: for each module how many elements its outputs had, the sum of their squares, how many are zero, how
            many are not finite, the largest magnitude, and how many tensors could not be read: float64, of shape
            (modules, 6).
        seconds: how long each of :data:`PHASES` took: float64, of shape (3,).
        prints: the fingerprints of the inputs and of the outputs of each module: int64, of shape (modules, 2).
    """

    loss: torch.Tensor
    outputs: torch.Tensor = _NOTHING
    seconds: torch.Tensor = _NOTHING
    prints: torch.Tensor = _NOTHING


class ForwardNeeds(NamedTuple):
    """What a statistic needs of forwards.

    Attributes:
        modules: the patterns of the modules whose outputs are read; () for those that have no modules inside, and None
            if no output is read.
        loss: whether the loss is needed: in steps that are logged, or "always".
        times: whether the times are needed.
        facts: whether facts of outputs are needed.
        prints: every how many steps fingerprints of inputs and outputs are needed; 0 for never.
    """

    modules: tuple[Pattern, ...] | None = None
    loss: bool | Literal["always"] = False
    times: bool = False
    facts: bool = False
    prints: int = 0


class CountRows(NamedTuple):
    """Which gradients are counted together: for each the row that it is added to, and how many rows there are."""

    of: Sequence[int]
    many: int


class Local(NamedTuple):
    """The values of this rank that a measure may read. The sequences have one entry for each parameter.

    Attributes:
        shards: the parameters.
        grads: this rank's part of the final gradient; None if there is no gradient, or another rank owns the part.
        local_stats: what the hooks kept of this rank's gradients before their reduction.
        scopes: for each scope the indices of its parameters in these sequences.
        position: the index of this rank among the ranks that take part.
        world: how many ranks take part.
        device: the device on which the numbers are wanted.
        unreduced: gradients that no engine reduces and that this rank does not own. A NaN in them is on this rank
            alone.
        before: this rank's part of the parameter before the optimizer step; None if another rank owns the part. The
            sequence is empty until the step is made.
        scale: the factor of gradients before their reduction (a scalar tensor); None for 1.
        forward: what forwards have left; None in a step that is not logged.
        step: how many steps there were before.
        is_summed: whether only the sum over all parameters of a measure's numbers counts, so it may be in one of them.
        computed_facts: the facts that are computed already, so that no measure computes them again: for each fact a
            float64 tensor on ``device`` with one number for each parameter.
        computed_counts: the counts of magnitudes that were made by the same reading, for the measure that asked for
            them by :meth:`Measure.count_rows`.
    """

    shards: Sequence[Shard]
    grads: Sequence[torch.Tensor | None]
    local_stats: Sequence[LocalStats]
    scopes: Sequence[Sequence[int]]
    position: int
    world: int
    device: torch.device
    unreduced: Sequence[torch.Tensor | None] = ()
    before: Sequence[torch.Tensor | None] = ()
    scale: torch.Tensor | None = None
    forward: ForwardFacts | None = None
    step: int = 0
    is_summed: bool = False
    computed_facts: Mapping[Fact, torch.Tensor] = MappingProxyType({})
    computed_counts: Mapping[Measure, torch.Tensor] = MappingProxyType({})

    def of(self, indices: Sequence[int]) -> Local:
        """The values of the parameters with these ``indices``, which are in ascending order."""
        if len(indices) == len(self.shards):
            return self
        picked: dict[str, Any] = {
            name: [entries[i] for i in indices] if (entries := getattr(self, name)) else ()
            for name in ("shards", "grads", "local_stats", "unreduced", "before")
        }
        facts = {fact: take(values, indices) for fact, values in self.computed_facts.items()}
        return self._replace(**picked, computed_facts=facts, computed_counts={})


class Measure:
    """Gives some numbers for each parameter, each scope or both (the scopes first), for each module, or for the step.

    Attributes:
        merge: how the numbers of several ranks become one: "sum" adds float64, "max" takes the largest int64 (see
            :mod:`disthooks.grads.collectives` for how a number becomes such an integer).
        per: whether there are numbers for each parameter, each scope, or both; for each module whose outputs are
            read; or for the step.
        facts: the facts of each gradient that it needs; :func:`~disthooks.grads.stats.scan.compute_facts` computes them
            once for all measures.
        local_facts: the facts that it needs of the gradients before their reduction.
        after: whether it reads the parameters after the optimizer step.
        before: whether it then needs the parameters from before the step, too.
    """

    merge: ClassVar[Merge]
    per: ClassVar[Per] = "parameter"
    facts: ClassVar[frozenset[Fact]] = frozenset()
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset()
    after: ClassVar[bool] = False
    before: ClassVar[bool] = False

    def width(self, shard: Shard | None) -> int:
        """How many numbers there are for the parameter of ``shard``; if it is None, for a scope, a module, the step."""
        return 1

    def count_rows(self, local: Local) -> CountRows | None:
        """Which gradients are counted together, if it needs counts of magnitudes; one reading finds them and facts."""
        return None

    def local(self, local: Local) -> torch.Tensor:
        """The numbers of this rank, 1-D on ``local.device``: float64 if they are added, int64 for the largest."""
        raise NotImplementedError


def stack(
    slots: Sequence[torch.Tensor | None],
    measure: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    device: torch.device,
) -> torch.Tensor:
    """A float64 for each of ``slots``: ``measure`` of the tensors that have elements, and 0 for the others.

    The result is built by stacking. An index made from a list would be copied to the device, and the host would wait.
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
    """``tensor`` on ``device``, for immediate use there.

    The host does not wait for a copy to a device. It does wait for a copy to the host, because it reads the copy next:
    that happens if gradients are offloaded to the CPU while NCCL merges their numbers on the device.
    """
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def scalar(number: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """``number`` as a scalar tensor on ``device``. The host does not wait, as it would in ``torch.as_tensor(number)``.

    >>> scalar(2.5, torch.device("cpu"))
    tensor(2.5000)
    """
    return onto(number, device) if isinstance(number, torch.Tensor) else torch.full((), number, device=device)


def moved(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``. Its memory is pinned first, since the host would wait for any other copy."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def real(grad: torch.Tensor) -> torch.Tensor:
    """The magnitudes of the elements if ``grad`` is complex, otherwise ``grad`` itself."""
    return grad.abs() if grad.is_complex() else grad


def largest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, NaN if there is one; 0 if there are no elements.

    >>> largest_of(torch.tensor([3.0, -4.0]))
    tensor(4.)
    """
    magnitudes = real(tensor)
    if not magnitudes.numel():
        return magnitudes.new_zeros(())
    # A norm of order infinity takes 28 times as long on the CPU.
    return torch.maximum(magnitudes.amax(), -magnitudes.amin())


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` are summed."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """The 2-norm along the last dimension, without overflow or underflow for any float32."""
    if not rows.is_cpu:
        wide_norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
        return wide_norm
    found: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=wide(rows.dtype)).double()
    doubt = ~torch.isfinite(found) | (found < SMALL_ROW)
    if bool(doubt.any()) and rows.shape[-1]:
        found[doubt] = exact_norms(rows[doubt])
    return found


def exact_norms(rows: torch.Tensor) -> torch.Tensor:
    """The 2-norm of each of ``rows`` on the CPU, of shape (rows, elements), in float64."""
    found = torch.zeros(len(rows), dtype=torch.float64)
    live = (rows.amax(-1) != 0) | (rows.amin(-1) != 0)  # rows of zeros are frequent
    again = rows[live].double()
    largest = peaks(again.abs().amax(-1))
    found[live] = largest * torch.linalg.vector_norm(again / largest[:, None], dim=-1)
    return found


def peaks(largest: torch.Tensor) -> torch.Tensor:
    """The divisors of rows: ``largest``, or 1 where it is 0, infinite or NaN."""
    return torch.where(torch.isfinite(largest) & (largest > 0), largest, 1.0)


#: With more ranks a record has no number of each rank.
MOST_RANKS = 16


def on_this_rank(numbers: torch.Tensor, local: Local) -> torch.Tensor:
    """The ``numbers`` of this rank at its place, of shape (numbers, :data:`MOST_RANKS`) and flat: a SUM has all ranks'.

    All are zero if there are more ranks than that.
    """
    found = numbers.new_zeros(len(numbers), MOST_RANKS)
    if local.world <= MOST_RANKS:
        found[:, local.position] = numbers
    return found.flatten()


def of_ranks(name: str, numbers: Sequence[float], ranks: Sequence[int]) -> dict[str, dict[str, float]]:
    """The entry ``<name>/of_ranks`` of a record: the number of each rank; nothing of one rank, or of too many.

    >>> of_ranks("loss", [0.5, 0.25, 0.0, 0.0], [4, 5]), of_ranks("loss", [0.5, 0.0], [0])
    ({'loss/of_ranks': {'4': 0.5, '5': 0.25}}, {})
    """
    if not 1 < len(ranks) <= MOST_RANKS:
        return {}
    return {f"{name}/of_ranks": {str(rank): number for rank, number in zip(ranks, numbers, strict=False)}}


#: The state of a statistic from one logged step to the next: on the CPU, and the same on every rank.
State = dict[str, torch.Tensor]


class Found(NamedTuple):
    """The measurements of a logged step, merged over the ranks and on the CPU.

    Attributes:
        names: the names of the parameters.
        groups: for each named group the indices of its parameters in ``names``.
        rows: for each measure its numbers, one row for each parameter (or each scope, see :attr:`Measure.per`).
        ranks: the global ranks that took part.
        modules: the names of the modules whose outputs were read.
        step: the number of the step.
    """

    names: Sequence[str]
    groups: Mapping[str, Sequence[int]]
    rows: Mapping[Measure, torch.Tensor]
    ranks: Sequence[int]
    modules: Sequence[str] = ()
    step: int = 0

    def global_rank(self, place: float) -> int | None:
        """The rank at ``place`` among :attr:`ranks`; None if there is none, as no rank had a number then."""
        return None if place < 0 else self.ranks[int(place)]


@dataclass(frozen=True)
class Stat:
    """Named numbers of all gradients together, of each group of parameters, and on request of each parameter.

    Args:
        per_parameter: whether to log ``<name>/param/<parameter>`` for each parameter too.
    """

    per_parameter: bool = field(default=False, kw_only=True)

    alone: ClassVar[bool] = False  # whether two of this class would write the same names
    why_empty: ClassVar[str] = ""  # what is said once if it has no numbers in a logged step
    settings: ClassVar[tuple[str, ...]] = ()  # of the optimizer's groups, which are logged too

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Raise UsageError if this statistic cannot be right on this engine. Every rank has to decide alike."""

    def start(self, scopes: int) -> State:
        """The state before the first step, for this number of scopes; empty if the statistic has no state."""
        return {}

    def measures(self) -> tuple[Measure, ...]:
        """The measures that it needs."""
        raise NotImplementedError

    def forward_needs(self) -> ForwardNeeds:
        """What it needs of forwards; nothing, unless it is a statistic of forwards."""
        return ForwardNeeds()

    def always(self) -> tuple[Measure, ...]:
        """Those of :meth:`measures` that are taken in every step, logged or not."""
        return ()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The numbers by name.

        Args:
            values: for each measure a tensor with one row for each scope, merged over the parameters of the scope:
                float64 for a SUM, int64 for a MAX (see :mod:`disthooks.grads.collectives`).

        Returns:
            For each name a float64 tensor with one number for each scope.
        """
        raise NotImplementedError

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """The entries of the log: ``name`` for all, ``name/group/<group>`` and ``name/param/<parameter>``.

        Args:
            found: the measurements of the step.
            state: the state from :meth:`start`; it is changed in place.
        """
        columns = self.numbers([self.scoped(found, measure) for measure in self.measures()])
        return self.named(found, {name: column.tolist() for name, column in columns.items()})

    def named(self, found: Found, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """The entries of each column under its name plus the name of the scope."""
        suffixes = scope_names(found, self.per_parameter)
        return {f"{name}{suffix}": column[i] for i, suffix in enumerate(suffixes) for name, column in columns.items()}

    def scoped(self, found: Found, measure: Measure) -> torch.Tensor:
        """The numbers of ``measure``, one row for each scope: all, every group, and on request every parameter."""
        rows = found.rows[measure]
        if measure.per == "both":
            return rows if self.per_parameter else rows[: 1 + len(found.groups)]
        if measure.per == "scope":
            return rows
        merged = [merge(measure, rows), *(merge(measure, rows[list(group)]) for group in found.groups.values())]
        return torch.cat([torch.stack(merged), rows]) if self.per_parameter else torch.stack(merged)


def merge(measure: Measure, rows: torch.Tensor) -> torch.Tensor:
    """The numbers of several parameters, merged as if they were one parameter."""
    return rows.sum(0) if measure.merge == "sum" else rows.amax(0)


def scope_names(found: Found, per_parameter: bool) -> list[str]:
    """For each scope the suffix that the name of a number gets."""
    groups = [f"/group/{group}" for group in found.groups]
    return ["", *groups, *(f"/param/{name}" for name in found.names if per_parameter)]


def check_real(stat: Stat, shards: Sequence[Shard]) -> None:
    """Raise UsageError if a parameter is complex."""
    for shard in shards:
        if shard.parameter.is_complex():
            raise UsageError(
                f"{type(stat).__name__}: {shard.name!r} is complex, and complex numbers have no order and no signed "
                "mean; Norm, MaxAbs, Zeros and Histogram are of magnitudes"
            )


def refuse_per_parameter(stat: Stat) -> None:
    """Raise UsageError if ``per_parameter`` was asked for, of a statistic that has no numbers of parameters."""
    if stat.per_parameter:
        raise UsageError(
            f"{type(stat).__name__}(per_parameter=True): it has no numbers of single parameters; leave it out"
        )


def check_own_data(stat: Stat, engine: Engine) -> None:
    """Raise UsageError if several ranks may work on the same part of the batch."""
    if not engine.has_own_batch():
        raise UsageError(
            f"{type(stat).__name__} compares gradients of ranks that have different data. Under {engine.label} with "
            "tensor parallelism several ranks work on the same data, each on a part of the layer. Leave it out here"
        )
