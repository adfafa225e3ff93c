"""Named statistics of the final gradients, measured before any rule rewrites them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from disthooks.grads.measures import FirstToFail, Measure, NonFiniteCount, Power

__all__ = ["MaxAbs", "NonFinite", "Norm", "Stat"]


class Stat(Protocol):
    """Measures, and what to write of them.

    Attributes:
        looks_local: whether it must look at gradients before their reduction in the steps that are logged.
    """

    @property
    def looks_local(self) -> bool:
        """Whether gradients before their reduction are looked at."""
        ...

    def measures(self) -> tuple[Measure, ...]:
        """What it needs of each parameter."""
        ...

    def finish(self, names: Sequence[str], values: Sequence[torch.Tensor], ranks: Sequence[int]) -> dict[str, Any]:
        """What goes into the log.

        Args:
            names: of the parameters.
            values: for each measure, merged over the ranks: one float64 for each parameter, on the CPU.
            ranks: the global ranks that took part.
        """
        ...


@dataclass(frozen=True)
class Norm:
    """The norm of all gradients as if they were one vector: ``grad_norm`` in the log.

    Args:
        norm_type: which norm; any number above 0, or ``math.inf``. Others than 2 are logged as
            ``grad_norm_l1``, ``grad_norm_linf`` and so on.
        per_parameter: also log that of each parameter, as ``grad_norm/param/<name>``.

    Raises:
        UsageError: when ``norm_type`` is not above 0.

    >>> Norm(1.0).finish(["w", "b"], [torch.tensor([3.0, 4.0])], [0])
    {'grad_norm_l1': 7.0}
    """

    norm_type: float = 2.0
    per_parameter: bool = False
    looks_local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Power(self.norm_type)

    def measures(self) -> tuple[Measure, ...]:
        """The sum of powers."""
        return (Power(float(self.norm_type)),)

    def finish(self, names: Sequence[str], values: Sequence[torch.Tensor], ranks: Sequence[int]) -> dict[str, Any]:
        """The norm, and if asked for those of the parameters."""
        power, label = Power(float(self.norm_type)), norm_label(self.norm_type)
        found = {label: float(power.norm(values[0]))}
        if self.per_parameter:
            found |= {f"{label}/param/{name}": float(power.norm(values[0][i : i + 1])) for i, name in enumerate(names)}
        return found


@dataclass(frozen=True)
class MaxAbs:
    """The largest magnitude among all elements: ``grad_max_abs``; not a number if any element is.

    >>> MaxAbs().finish(["w", "b"], [torch.tensor([0.5, 2.0])], [0])
    {'grad_max_abs': 2.0}
    """

    looks_local: ClassVar[bool] = False

    def measures(self) -> tuple[Measure, ...]:
        """The infinity norm."""
        return (Power(math.inf),)

    def finish(self, names: Sequence[str], values: Sequence[torch.Tensor], ranks: Sequence[int]) -> dict[str, Any]:
        """The largest."""
        return {"grad_max_abs": float(Power(math.inf).norm(values[0]))}


@dataclass(frozen=True)
class NonFinite:
    """How many elements are infinite or not a number, in which parameters, and on which rank it began.

    Logged are ``nonfinite``, the count over all parameters with each element counted once, and ``nonfinite_at``, a
    list of ``{"param": name, "count": n, "rank": r}`` for the parameters that have any. ``rank`` is the lowest
    global rank whose own gradient, before any reduction, was non-finite; None when none was, so that the
    reduction itself overflowed or the loss of digits came after it.

    >>> NonFinite().finish(["w", "b"], [torch.tensor([0.0, 3.0]), torch.tensor([0.0, 1.0])], [4, 5])
    {'nonfinite': 3, 'nonfinite_at': [{'param': 'b', 'count': 3, 'rank': 5}]}
    """

    looks_local: ClassVar[bool] = True

    def measures(self) -> tuple[Measure, ...]:
        """The counts, and the first rank to fail."""
        return NonFiniteCount(), FirstToFail()

    def finish(self, names: Sequence[str], values: Sequence[torch.Tensor], ranks: Sequence[int]) -> dict[str, Any]:
        """The counts and where."""
        counts = [int(count) for count in values[0].tolist()]
        first = [ranks[len(ranks) - int(mark)] if mark > 0 else None for mark in values[1].tolist()]
        at = [
            {"param": name, "count": count, "rank": rank}
            for name, count, rank in zip(names, counts, first, strict=True)
            if count
        ]
        return {"nonfinite": sum(counts), "nonfinite_at": at}


def norm_label(p: float) -> str:
    """The name of a norm in the log.

    >>> norm_label(2.0), norm_label(1), norm_label(math.inf)
    ('grad_norm', 'grad_norm_l1', 'grad_norm_linf')
    """
    return "grad_norm" if p == 2 else f"grad_norm_l{p:g}"
