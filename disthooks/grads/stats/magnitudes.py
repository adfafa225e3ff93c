"""The distribution of magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks.errors import UsageError
from disthooks.grads.measures.base import Measure
from disthooks.grads.measures.histogram import MagnitudeCounts, edges, quantile
from disthooks.grads.stats.base import Found, Stat, State


@dataclass(frozen=True)
class Histogram(Stat):
    """How magnitudes are distributed: ``grad_histogram`` and quantiles, ``grad_abs_q50`` being the median.

    Bins are on a logarithmic scale and the same in every step, every run and on every rank, so counts are exact:
    four in each octave from 2**-64 to 2**32, one for what is smaller (zeros too), one for what is larger, infinite
    or NaN. ``grad_histogram`` is ``{"edges": [...], "counts": [...]}`` from the first bin that is not empty to the
    last, with one more edge than counts. A quantile is off by less than the width of its bin, which is at most a
    quarter of its lower edge; 0 in the lowest bin, infinite in the highest.

    Args:
        quantiles: which, each from 0 to 1, as ``grad_abs_q<percent>``.
        per_parameter: also of each parameter; 3 KiB for each are then added up over the ranks, in logged steps.

    Raises:
        UsageError: when a quantile is not between 0 and 1.

    >>> from disthooks import gradients
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[1.0, -1.5]])
    >>> with gradients(layer, torch.optim.SGD(layer.parameters()), stats=[Histogram((0.5,))]) as watch:
    ...     watch._optimizer.step()
    >>> watch.latest["grad_histogram"], watch.latest["grad_abs_q50"]
    ({'edges': [1.0, 1.25, 1.5, 1.75], 'counts': [1, 0, 1]}, 1.25)
    """

    quantiles: tuple[float, ...] = (0.01, 0.5, 0.99)

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        given = self.quantiles if isinstance(self.quantiles, (list, tuple)) else (self.quantiles,)
        object.__setattr__(self, "quantiles", tuple(given))  # a list from a file
        for q in self.quantiles:
            if not isinstance(q, (int, float)) or isinstance(q, bool) or not 0 <= q <= 1:
                raise UsageError(f"Histogram(quantiles={self.quantiles!r}): each is a number from 0 to 1, not {q!r}")

    def measures(self) -> tuple[Measure, ...]:
        """The counts."""
        return (MagnitudeCounts(self.per_parameter),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The quantiles."""
        return {f"grad_abs_q{100 * q:.12g}": quantile(values[0], q) for q in self.quantiles}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """The quantiles, and the bins that are not empty."""
        rows = self.scoped(found, *self.measures())
        return super().record(found, state) | self.named(found, {"grad_histogram": [_filled(row) for row in rows]})


def _filled(counts: torch.Tensor) -> dict[str, list[Any]]:
    places = counts.nonzero().flatten().tolist()
    if not places:
        return {"edges": [], "counts": []}
    first, last = places[0], places[-1] + 1
    return {"edges": edges()[first : last + 1].tolist(), "counts": counts[first:last].long().tolist()}
