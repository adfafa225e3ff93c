"""Read each gradient once for all statistics: count, sum, squares, extremes, zeros, and elements that are not finite.

:func:`scan` finds the facts of a gradient. Measures ask for them by :func:`compute_facts`, which reads nothing again if
another measure needed the same fact. The second half of the file has the measures of elements that are not finite.
"""

# [Note: one reading of the gradients]
# On a GPU one Triton kernel reads each gradient once for all facts and for the histogram (kernels.py). The rest of this
# note is about torch operations, which read gradients on the CPU, in float64, or where Triton does not work.
# Several operations read each gradient, one for each fact. Gradients are cut into blocks that stay in the cache of a
# CPU, so only the first operation waits for memory (decision 59). Small gradients of one size are put side by side, so
# one operation reads many of them. Rows of 1024 elements are summed in float32 (in float64 if the gradients are
# float64), and the sums of the rows are added in float64: so a long sum loses no digits, and no element is converted.
# On the CPU the host may look at a result without waiting, so rare cases (an overflow, a cancellation, an element that
# is not finite, a zero) are found there from the sums and the counts, and only then the blocks are read again. On an
# accelerator the host would have to wait, so those cases are always computed.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from disthooks.engines.base import Shard
from disthooks.grads.stats import fused
from disthooks.grads.stats.base import (
    SMALL_ROW,
    CountRows,
    Fact,
    Local,
    LocalFact,
    LocalStats,
    Measure,
    Merge,
    Per,
    exact_norms,
    moved,
    onto,
    real,
    stack,
    take,
    wide,
)
from disthooks.grads.stats.magnitudes import BINS, MagnitudeCounter, Room

Facts = frozenset[Fact]

_ROW = 1024
_BLOCK = {"cpu": 2**19, "cuda": 2**24}  # elements of a block; on the CPU 2 MiB of float32
# The facts of one row, in the order of the rows of a table. Facts that are sums come first. "high" is the maximum of g
# and "low" is the maximum of -g, so both are merged by a maximum.
_ORDER: tuple[Fact, ...] = ("count", "sum", "m2", "squares", "abs", "zeros", "nonfinite", "high", "low")
_LARGEST: Facts = frozenset({"high", "low"})
_NOTHING = {"high": float("-inf"), "low": float("-inf")}  # the facts of no elements; those not named here are 0


def compute_facts(local: Local, facts: Facts) -> Mapping[Fact, torch.Tensor]:
    """The ``facts`` of every parameter. Facts that ``local`` does not have yet are computed.

    Each fact is a float64 vector on ``local.device`` with one number for each parameter:

    - ``count``: the number of elements of the final gradient on this rank;
    - ``sum`` and ``m2``: their sum, and the sum of their squared distances to their mean;
    - ``squares`` and ``abs``: the sum of their squares, and the sum of their magnitudes;
    - ``zeros`` and ``nonfinite``: how many elements are zero, and how many are infinite or NaN;
    - ``high`` and ``low``: the largest element, and the largest of the negated elements; minus infinity if there are no
      elements;
    - ``own``: the sum of the squared norms of this rank's own gradients, before the reduction;
    - ``dot``, ``accumulated`` and ``final``: three inner products: of this rank's own accumulated gradient with the
      final gradient, of the accumulated gradient with itself, and of the final gradient with itself.

    For complex gradients these are facts of the magnitudes; the inner products are of the real and imaginary parts.
    """
    return compute(local, facts).facts


def compute(local: Local, facts: Facts, counting: CountRows | None = None) -> Scan:
    """The facts of :func:`compute_facts`, and the counts of magnitudes that the same reading makes."""
    missing = facts - local.computed_facts.keys()
    final = missing & set(_ORDER)
    none: Scan = Scan({}, torch.zeros(0, BINS, dtype=torch.float64, device=local.device))
    found, counts = scan(local.grads, final, local.device, counting) if final or counting else none
    if "own" in missing:
        found["own"] = own(local.local_stats, local.device)
    if missing & {"dot", "accumulated", "final"}:
        found |= zip(("dot", "accumulated", "final"), products(local), strict=True)
    return Scan({**local.computed_facts, **found}, counts)


