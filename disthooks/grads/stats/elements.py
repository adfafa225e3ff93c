"""Statistics of the elements: ``Moments``, ``Extremes``, ``Zeros`` and ``Histogram``, with their measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from disthooks._registry import register
from disthooks.engines.base import Engine, Part, Shard
from disthooks.errors import UsageError
from disthooks.grads.collectives import from_sortable, to_sortable
from disthooks.grads.stats.base import (
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
from disthooks.grads.stats.norms import norms
from disthooks.grads.stats.scan import known

_LOWEST, _HIGHEST = -64, 32  # powers of two
_PARTS = 4  # bins in an octave
BINS = (_HIGHEST - _LOWEST) * _PARTS + 2
_BLOCK = {"cpu": 2**19, "cuda": 2**24}  # elements; CUDA's histc counts in float32, which ends at 2**24
# A float's bits without the sign are an integer; shifted by this, it is the exponent and two digits of the mantissa.
_BITS = {torch.float32: (torch.int32, 21, 127), torch.float64: (torch.int64, 50, 1023)}


@dataclass(frozen=True)
class MagnitudeCounts(Measure):
    """How many elements have a magnitude in each of 386 bins.

    The first bin is for zero and all below 2**-64, the last for 2**32 and more, infinity and NaN; between them an
    octave has four bins of the same width, so a bin is at most a quarter as wide as where it begins.

    Attributes:
        each: whether there are counts for each parameter, or for each scope.
    """

    each: bool = False
    merge: ClassVar[Merge] = "sum"

    @property
    def per(self) -> Per:  # type: ignore[override]
        """For each scope unless ``each``, since they are many."""
        return "parameter" if self.each else "scope"

    def width(self, shard: Shard | None) -> int:
        """The number of bins."""
        return BINS

    def local(self, local: Local) -> torch.Tensor:
        """The counts of each parameter or scope, one after the other."""
        if self.each:
            rows = [_counts([grad], local.device) for grad in local.grads]
            return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64, device=local.device)
        alike: dict[frozenset[int], list[torch.Tensor | None]] = {}
        belongs: list[set[int]] = [set() for _ in local.grads]
        for scope, places in enumerate(local.scopes):
            for place in places:
                belongs[place].add(scope)
        for grad, scopes in zip(local.grads, belongs, strict=True):
            alike.setdefault(frozenset(scopes), []).append(grad)
        total = torch.zeros(len(local.scopes), BINS, dtype=torch.float64, device=local.device)
        for shared, grads in alike.items():
            found = _counts(grads, local.device)
            for scope in shared:
                total[scope] += found
        return total.flatten()


def edges() -> torch.Tensor:
    """Where the bins begin, and where the last one ends: 0, 2**-64, 1.25 * 2**-64, ... 2**32, infinity.

    >>> edges()[[0, 1, 2, 5, -2, -1]].tolist() == [0.0, 2.0**-64, 1.25 * 2.0**-64, 2.0**-63, 2.0**32, float("inf")]
    True
    """
    octaves = torch.arange(_LOWEST, _HIGHEST, dtype=torch.float64).exp2()
    parts = 1 + torch.arange(_PARTS, dtype=torch.float64) / _PARTS
    ends = torch.tensor([2.0**_HIGHEST, torch.inf], dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), (octaves[:, None] * parts).flatten(), ends])


def quantile(counts: torch.Tensor, q: float) -> torch.Tensor:
    """The magnitude that a share ``q`` of the elements does not exceed, for each row of counts.

    Inside a bin elements are taken to lie evenly, so it is off by less than the bin's width, a quarter of it; 0 in
    the first bin, infinity in the last, NaN of nothing.

    >>> counts = torch.zeros(BINS, dtype=torch.float64)
    >>> counts[257] = 4  # in [1, 1.25)
    >>> float(quantile(counts, 0.5))
    1.125
    """
    upto, ends = counts.cumsum(-1), edges()
    rank = upto[..., -1:] * q
    # The first bin that reaches the rank and is not empty.
    at = ((upto < rank) | (upto == 0)).sum(-1, keepdim=True).clamp(max=BINS - 1)
    inside = counts.gather(-1, at)
    share = ((rank - (upto.gather(-1, at) - inside)) / inside).clamp(0, 1)
    low, high = ends[at], ends[at + 1]
    found = torch.where(high.isinf(), torch.inf, low + share * (high - low))
    found = torch.where(at == 0, 0.0, found)
    return torch.where(upto[..., -1:] > 0, found, torch.nan).squeeze(-1)


def _counts(grads: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """How many elements of all of them are in each bin."""
    codes: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
    for block in _blocks(grads):
        block = block if block.dtype == torch.float64 else block.float()
        key, found = (block.device, block.dtype), _coded(block)
        codes[key] = codes[key].add_(found) if key in codes else found
    total = torch.zeros(BINS, dtype=torch.float64, device=device)
    for (_, dtype), counts in codes.items():
        total += onto(_binned(counts, dtype), device)
    return total


def _blocks(grads: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """The elements in pieces that stay in a cache: parts of large gradients, many small ones in one."""
    small: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for grad in grads:
        if grad is None or not grad.numel():
            continue
        flat, most = real(grad).reshape(-1), _BLOCK.get(grad.device.type, _BLOCK["cuda"])
        if 2 * flat.numel() > most:
            yield from torch.split(flat, most)
            continue
        key = (flat.device, flat.dtype)
        waiting, size = small.get(key, ([], 0))
        if size + flat.numel() > most:
            yield torch.cat(waiting)
            waiting, size = [], 0
        waiting.append(flat)
        small[key] = waiting, size + flat.numel()
    yield from (torch.cat(waiting) for waiting, _ in small.values())


def _coded(block: torch.Tensor) -> torch.Tensor:
    """How many elements have each exponent and first digits, without asking for the largest."""
    dtype, shift, bias = _BITS[block.dtype]
    codes, size = block.abs().view(dtype).bitwise_right_shift_(shift), (2 * bias + 2) * _PARTS
    if block.device.type == "cpu":
        return torch.bincount(codes.short(), minlength=size)  # twice as fast as of int32
    return torch.histc(codes.float(), bins=size, min=0, max=size).double()  # bincount would wait for the largest


def _binned(counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bins' counts out of those of :func:`_coded`."""
    bias = _BITS[dtype][2]
    first, last = (bias + _LOWEST) * _PARTS, (bias + _HIGHEST) * _PARTS
    under, over = counts[:first].sum(), counts[last:].sum()
    return torch.cat([under[None], counts[first:last], over[None]]).double()


