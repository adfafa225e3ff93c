"""What every statistic is: some measures, and what to write of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from disthooks.engines.base import Engine
from disthooks.engines.shard import Shard
from disthooks.errors import UsageError
from disthooks.grads.measures.base import Measure

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
                a MAX (see :mod:`disthooks.grads.order`).

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
    if not engine.own_data():
        raise UsageError(
            f"{type(stat).__name__} compares gradients of ranks that have different data, and under {engine.label} "
            "with tensor parallelism several ranks work on the same, each on a part of the layer; leave it out here"
        )