def own(local_stats: Sequence[LocalStats], device: torch.device) -> torch.Tensor:
    """For each parameter the sum over this rank's micro-batches of the squared norm of its own gradient, in float64."""
    norms = [onto(norm, device) for entry in local_stats for norm in entry.norms]
    total = torch.zeros(len(local_stats), dtype=torch.float64, device=device)
    if norms:
        places = torch.tensor([place for place, entry in enumerate(local_stats) for _ in entry.norms])
        total.index_add_(0, moved(places, device), torch.stack(norms).double().square())
    return total


def products(local: Local) -> torch.Tensor:
    """The facts ``dot``, ``accumulated`` and ``final`` of each parameter: a float64 tensor of shape (3, parameters).

    The numbers are 0 for a parameter whose own gradient was not accumulated, or that has no final gradient.
    """
    zero = torch.zeros(3, dtype=torch.float64, device=local.device)
    found = []
    for shard, stats in zip(local.shards, local.local_stats, strict=True):
        if stats.accumulated is None or (gradient := shard.gradient()) is None:
            found.append(zero)
            continue
        both = (stats.accumulated, gradient)
        own, final = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in both)
        total = torch.zeros(3, dtype=torch.float64, device=final.device)
        most = _block(final.device)  # so that one block at a time is converted to float64
        for x, y in zip(torch.split(own.reshape(-1), most), torch.split(final.reshape(-1), most), strict=True):
            a, b = x.to(final.device).double(), y.double()
            total += torch.stack([a.dot(b), a.dot(a), b.dot(b)])
        found.append(total.to(local.device))
    return torch.stack(found, dim=1) if found else zero[:, None][:, :0]


class Scan(NamedTuple):
    """The numbers that one reading of gradients has found.

    Attributes:
        facts: for each fact a float64 vector with one number for each gradient.
        counts: for each row of :class:`CountRows` how many elements are in each bin, float64; no rows if nothing was
            to be counted.
    """

    facts: dict[Fact, torch.Tensor]
    counts: torch.Tensor


def scan(
    grads: Sequence[torch.Tensor | None], facts: Facts, device: torch.device, counting: CountRows | None = None
) -> Scan:
    """Read ``grads`` for the ``facts`` of each, and count magnitudes in the rows of ``counting``.

    A gradient that is None or has no elements gets the facts of no elements: 0, and minus infinity for "high" and
    "low". The results are on ``device``. See [Note: one reading of the gradients].

    >>> found = scan([torch.tensor([3.0, -4.0]), None], frozenset({"sum", "abs", "high"}), torch.device("cpu")).facts
    >>> {fact: values.tolist() for fact, values in found.items()}
    {'sum': [-1.0, 0.0], 'abs': [7.0, 0.0], 'high': [3.0, -inf]}
    """
    # "m2" of a gradient needs the sums of its rows, also if nobody asked for "sum".
    names = [fact for fact in _ORDER if fact in facts or (fact == "sum" and "m2" in facts)]
    given = [(i, grad) for i, grad in enumerate(grads) if grad is not None and grad.numel()]
    fit = [fused.usable(grad) for _, grad in given]
    parts = _by_kernels([pair for pair, fits in zip(given, fit, strict=True) if fits], names, counting)
    parts += _by_operations([pair for pair, fits in zip(given, fit, strict=True) if not fits], names, counting)
    # The last column has the facts of no elements; gradients that were not read take it.
    nothing = torch.tensor([[_NOTHING.get(fact, 0.0) for fact in names]], dtype=torch.float64).T
    order = [i for part in parts for i in part.places]
    place = {i: at for at, i in enumerate(order)}
    table = torch.cat([*(onto(part.table, device) for part in parts), moved(nothing, device)], dim=1)
    picked = take(table, [place.get(i, len(order)) for i in range(len(grads))])
    counts = torch.zeros(counting.many if counting else 0, BINS, dtype=torch.float64, device=device)
    for part in parts:
        if part.counts is not None:
            counts += onto(part.counts, device)
    return Scan(dict(zip(names, picked, strict=True)), counts)


class _Part(NamedTuple):
    """The numbers of some gradients: a row for each fact and a column for each gradient; and counts of magnitudes."""

    places: Sequence[int]
    table: torch.Tensor
    counts: torch.Tensor | None


Given = Sequence[tuple[int, torch.Tensor]]  # gradients, each with its place among all of them