@dataclass(frozen=True)
class UnitSquares(Measure):
    """The sum of squares of each unit of the gradients, or of the parameters themselves; see :func:`units`."""

    of: Literal["gradient", "parameter"]
    merge: ClassVar[Merge] = "sum"

    def width(self, shard: Shard | None) -> int:
        """One number for each unit."""
        return 0 if shard is None else units(_part(shard).shape)

    def local(self, local: Local) -> torch.Tensor:
        """What this rank has of each unit, and owns."""
        rows = []
        for shard, grad in zip(local.shards, local.grads, strict=True):
            tensor = grad if self.of == "gradient" else shard.values().detach() if shard.is_owner else None
            rows += _squares(tensor, _part(shard), local.device)
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64, device=local.device)


def units(shape: torch.Size) -> int:
    """How many units a parameter has: its rows, along dimension 0; one if it has no or one dimension.

    >>> units(torch.Size([5, 3, 3])), units(torch.Size([7])), units(torch.Size([]))
    (5, 1, 1)
    """
    return shape[0] if len(shape) > 1 else 1


def pieces(tensor: torch.Tensor, part: Part) -> list[tuple[int, torch.Tensor]]:
    """Views of ``tensor``, the local part, that lie along units: dimension 0 of each counts them from the first one.

    A range of the flattened parameter may begin and end in the middle of a row, so there are up to three.

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


def _squares(tensor: torch.Tensor | None, part: Part, device: torch.device) -> list[torch.Tensor]:
    """The numbers of all units of one parameter, in pieces to be joined; 0 where this rank has nothing."""
    found, at = [], 0
    for first, piece in [] if tensor is None else pieces(tensor, part):
        lengths = onto(_norms(piece), device, torch.float64)
        found += [torch.zeros(first - at, dtype=torch.float64, device=device), lengths.square()]
        at = first + len(lengths)
    return [*found, torch.zeros(units(part.shape) - at, dtype=torch.float64, device=device)]


def _norms(piece: torch.Tensor) -> torch.Tensor:
    if len(piece) == 1:  # a long vector on the CPU, which torch would sum less exactly
        return norms([piece], 2.0)[0][None]
    return row_norms(real(piece).flatten(1))


def _part(shard: Shard) -> Part:
    assert shard.part is not None, f"{shard.name!r}: which elements are here is not known"
    return shard.part


@dataclass(frozen=True)
class MomentSums(Measure):
    """Number n, n mean, sum of squared distances to the mean, n mean²: all of them merge by adding.

    >>> sums = torch.tensor([[2.0, 2.0, 0.0, 2.0], [2.0, 6.0, 0.0, 18.0]])  # of 1, 1 and of 3, 3
    >>> MomentSums().mean_std(sums.sum(0))
    (tensor(2.), tensor(1.))
    """

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"count", "sum", "m2"})

    def width(self, shard: Shard | None) -> int:
        """Four."""
        return 4

    def local(self, local: Local) -> torch.Tensor:
        """The four numbers of each parameter."""
        found = known(local, self.facts)
        count, total = found["count"], found["sum"]
        return torch.stack([count, total, found["m2"], total.square() / count.clamp(min=1)], dim=1).flatten()

    def mean_std(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation (divided by n) from merged numbers; NaN of nothing.

        The variance is that inside the parts plus that of the parts' means (Chan, Golub and LeVeque 1979). Only the
        second is a difference, of float64 numbers as large as the means are, not as the elements' squares.
        """
        count, total, inside, means = values.unbind(-1)
        between = (means - total.square() / count).clamp(min=0)
        return total / count, ((inside + between) / count).sqrt()


