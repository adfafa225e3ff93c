"""What every statistic is: some measures, and what to write of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from disthooks.grads.measures.base import Measure


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

    def measures(self) -> tuple[Measure, ...]:
        """What it needs."""
        raise NotImplementedError

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The numbers by name.

        Args:
            values: for each measure a row for each scope, merged over the scope's parameters: float64, or int64 of
                a MAX (see :mod:`disthooks.grads.order`).

        Returns:
            One float64 for each scope.
        """
        raise NotImplementedError

    def record(self, found: Found) -> dict[str, Any]:
        """What goes into the log: ``name`` of all, ``name/group/<group>``, ``name/param/<parameter>``."""
        suffixes = scope_names(found, self.per_parameter)
        values = [self._scoped(found, measure) for measure in self.measures()]
        columns = {name: column.tolist() for name, column in self.numbers(values).items()}
        return {f"{name}{suffix}": column[i] for i, suffix in enumerate(suffixes) for name, column in columns.items()}

    def _scoped(self, found: Found, measure: Measure) -> torch.Tensor:
        rows = found.rows[measure]
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