def _by_kernels(given: Given, names: Sequence[Fact], counting: CountRows | None) -> list[_Part]:
    """Read gradients that the kernels take: one reading for all facts and counts, in a few launches."""
    parts = []
    for device in dict.fromkeys(grad.device for _, grad in given):
        places, grads = zip(*[(i, grad) for i, grad in given if grad.device == device], strict=True)
        rows = counting and CountRows([counting.of[i] for i in places], counting.many)
        facts, counts = fused.read(grads, rows)
        columns = dict(zip(fused.FACTS, facts, strict=True))
        if "count" in names:
            sizes = torch.tensor([grad.numel() for grad in grads], dtype=torch.float64)
            columns["count"] = moved(sizes, device)
        parts.append(_Part(places, torch.stack([columns[name] for name in names]) if names else facts[:0], counts))
    return parts


def _by_operations(given: Given, names: list[Fact], counting: CountRows | None) -> list[_Part]:
    """Read gradients by torch operations. As many of one size as fit into one block are read together."""
    counter = MagnitudeCounter() if counting else None
    reader, parts = _Reader(names, counter), list[_Part]()
    groups: dict[tuple[torch.device, torch.dtype, int, int], list[tuple[int, torch.Tensor]]] = {}
    for i, grad in given:
        row = counting.of[i] if counting else 0
        groups.setdefault((grad.device, grad.dtype, grad.numel(), row), []).append((i, grad))
    for (device, _, size, row), members in groups.items():
        many = max(1, _block(device) // size)
        for at in range(0, len(members), many):
            places, grads = zip(*members[at : at + many], strict=True)
            parts.append(_Part(places, reader.table(grads, row), None))
    if counting and counter:
        for device in dict.fromkeys(grad.device for _, grad in given):
            none = torch.zeros(len(names), 0, dtype=torch.float64, device=device)
            parts.append(_Part((), none, counter.counts(counting.many, device)))
    return parts


class _Reader:
    """Reads gradients of one size, block by block. See [Note: one reading of the gradients].

    Kernels read the blocks and give numbers for each row. The facts of a gradient are made of the facts of its rows.
    """

    def __init__(self, names: list[Fact], counter: MagnitudeCounter | None) -> None:
        self.names, self.counter, wanted = names, counter, set(names)
        # For each kernel the facts that need it, the name of its result, and the function.
        # Norms tell as well as sums whether all elements are finite.
        of_sums: set[Fact] = {"sum", "m2"} if "squares" in wanted else {"sum", "m2", "nonfinite"}
        kernels: list[tuple[set[Fact], Fact, Callable[[torch.Tensor], torch.Tensor]]] = [
            (of_sums, "sum", lambda rows: rows.sum(-1)),
            ({"squares", "m2"}, "squares", _norms),
        ]
        self._kernels = [(name, kernel) for needed_by, name, kernel in kernels if needed_by & wanted]
        self._extremes = wanted & _LARGEST
        self._room = Room()

    def table(self, grads: Sequence[torch.Tensor], row: int) -> torch.Tensor:
        """The facts of ``grads``, which have the same size: a row for each fact, a column for each gradient.

        Their magnitudes are counted in ``row``, if there is a counter.
        """
        blocks = self._blocks(grads)
        # Rows have 1024 elements, and the last one has the rest.
        size, many = grads[0].numel(), -(-grads[0].numel() // _ROW)
        widths = torch.full((many,), _ROW, dtype=torch.float64, device=grads[0].device)
        widths[-1:].fill_(size - _ROW * (many - 1))
        parts = [self._read(block, row) for block in blocks]
        if not self.names:
            return torch.zeros(0, len(grads), dtype=torch.float64, device=widths.device)
        found = {name: torch.cat([part[name] for part in parts], dim=1).double() for name in parts[0]}
        if widths.is_cpu:
            for name in ("sum", "abs", "squares"):
                if name in found:
                    _repair(name, found[name], blocks)
        if "m2" in self.names:
            found["sum"], m2 = _moments(blocks, found["sum"], found["squares"].square(), widths)
        # The facts that are not a kernel's result as it is. Only those that were asked for are computed.
        rest: dict[str, Callable[[], torch.Tensor]] = {
            "count": lambda: widths.expand(len(grads), many),
            "m2": lambda: m2,
            "squares": lambda: found["squares"].square(),
            "zeros": lambda: widths - found["zeros"],
            "low": lambda: -found["low"],
            "nonfinite": lambda: _nonfinite(blocks, found["sum" if "sum" in found else "squares"]),
        }
        rows = torch.stack([rest[name]() if name in rest else found[name] for name in self.names])
        # The facts of a gradient from those of its rows: sums are added, and of extremes the largest counts.
        added = sum(name not in _LARGEST for name in self.names)
        sums, extremes = rows[:added].sum(-1), rows[added:].amax(-1)
        if "m2" in self.names and many > 1:
            # To the rows' own "m2" comes a term for the distances between the means of the rows (decision 53).
            row_sums = rows[self.names.index("sum")]
            distances = row_sums / widths - row_sums.sum(-1, keepdim=True) / widths.sum()
            sums[self.names.index("m2")] += (distances.square() * widths).sum(-1)
        return torch.cat([sums, extremes])

    def _blocks(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of shape (gradients, rows, 1024); the last view has the elements that do not fill a row."""
        flat = [real(grad).reshape(-1) for grad in grads]
        if len(flat) == 1:
            together = flat[0][None]
        elif flat[0].is_cpu:
            together = torch.stack(flat, out=self._room.of((len(flat), len(flat[0])), flat[0].dtype, "stack"))
        else:
            together = torch.stack(flat)
        size, most = together.shape[1], _block(together.device)
        body = size // _ROW * _ROW
        step = max(_ROW, most // len(flat) // _ROW * _ROW)
        blocks = [together[:, at : min(at + step, body)].view(len(flat), -1, _ROW) for at in range(0, body, step)]
        return blocks + ([together[:, None, body:]] if body < size else [])

    def _read(self, block: torch.Tensor, row: int) -> dict[str, torch.Tensor]:
        """The kernels' results for each row. "squares" is a norm here; "zeros" counts elements that are not zero."""
        rows = self._widened(block)
        found: dict[str, torch.Tensor] = {name: kernel(rows) for name, kernel in self._kernels}
        found |= {name: rows.amax(-1) if name == "high" else rows.amin(-1) for name in self._extremes}
        if "abs" in self.names:
            found["abs"] = self._sizes(rows).sum(-1, dtype=None if rows.is_cpu else torch.float64)
        smallest = None
        if self.counter is not None:
            # The bits of bfloat16 are counted as they are. Other halves are exact in float32.
            smallest = self.counter.add(row, block if block.dtype == torch.bfloat16 else rows)[0]
        if "zeros" in self.names:
            found["zeros"] = self._nonzeros(rows, smallest)
        return found

    def _nonzeros(self, rows: torch.Tensor, smallest: torch.Tensor | None) -> torch.Tensor:
        """How many elements of each row are not zero. ``smallest`` are those with the code of zero, if known."""
        if smallest is not None and smallest.is_cpu and not int(smallest):
            return torch.full(rows.shape[:-1], rows.shape[-1], dtype=torch.int32)
        # The bits of a magnitude, read as an integer, are zero only if the magnitude is zero. Integers are counted five
        # times as fast. This overwrites the magnitudes.
        sizes = self._sizes(rows)
        bits = sizes.view(torch.int32 if sizes.dtype == torch.float32 else torch.int64)
        return bits.clamp_(max=1).sum(-1, dtype=torch.int32)

    def _sizes(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.abs(rows, out=self._room.of(rows.shape, rows.dtype, "abs")) if rows.is_cpu else rows.abs()

    def _widened(self, block: torch.Tensor) -> torch.Tensor:
        dtype = wide(block.dtype)
        if not block.is_cpu or block.dtype == dtype:
            return block.to(dtype)
        return self._room.of(block.shape, dtype, "wide").copy_(block)


def _block(device: torch.device) -> int:
    return _BLOCK.get(device.type, _BLOCK["cuda"])


def _norms(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=rows.dtype if rows.is_cpu else torch.float64)
    return norm


def _repair(name: str, found: torch.Tensor, blocks: list[torch.Tensor]) -> None:
    """Replace the numbers of rows for which float32 was too narrow, in place. This is for the CPU.

    There the host may look: a sum that is not finite is summed again in float64, and so is a norm that is very small.
    """
    doubt = ~torch.isfinite(found)
    if name == "squares":
        doubt |= found < SMALL_ROW
    if not bool(doubt.any()):
        return
    at = 0
    for block in blocks:
        here, at = (slice(None), slice(at, at + block.shape[1])), at + block.shape[1]
        if not bool(doubt[here].any()):
            continue
        rows = block[doubt[here]]
        if name == "squares":
            found[here][doubt[here]] = exact_norms(rows)
        else:
            found[here][doubt[here]] = (rows if name == "sum" else rows.abs()).double().sum(-1)


def _moments(
    blocks: list[torch.Tensor], sums: torch.Tensor, squares: torch.Tensor, widths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row the sum of its elements, and the sum of their squared distances to their mean ("m2").

    "m2" is the sum of squares minus the squared sum divided by the width, if that difference cancels few digits. If it
    cancels more, every row is read again: a number near the row's mean is subtracted from the elements, which float32
    does almost without rounding, and "m2" is computed from the differences. On an accelerator the rows are always read
    again, because the host would have to wait for the test.
    """
    between = sums.square() / widths
    # See [Note: one reading of the gradients].
    if sums.device.type == "cpu" and not bool((between > squares / 2).any()):
        return sums, (squares - between).clamp(min=0)
    found, at = [], 0
    for block in blocks:
        rows, width = block.to(wide(block.dtype)), block.shape[-1]
        near = (sums[:, at : at + rows.shape[1]] / width).to(rows.dtype).nan_to_num(0.0, 0.0, 0.0)
        left, at = rows - near.unsqueeze(-1), at + rows.shape[1]
        rest, distances = left.sum(-1).double(), _norms(left).double()
        if left.is_cpu:
            _repair("sum", rest, [left])
            _repair("squares", distances, [left])
        inside = distances.square() - rest.square() / width
        found.append(torch.stack([near.double() * width + rest, inside.clamp(min=0)]))
    again, m2 = torch.cat(found, dim=2)
    return again, m2


def _nonfinite(blocks: list[torch.Tensor], sums: torch.Tensor) -> torch.Tensor:
    """How many elements of each row are not finite. On the CPU nothing is counted if all sums (or norms) are finite.

    See [Note: one reading of the gradients].
    """
    if sums.device.type == "cpu" and bool(sums.isfinite().all()):
        return torch.zeros_like(sums)
    return torch.cat([(~torch.isfinite(block)).sum(-1) for block in blocks], dim=1).double()


# [Note: ranks as bits]
# Every step tells which ranks had an own gradient that was not finite (decision 92). Each rank adds a bit of its own to
# one float64 for each parameter, and the SUM over the ranks loses none of these bits, because they are all different.
# The mantissa of a float64 holds 52 bits and one that is not stored. With more than 52 ranks the number has instead,
# above a shift, how many ranks there are, and below it the sum of their places. So it tells the rank if there is one,
# and that it was all ranks, but not which ones if there are several. The bytes do not grow with the world size.

#: The largest world in which each rank has a bit of its own. See [Note: ranks as bits].
_BITS = 52


@dataclass(frozen=True)
class NonFiniteCount(Measure):
    """How many elements of each parameter's final gradient are infinite or NaN."""

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"nonfinite"})

    def local(self, local: Local) -> torch.Tensor:
        found = compute_facts(local, self.facts)["nonfinite"]
        if all(other is None for other in local.unreduced):
            return found
        # Gradients that no engine reduces are counted on each rank that has them.
        return found + stack(local.unreduced, lambda grads: [(~torch.isfinite(g)).sum() for g in grads], local.device)


@dataclass(frozen=True)
class FirstToFail(Measure):
    """The first rank whose own gradient of a parameter was not finite: world size minus its place; 0 if there is none.

    The first place gives the largest number, so a MAX over the ranks finds it.
    """

    merge: ClassVar[Merge] = "max"
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        return own_nonfinite(local).long() * (local.world - local.position)


@dataclass(frozen=True)
class OwnNonFinite(Measure):
    """Which ranks had an own gradient that was not finite, in one number for each parameter.

    :func:`ranks_in` reads the ranks from the merged number. See [Note: ranks as bits].
    """

    merge: ClassVar[Merge] = "sum"
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        return own_nonfinite(local).double() * _mark(local.position, local.world)


# [Note: the rank that leads]
# A step that is not logged makes one SUM and no MAX (decision 92), so it has no key that tells the largest rank. Three
# sums tell it if it is the largest by far: of each rank's squared norm n and its place p, the sums of n, n·p and n·p².
# They give the mean and the variance of the place, weighted by squared norms. By Chebyshev's inequality at most 0.4 of
# the weight is further than 0.5 from the mean if the variance is below 0.1. Then more than half of the weight is at one
# place, the integer next to the mean. If several ranks have similar norms, no rank leads.

_LEADS = 0.1


@dataclass(frozen=True)
class OwnLead(Measure):
    """Three sums that tell which rank's own gradients are the largest by far. See [Note: the rank that leads].

    :func:`leader` reads the rank from the merged sums.
    """

    merge: ClassVar[Merge] = "sum"
    per: ClassVar[Per] = "scope"
    facts: ClassVar[frozenset[Fact]] = frozenset({"own"})
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"lead"})

    def width(self, shard: Shard | None) -> int:
        return 3

    def local(self, local: Local) -> torch.Tensor:
        if local.world == 1:
            return torch.zeros(3 * len(local.scopes), dtype=torch.float64, device=local.device)
        own = compute_facts(local, self.facts)["own"]
        total = torch.stack([take(own, places).sum() for places in local.scopes])
        return torch.stack([total, total * local.position, total * local.position**2], dim=1).flatten()


def leader(sums: Sequence[float], ranks: Sequence[int]) -> int | None:
    """The global rank that leads by the three sums of one scope, merged over ``ranks``; None if no rank does.

    >>> leader([1 + 400, 1 * 0 + 400 * 3, 1 * 0 + 400 * 9], range(10, 14)), leader([2, 1, 1], range(2))
    (13, None)
    """
    total, first, second = sums
    if not 0 < total < float("inf"):
        return None
    mean = first / total
    return ranks[round(mean)] if second / total - mean**2 < _LEADS else None


def ranks_in(mark: float, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The global ranks that a merged number of :class:`OwnNonFinite` stands for; None if it does not tell them.

    Args:
        mark: the number of one parameter, summed over the ranks.
        ranks: the global ranks that take part, in the order of their places.

    See [Note: ranks as bits].

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
    """For each parameter whether one of this rank's own gradients was not finite: a bool vector on ``local.device``."""
    found = [(i, probe) for i, stats in enumerate(local.local_stats) for probe in stats.norms or stats.finite_probes]
    if not found:
        return torch.zeros(len(local.local_stats), dtype=torch.bool, device=local.device)
    values = [onto(value, local.device) for _, value in found]
    if len({value.dtype for value in values}) > 1:
        values = [value.double() for value in values]
    bad, places = ~torch.isfinite(torch.stack(values)), [place for place, _ in found]
    if places == list(
        range(len(local.local_stats))
    ):  # one micro-batch, and each parameter has a gradient: the usual case
        return bad
    counts = torch.zeros(len(local.local_stats), dtype=torch.int64, device=local.device)
    return counts.index_add_(0, moved(torch.tensor(places), local.device), bad.long()) > 0


def _mark(place: int, world: int) -> float:
    """The number that the rank at ``place`` adds. See [Note: ranks as bits]."""
    return float(1 << place if world <= _BITS else (1 << _shift(world)) + place)


def _shift(world: int) -> int:
    """The number of bits for the sum of places, which is below ``2 ** _shift(world)`` even if all ranks are added."""
    return 2 * world.bit_length()


def finite_probe(grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A scalar tensor that is finite only if all elements of ``grad`` are finite; none if the host knows that they are.

    On an accelerator it is the largest magnitude. On the CPU it is the sum of the elements, which is found a hundred
    times as fast. The sum of finite elements can overflow, so on the CPU the elements are looked at if the sum is not
    finite.
    """
    if not grad.numel():
        return ()
    if not grad.is_cpu:
        return (torch.linalg.vector_norm(grad, torch.inf, dtype=wide(grad.dtype)),)
    total = grad.sum(dtype=None if grad.is_complex() else wide(grad.dtype))
    is_finite = math.isfinite(abs(total.item())) or bool(torch.isfinite(grad).all())
    return () if is_finite else (torch.full((), torch.nan),)