@dataclass(frozen=True)
class ExtremeValues(Measure):
    """The largest element, and the largest of the negatives; NaN if any element is."""

    merge: ClassVar[Merge] = "max"
    facts: ClassVar[frozenset[Fact]] = frozenset({"high", "low"})

    def width(self, shard: Shard | None) -> int:
        """Two."""
        return 2

    def local(self, local: Local) -> torch.Tensor:
        """Both for each parameter; minus infinity where it has no elements here."""
        found = known(local, self.facts)
        # See [Note: MAX of integers keeps NaN].
        return to_sortable(torch.stack([found["high"], found["low"]], dim=1).flatten())

    def low_high(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest from merged numbers; NaN of nothing."""
        high, low = from_sortable(values).unbind(-1)
        nothing = (high == -torch.inf) & (low == -torch.inf)
        return torch.where(nothing, torch.nan, -low), torch.where(nothing, torch.nan, high)


@dataclass(frozen=True)
class ZeroCount(Measure):
    """How many elements are exactly zero, and of how many."""

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"count", "zeros"})

    def width(self, shard: Shard | None) -> int:
        """Two."""
        return 2

    def local(self, local: Local) -> torch.Tensor:
        """Both for each parameter."""
        found = known(local, self.facts)
        return torch.stack([found["zeros"], found["count"]], dim=1).flatten()


@register("stat")
@dataclass(frozen=True)
class Moments(Stat):
    """Mean and standard deviation over all elements: ``grad_mean``, ``grad_std``.

    The deviation is that of the elements there are (divided by n, not n - 1). An element that is not finite makes both
    not finite; ``NonFinite`` says which. Parts are merged by the formula of Chan, Golub and LeVeque (1979), so that a
    mean ten thousand times the deviation costs no digits.

    Args:
        per_parameter: also of each parameter, as ``grad_mean/param/<name>`` and so on.

    Raises:
        UsageError: when attached, if a parameter is complex.

    >>> sums = torch.tensor([[2.0, 4.0, 2.0, 8.0]])  # of 1 and 3: n, n mean, squared distances, n mean²
    >>> Moments().numbers([sums])
    {'grad_mean': tensor([2.]), 'grad_std': tensor([1.])}
    """

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Complex numbers have no signed mean here."""
        check_real(self, shards)

    def measures(self) -> tuple[Measure, ...]:
        """Sums that merge."""
        return (MomentSums(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Mean and deviation."""
        mean, std = MomentSums().mean_std(values[0])
        return {"grad_mean": mean, "grad_std": std}


@register("stat")
@dataclass(frozen=True)
class Extremes(Stat):
    """The smallest and the largest element: ``grad_min``, ``grad_max``; not numbers if any element is not.

    Args:
        per_parameter: also of each parameter, as ``grad_min/param/<name>`` and so on.

    Raises:
        UsageError: when attached, if a parameter is complex.

    >>> from disthooks.grads.collectives import to_sortable
    >>> found = Extremes().numbers([to_sortable(torch.tensor([[3.0, 4.0]]))])  # the largest, and of the negatives
    >>> {name: column.tolist() for name, column in found.items()}
    {'grad_min': [-4.0], 'grad_max': [3.0]}
    """

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Complex numbers have no order."""
        check_real(self, shards)

    def measures(self) -> tuple[Measure, ...]:
        """Both as maxima."""
        return (ExtremeValues(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Smallest and largest."""
        low, high = ExtremeValues().low_high(values[0])
        return {"grad_min": low, "grad_max": high}


@register("stat")
@dataclass(frozen=True)
class Zeros(Stat):
    """The share of elements that are exactly zero, from 0 to 1: ``grad_zeros``; of gradients that there are.

    A parameter without a gradient has no elements. Many zeros in half precision tell of underflow, in an embedding of
    rows that the batch did not use.

    Args:
        per_parameter: also of each parameter, as ``grad_zeros/param/<name>``.

    >>> Zeros().numbers([torch.tensor([[1.0, 4.0]])])
    {'grad_zeros': tensor([0.2500])}
    """

    def measures(self) -> tuple[Measure, ...]:
        """Zeros, and elements."""
        return (ZeroCount(),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The share."""
        return {"grad_zeros": values[0][:, 0] / values[0][:, 1]}


@register("stat")
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
    ...     watch.optimizer.step()
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
