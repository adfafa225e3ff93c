"""Statistics of the elements: ``Moments``, ``Extremes``, ``Zeros`` and ``Histogram``, with their measures.

``UnitSquares``, the squared norms of output units, is here too: rules that clip each unit need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from disthooks._registry import register
from disthooks.engines.base import Engine, Part, Shard
from disthooks.errors import UsageError
from disthooks.grads.collectives import from_sortable, to_sortable
from disthooks.grads.stats.base import (
    CountRows,
    Fact,
    Found,
    Local,
    Measure,
    Merge,
    Per,
    Stat,
    State,
    check_real,
    onto,
    real,
    row_norms,
)
from disthooks.grads.stats.magnitudes import BINS, edges
from disthooks.grads.stats.norms import norms
from disthooks.grads.stats.scan import compute_facts, scan


@dataclass(frozen=True)
class MagnitudeCounts(Measure):
    """How many elements have a magnitude in each of 386 bins.

    The first bin counts zeros and magnitudes below 2**-64. The last bin counts magnitudes of 2**32 and more, infinity
    and NaN. Between them each octave has four bins of the same width, so the width of a bin is at most a quarter of its
    lower edge. See [Note: bins of magnitudes] in magnitudes.py.

    Attributes:
        each: True for counts of each parameter, False for counts of each scope.
    """

    each: bool = False
    merge: ClassVar[Merge] = "sum"

    @property
    def per(self) -> Per:  # type: ignore[override]
        # Counts of each parameter are 3 KiB each, so they are made only if the user asks for them.
        return "parameter" if self.each else "scope"

    def width(self, shard: Shard | None) -> int:
        return BINS

    def count_rows(self, local: Local) -> CountRows:
        if self.each:
            return CountRows(range(len(local.grads)), len(local.grads))
        sets = self._scopes_of(local)
        rows = {scopes: row for row, scopes in enumerate(dict.fromkeys(sets))}
        return CountRows([rows[scopes] for scopes in sets], len(rows))

    def local(self, local: Local) -> torch.Tensor:
        counts = local.computed_counts.get(self)
        if counts is None:
            counts = scan(local.grads, frozenset(), local.device, self.count_rows(local)).counts
        if self.each:
            return counts.flatten()
        total = torch.zeros(len(local.scopes), BINS, dtype=torch.float64, device=local.device)
        for row, scopes in enumerate(dict.fromkeys(self._scopes_of(local))):
            for scope in scopes:
                total[scope] += counts[row]
        return total.flatten()

    @staticmethod
    def _scopes_of(local: Local) -> list[frozenset[int]]:
        """The scopes of each gradient. Scopes overlap, so gradients of the same scopes are counted in one row."""
        belongs: list[set[int]] = [set() for _ in local.grads]
        for scope, places in enumerate(local.scopes):
            for place in places:
                belongs[place].add(scope)
        return [frozenset(scopes) for scopes in belongs]


def quantile(counts: torch.Tensor, q: float) -> torch.Tensor:
    """For each row of counts, the magnitude that a share ``q`` of the elements does not exceed.

    The elements of a bin are assumed to be spread evenly over it. So the result is off by less than the width of its
    bin, which is at most a quarter of the bin's lower edge. The result is 0 in the first bin, infinity in the last bin,
    and NaN if the row counts no elements.

    Returns:
        A float64 tensor of shape (...).

    >>> counts = torch.zeros(BINS, dtype=torch.float64)
    >>> counts[257] = 4  # in [1, 1.25)
    >>> float(quantile(counts, 0.5))
    1.125
    """
    upto, ends = counts.cumsum(-1), edges()
    rank = upto[..., -1:] * q
    # The first bin that reaches the rank. For q = 0 the rank is 0, so empty bins before the first element are skipped.
    at = ((upto < rank) | (upto == 0)).sum(-1, keepdim=True).clamp(max=BINS - 1)
    inside = counts.gather(-1, at)
    share = ((rank - (upto.gather(-1, at) - inside)) / inside).clamp(0, 1)
    low, high = ends[at], ends[at + 1]
    found = torch.where(high.isinf(), torch.inf, low + share * (high - low))
    found = torch.where(at == 0, 0.0, found)
    return torch.where(upto[..., -1:] > 0, found, torch.nan).squeeze(-1)


@dataclass(frozen=True)
class UnitSquares(Measure):
    """The sum of squares of each unit of the gradients, or of the parameters themselves; see :func:`units`.

    Attributes:
        of: "gradient" for the final gradients, "parameter" for the parameters.
    """

    of: Literal["gradient", "parameter"]
    merge: ClassVar[Merge] = "sum"

    def width(self, shard: Shard | None) -> int:
        return 0 if shard is None else units(_part(shard).shape)

    def local(self, local: Local) -> torch.Tensor:
        # A unit that is spread over ranks is added up by the SUM. Only the owner of an element counts it (decision 54).
        rows = []
        for shard, grad in zip(local.shards, local.grads, strict=True):
            tensor = grad if self.of == "gradient" else shard.values().detach() if shard.is_owner else None
            part, at = _part(shard), 0  # `at` is the first unit whose number is not in `rows` yet
            for first, piece in [] if tensor is None else pieces(tensor, part):
                # A single row may be a long vector, of which `norms` loses fewer digits.
                found = norms([piece], 2.0)[0][None] if len(piece) == 1 else row_norms(real(piece).flatten(1))
                # Units that are not on this rank get 0.
                rows.append(torch.zeros(first - at, dtype=torch.float64, device=local.device))
                rows.append(onto(found, local.device, torch.float64).square())
                at = first + len(piece)
            rows.append(torch.zeros(units(part.shape) - at, dtype=torch.float64, device=local.device))
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64, device=local.device)


def units(shape: torch.Size) -> int:
    """How many units a parameter of ``shape`` has: one for each row along dimension 0.

    A parameter with one dimension, or with none, is one unit.

    >>> units(torch.Size([5, 3, 3])), units(torch.Size([7])), units(torch.Size([]))
    (5, 1, 1)
    """
    return shape[0] if len(shape) > 1 else 1


def pieces(tensor: torch.Tensor, part: Part) -> list[tuple[int, torch.Tensor]]:
    """Cut this rank's part of a parameter into views along units.

    A part that is a range of the flattened parameter may begin and end in the middle of a row. So there are up to three
    views: the end of a row, whole rows, and the beginning of a row.

    Returns:
        Pairs of the index of the first unit and a view. Dimension 0 of the view counts units from that one on.

    >>> part = Part(torch.Size([4, 3]), span=(2, 10))
    >>> [(first, view.tolist()) for first, view in pieces(torch.arange(2, 10), part)]
    [(0, [[2]]), (1, [[3, 4, 5], [6, 7, 8]]), (3, [[9]])]
    """
    if tensor.numel() == 0:
        return []
    if len(part.shape) < 2:
        return [(0, tensor.view(1, 1) if tensor.ndim == 0 else tensor.unsqueeze(0))]
    if part.box is not None:
        return [(part.box[0][0], tensor)]
    assert part.span is not None
    row, (start, stop) = part.shape[1:].numel(), part.span
    head = min(-start % row, stop - start)
    rows = (stop - start - head) // row
    cut = torch.split(tensor, [head, rows * row, stop - start - head - rows * row])
    found = [(start // row, cut[0][None])] if head else []
    found += [(-(-start // row), cut[1].view(rows, row))] if rows else []
    return found + ([((stop - 1) // row, cut[2][None])] if cut[2].numel() else [])


def _part(shard: Shard) -> Part:
    assert shard.part is not None, f"{shard.name!r}: the engine does not tell which elements are on this rank"
    return shard.part


@dataclass(frozen=True)
class MomentSums(Measure):
    """Four numbers that merge by a SUM: the count n, n mean, the sum of squared distances to the mean, and n mean².

    So mean and standard deviation over all ranks need one collective (decision 53).

    >>> sums = torch.tensor([[2.0, 2.0, 0.0, 2.0], [2.0, 6.0, 0.0, 18.0]])  # of 1, 1 and of 3, 3
    >>> MomentSums().mean_std(sums.sum(0))
    (tensor(2.), tensor(1.))
    """

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"count", "sum", "m2"})

    def width(self, shard: Shard | None) -> int:
        return 4

    def local(self, local: Local) -> torch.Tensor:
        found = compute_facts(local, self.facts)
        count, total = found["count"], found["sum"]
        return torch.stack([count, total, found["m2"], total.square() / count.clamp(min=1)], dim=1).flatten()

    def mean_std(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation (divided by n, not n - 1) from merged numbers; NaN if there are no elements.

        The variance is the variance inside the parts plus the variance of the parts' means (Chan, Golub and LeVeque
        1979). Only the second one is a difference of large numbers. They are float64 and as large as the means, not as
        large as the elements' squares, so few digits are lost (decision 53).

        Returns:
            Two tensors of shape (...).
        """
        count, total, inside, means = values.unbind(-1)
        between = (means - total.square() / count).clamp(min=0)
        return total / count, ((inside + between) / count).sqrt()


@dataclass(frozen=True)
class ExtremeValues(Measure):
    """The largest element, and the largest of the negated elements; NaN if any element is NaN."""

    merge: ClassVar[Merge] = "max"
    facts: ClassVar[frozenset[Fact]] = frozenset({"high", "low"})

    def width(self, shard: Shard | None) -> int:
        return 2

    def local(self, local: Local) -> torch.Tensor:
        found = compute_facts(local, self.facts)
        # See [Note: MAX of integers keeps NaN].
        return to_sortable(torch.stack([found["high"], found["low"]], dim=1).flatten())

    def low_high(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The smallest and the largest element from merged numbers; NaN if there are no elements.

        Returns:
            Two float64 tensors of shape (...).
        """
        high, low = from_sortable(values).unbind(-1)
        nothing = (high == -torch.inf) & (low == -torch.inf)
        return torch.where(nothing, torch.nan, -low), torch.where(nothing, torch.nan, high)


@dataclass(frozen=True)
class ZeroCount(Measure):
    """How many elements of each parameter are exactly zero, and how many elements it has."""

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"count", "zeros"})

    def width(self, shard: Shard | None) -> int:
        return 2

    def local(self, local: Local) -> torch.Tensor:
        found = compute_facts(local, self.facts)
        return torch.stack([found["zeros"], found["count"]], dim=1).flatten()


@register("stat")
@dataclass(frozen=True)
class Moments(Stat):
    """Mean and standard deviation over all elements: ``grad_mean``, ``grad_std``.

    The deviation is divided by n, not by n - 1. If an element is not finite, neither number is; ``NonFinite`` says
    which parameters have such elements. The parts of ranks and parameters are merged by the formula of Chan, Golub and
    LeVeque (1979), so no digits are lost even if the mean is ten thousand times the deviation.

    Args:
        per_parameter: log both of each parameter too, as ``grad_mean/param/<name>`` and so on.

    Raises:
        UsageError: when attached, if a parameter is complex.

    >>> sums = torch.tensor([[2.0, 4.0, 2.0, 8.0]])  # of 1 and 3: n, n mean, squared distances, n mean²
    >>> Moments().numbers([sums])
    {'grad_mean': tensor([2.]), 'grad_std': tensor([1.])}
    """

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        check_real(self, shards)

    def measures(self) -> tuple[Measure, ...]:
        return (MomentSums(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        mean, std = MomentSums().mean_std(values[0])
        return {"grad_mean": mean, "grad_std": std}


@register("stat")
@dataclass(frozen=True)
class Extremes(Stat):
    """The smallest and the largest element: ``grad_min``, ``grad_max``; both are NaN if any element is NaN.

    Args:
        per_parameter: log both of each parameter too, as ``grad_min/param/<name>`` and so on.

    Raises:
        UsageError: when attached, if a parameter is complex.

    >>> from disthooks.grads.collectives import to_sortable
    >>> found = Extremes().numbers([to_sortable(torch.tensor([[3.0, 4.0]]))])  # the largest, and of the negatives
    >>> {name: column.tolist() for name, column in found.items()}
    {'grad_min': [-4.0], 'grad_max': [3.0]}
    """

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        check_real(self, shards)

    def measures(self) -> tuple[Measure, ...]:
        return (ExtremeValues(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        low, high = ExtremeValues().low_high(values[0])
        return {"grad_min": low, "grad_max": high}


@register("stat")
@dataclass(frozen=True)
class Zeros(Stat):
    """The share of elements that are exactly zero, from 0 to 1: ``grad_zeros``.

    A parameter without a gradient does not count. Many zeros in half precision are a sign of underflow. Many zeros in
    an embedding are rows that the batch did not use.

    Args:
        per_parameter: log the share of each parameter too, as ``grad_zeros/param/<name>``.

    >>> Zeros().numbers([torch.tensor([[1.0, 4.0]])])
    {'grad_zeros': tensor([0.2500])}
    """

    def measures(self) -> tuple[Measure, ...]:
        return (ZeroCount(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"grad_zeros": values[0][:, 0] / values[0][:, 1]}


@register("stat")
@dataclass(frozen=True)
class Histogram(Stat):
    """How magnitudes are distributed: ``grad_histogram``, and quantiles: ``grad_abs_q50`` is the median.

    The bins are on a logarithmic scale and are the same in every step, every run and on every rank, so counts are
    exact. Each octave from 2**-64 to 2**32 has four bins. One more bin counts smaller magnitudes and zeros, and one
    counts larger magnitudes, infinity and NaN.

    ``grad_histogram`` is ``{"edges": [...], "counts": [...]}`` from the first bin that is not empty to the last one,
    with one more edge than counts. A quantile is off by less than the width of its bin, which is at most a quarter of
    the bin's lower edge. A quantile in the lowest bin is 0, and one in the highest bin is infinite.

    Args:
        quantiles: the shares, each from 0 to 1; logged as ``grad_abs_q<percent>``.
        per_parameter: log both of each parameter too. Then logged steps add up 3 KiB for each parameter over the ranks.

    Raises:
        UsageError: when a quantile is not between 0 and 1.

    >>> from disthooks import gradients
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[1.0, -1.5]])
    >>> with gradients(layer, torch.optim.SGD(layer.parameters()), stats=[Histogram((0.5,))]) as watch:
    ...     watch.optimizer.step()
    >>> watch.latest["grad_histogram"], watch.latest["grad_abs_q50"]
    ({'edges': [1.0, 1.25, 1.5, 1.75], 'counts': [1, 0, 1]}, 1.25)
    """

    quantiles: tuple[float, ...] = (0.01, 0.5, 0.99)

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        given = self.quantiles if isinstance(self.quantiles, (list, tuple)) else (self.quantiles,)
        object.__setattr__(self, "quantiles", tuple(given))  # a configuration file gives a list, which has no hash
        for q in self.quantiles:
            if not isinstance(q, (int, float)) or isinstance(q, bool) or not 0 <= q <= 1:
                raise UsageError(f"Histogram(quantiles={self.quantiles!r}): each is a number from 0 to 1, not {q!r}")

    def measures(self) -> tuple[Measure, ...]:
        return (MagnitudeCounts(self.per_parameter),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"grad_abs_q{100 * q:.12g}": quantile(values[0], q) for q in self.quantiles}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        column: list[dict[str, list[Any]]] = []
        for counts in self.scoped(found, *self.measures()):
            # From the first bin that is not empty to the last one.
            filled = counts.nonzero().flatten().tolist()
            first, last = (filled[0], filled[-1] + 1) if filled else (0, 0)
            bins = edges()[first : last + 1].tolist() if filled else []
            column.append({"edges": bins, "counts": counts[first:last].long().tolist()})
        return super().record(found, state) | self.named(found, {"grad_histogram": column})
