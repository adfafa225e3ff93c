"""Read each gradient once for all statistics: count, sum, squares, extremes, zeros, and elements that are not finite.

:func:`scan` finds the facts of a gradient. Measures ask for them by :func:`compute_facts`, which reads nothing again if
another measure needed the same fact.
"""

# [Note: one reading of the gradients]
# Several operations read each gradient, one for each fact. Gradients are cut into blocks that stay in the cache of a
# CPU, so only the first operation waits for memory (decision 59). Small gradients are put side by side, so that one
# operation reads many of them. Rows of 1024 elements are summed in float32 (in float64 if the gradients are float64),
# and the sums of the rows are added in float64: so a long sum loses no digits, and no element is converted. What does
# not fill a row goes into a shorter one, the width of which is a power of two, with zeros behind its end.
# On the CPU the host may look at a result without waiting, so rare cases (an overflow, a cancellation, an element that
# is not finite, a zero) are found there from the sums and the counts, and only then the blocks are read again. On an
# accelerator the host would have to wait, so those cases are always computed.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from disthooks.grads.stats.base import (
    SMALL_ROW,
    CountRows,
    Fact,
    Local,
    LocalStats,
    Merge,
    exact_norms,
    moved,
    onto,
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
    - ``own``: the sum of the squared norms of this rank's own gradients, before the reduction.

    For complex gradients these are facts of the magnitudes.
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
    return Scan({**local.computed_facts, **found}, counts)


def own(local_stats: Sequence[LocalStats], device: torch.device) -> torch.Tensor:
    """For each parameter the sum over this rank's micro-batches of the squared norm of its own gradient, in float64."""
    norms = [onto(norm, device) for entry in local_stats for norm in entry.norms]
    total = torch.zeros(len(local_stats), dtype=torch.float64, device=device)
    if norms:
        places = torch.tensor([place for place, entry in enumerate(local_stats) for _ in entry.norms])
        total.index_add_(0, moved(places, device), torch.stack(norms).double().square())
    return total


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
    parts = _partial_facts(given, names, counting)
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


class _PartialFacts(NamedTuple):
    """The numbers of some gradients: a row for each fact and a column for each gradient; and counts of magnitudes."""

    places: Sequence[int]
    table: torch.Tensor
    counts: torch.Tensor | None


Given = Sequence[tuple[int, torch.Tensor]]  # gradients, each with its place among all of them


def _partial_facts(given: Given, names: list[Fact], counting: CountRows | None) -> list[_PartialFacts]:
    """Read the gradients of each device."""
    parts = []
    for device in dict.fromkeys(grad.device for _, grad in given):
        places, grads = zip(*[(i, grad) for i, grad in given if grad.device == device], strict=True)
        reader = _GradientReader(names, MagnitudeCounter() if counting else None)
        table = reader.table(grads, [counting.of[i] if counting else 0 for i in places])
        counter = reader.counter
        parts.append(
            _PartialFacts(places, table, counter.counts(counting.many, device) if counting and counter else None)
        )
    return parts


class _Block:
    """Rows of equal width that are read together. Behind the end of a row that is shorter are zeros.

    Attributes:
        width: the elements of a row.
        counted_in: the row of :class:`CountRows` that the magnitudes are added to.
        pieces: what the rows are made of: for each piece some full rows of one gradient, or one row that is shorter.
        owners, many, lengths: for each piece the place of the gradient, how many rows it has, and their length.
        room: how many elements may be added.
    """

    def __init__(self, width: int, counted_in: int, room: int) -> None:
        self.width, self.counted_in, self.room, self.pieces = width, counted_in, room, list[torch.Tensor]()
        self.owners, self.many, self.lengths = list[int](), list[int](), list[int]()

    @property
    def padding(self) -> int:
        """How many zeros there are behind rows that are shorter; only rows that are pieces of their own are."""
        return self.width * len(self.lengths) - sum(self.lengths)

    def rows(self, room: Room) -> torch.Tensor:
        """The elements, of shape (rows, width); valid until this is called for another block with the same ``room``."""
        flat = self.pieces
        if flat[0].is_complex():
            flat = [piece.abs() for piece in flat]
        if len(flat) == 1 and self.lengths[0] == self.width:
            return flat[0].view(-1, self.width)
        if self.padding:
            zeros = flat[0].new_zeros(self.width)
            tails = {n: zeros[n:] for n in set(self.lengths)}
            flat = [part for piece, n in zip(flat, self.lengths, strict=True) for part in (piece, tails[n])]
        out = room.of((sum(self.many) * self.width,), flat[0].dtype, "rows") if flat[0].is_cpu else None
        return torch.cat(flat, out=out).view(-1, self.width)


def _blocks(grads: Sequence[torch.Tensor], counted_in: Sequence[int]) -> list[_Block]:
    """Blocks of the elements of ``grads``, which are on one device; ``counted_in`` has a row for each."""
    blocks: list[_Block] = []
    last: dict[tuple[torch.dtype, int, int], _Block] = {}
    most = _block(grads[0].device)

    def put(owner: int, piece: torch.Tensor, size: int, width: int) -> None:
        key = (piece.dtype, width, counted_in[owner])
        rows = -(-size // width)
        block = last.get(key)
        # A long piece is read where it is, and short ones are copied side by side.
        if block is None or block.room < rows * width or size > most // 4:
            block = last[key] = _Block(width, counted_in[owner], most)
            blocks.append(block)
        block.room -= rows * width
        block.pieces.append(piece)
        block.owners.append(owner)
        block.many.append(rows)
        block.lengths.append(min(size, width))

    for owner, grad in enumerate(grads):
        flat, size = _flat(grad), grad.numel()
        whole = size // _ROW * _ROW
        for at in range(0, whole, max(most, _ROW)):
            end = min(at + max(most, _ROW), whole)
            put(owner, flat[at:end], end - at, _ROW)
        if whole < size:
            rest = size - whole
            put(owner, flat[whole:] if whole else flat, rest, 1 << (rest - 1).bit_length())
    return blocks


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """The elements in any order, in one dimension; without a copy if they lie in memory without gaps."""
    if not grad.is_contiguous():
        grad = grad.permute(sorted(range(grad.ndim), key=grad.stride().__getitem__, reverse=True))
    return grad.reshape(-1)


class _GradientReader:
    """Reads gradients of one device, block by block. See [Note: one reading of the gradients].

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
        self._extremes = [name for name in names if name in _LARGEST]
        self._room = Room()

    def table(self, grads: Sequence[torch.Tensor], counted_in: Sequence[int]) -> torch.Tensor:
        """The facts of ``grads``: a row for each fact, a column for each gradient.

        Their magnitudes are counted in the rows ``counted_in``, if there is a counter.
        """
        device, blocks = grads[0].device, _blocks(grads, counted_in)
        per_piece = torch.tensor([part for block in blocks for part in zip(block.owners, block.lengths, strict=True)])
        many = torch.tensor([rows for block in blocks for rows in block.many])
        owners, lengths = torch.repeat_interleave(per_piece, many, dim=0).unbind(1)
        of_row = moved(lengths.double(), device)
        widths = torch.split(of_row, [sum(block.many) for block in blocks])
        parts = [self._read(block, width) for block, width in zip(blocks, widths, strict=True)]
        if not self.names:
            return torch.zeros(0, len(grads), dtype=torch.float64, device=device)
        found = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}
        if device.type == "cpu":
            self._repair(found, blocks)
        if "m2" in self.names:
            found["sum"], found["m2"] = self._moments(blocks, widths, found["sum"], found["squares"].square())
        # The facts that are not a kernel's result as it is. Only those that were asked for are computed.
        rest: dict[str, Callable[[], torch.Tensor]] = {
            "count": lambda: of_row,
            "squares": lambda: found["squares"].square(),
            "zeros": lambda: of_row - found["zeros"],
            "low": lambda: -found["low"],
            "nonfinite": lambda: self._nonfinite(blocks, found["sum" if "sum" in found else "squares"]),
        }
        # The rows of a gradient are put side by side: those of its last row came from another block.
        order = moved(owners.argsort(stable=True), device)
        rows = torch.stack([rest[name]() if name in rest else found[name] for name in self.names])[:, order]
        counts = moved(torch.bincount(owners, minlength=len(grads)), device)
        added = sum(name not in _LARGEST for name in self.names)
        sums = _merge(rows[:added], counts, "sum")
        if "m2" in self.names and len(order) > len(grads):
            # To the rows' own "m2" comes a term for the distances between the means of the rows (decision 53).
            row_sums, width = rows[self.names.index("sum")], of_row[order]
            means = sums[self.names.index("sum")] / _merge(width[None], counts, "sum")[0]
            distances = row_sums / width - torch.repeat_interleave(means, counts, output_size=len(order))
            sums[self.names.index("m2")] += _merge((distances.square() * width)[None], counts, "sum")[0]
        return torch.cat([sums, _merge(rows[added:], counts, "max")])

    def _read(self, block: _Block, widths: torch.Tensor) -> dict[str, torch.Tensor]:
        """The kernels' results for each row. "squares" is a norm here; "zeros" counts elements that are not zero."""
        rows, wanted = self._rows(block), set[str](self.names)
        found: dict[str, torch.Tensor] = {name: kernel(rows) for name, kernel in self._kernels}
        found |= {name: _extreme(rows, widths if block.padding else None, name == "high") for name in self._extremes}
        smallest = None
        if self.counter:
            ends = [found[name].amax() if name == "high" else -found[name].amin() for name in self._extremes]
            largest = max(float(end) for end in ends) if rows.is_cpu and len(ends) == 2 else math.inf
            smallest = self.counter.add(block.counted_in, rows, block.padding, largest)
        if "zeros" in wanted and rows.is_cpu and smallest is not None and not int(smallest):
            found["zeros"] = widths
        if {"abs", "zeros"} & wanted - found.keys():
            sizes = torch.abs(rows, out=self._room.of(rows.shape, rows.dtype, "abs")) if rows.is_cpu else rows.abs()
            if "abs" in wanted:
                found["abs"] = sizes.sum(-1, dtype=None if rows.is_cpu else torch.float64)
            if "zeros" in wanted - found.keys():
                # The bits of a magnitude, read as an integer, are zero only if the magnitude is zero. Integers are
                # counted five times as fast. This overwrites the magnitudes.
                bits = sizes.view(torch.int32 if sizes.dtype == torch.float32 else torch.int64)
                found["zeros"] = bits.clamp_(max=1).sum(-1, dtype=torch.int32)
        return found

    def _rows(self, block: _Block) -> torch.Tensor:
        rows = block.rows(self._room)
        dtype = wide(rows.dtype)
        if not rows.is_cpu or rows.dtype == dtype:
            return rows.to(dtype)
        return self._room.of(rows.shape, dtype, "wide").copy_(rows)

    def _again(self, blocks: Sequence[_Block], doubt: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read the rows in ``doubt``, a bool for each row of all blocks: for each block their places and elements."""
        if doubt.is_cpu and not bool(doubt.any()):
            return
        at = 0
        for block, here in zip(blocks, torch.split(doubt, [sum(block.many) for block in blocks]), strict=True):
            if not doubt.is_cpu:
                yield torch.arange(at, at + len(here), device=doubt.device), self._rows(block)
            elif bool(here.any()):
                yield at + here.nonzero()[:, 0], self._rows(block)[here]
            at += len(here)

    def _repair(self, found: Mapping[str, torch.Tensor], blocks: Sequence[_Block]) -> None:
        """Replace the numbers of rows for which float32 was too narrow, in place. This is for the CPU.

        There the host may look: a sum that is not finite is summed again in float64, and so is a norm that is very
        small.
        """
        for name in found.keys() & {"sum", "abs", "squares"}:
            for places, rows in self._again(blocks, _doubt(name, found[name])):
                found[name][places] = _exactly(name, rows)

    def _moments(
        self, blocks: Sequence[_Block], widths: Sequence[torch.Tensor], sums: torch.Tensor, squares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row the sum of its elements, and the sum of their squared distances to their mean ("m2").

        "m2" is the sum of squares minus the squared sum divided by the width, if that difference cancels few digits.
        If it cancels more, the row is read again: a number near its mean is subtracted from the elements, which float32
        does almost without rounding, and "m2" is computed from the differences. On an accelerator all rows are read
        again, because the host would have to wait for the test.
        """
        width = torch.cat(list(widths))
        between = sums.square() / width
        again, m2 = sums.clone(), (squares - between).clamp(min=0)
        # See [Note: one reading of the gradients].
        for places, rows in self._again(blocks, between > squares / 2):
            of = width[places]
            near = (sums[places] / of).to(rows.dtype).nan_to_num(0.0, 0.0, 0.0)
            left = _filled(rows - near.unsqueeze(-1), of, 0.0)
            rest, distances = left.sum(-1).double(), _norms(left).double()
            if left.is_cpu:
                for name, numbers in (("sum", rest), ("squares", distances)):
                    if bool((doubt := _doubt(name, numbers)).any()):
                        numbers[doubt] = _exactly(name, left[doubt])
            again[places] = near.double() * of + rest
            m2[places] = (distances.square() - rest.square() / of).clamp(min=0)
        return again, m2

    def _nonfinite(self, blocks: Sequence[_Block], sums: torch.Tensor) -> torch.Tensor:
        """How many elements of each row are not finite; none in a row whose sum (or norm) is finite."""
        found = torch.zeros_like(sums)
        for places, rows in self._again(blocks, ~sums.isfinite()):
            found[places] = (~torch.isfinite(rows)).sum(-1).double()
        return found


def _block(device: torch.device) -> int:
    return _BLOCK.get(device.type, _BLOCK["cuda"])


def _merge(rows: torch.Tensor, counts: torch.Tensor, how: Merge) -> torch.Tensor:
    """The sum, or the largest, of each gradient's numbers, which are ``counts`` columns one after the other."""
    merged: torch.Tensor = torch.segment_reduce(rows.T.contiguous(), how, lengths=counts, axis=0, unsafe=True)
    return merged.T


def _norms(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=rows.dtype if rows.is_cpu else torch.float64)
    return norm


def _filled(rows: torch.Tensor, widths: torch.Tensor, value: float) -> torch.Tensor:
    """``rows`` with ``value`` in place of the zeros behind the first ``widths`` elements of each."""
    return rows.masked_fill(torch.arange(rows.shape[-1], device=rows.device) >= widths[:, None], value)


def _extreme(rows: torch.Tensor, widths: torch.Tensor | None, largest: bool) -> torch.Tensor:
    """The largest or the smallest among the first ``widths`` elements of each row; None for all."""
    nothing = _NOTHING["high"] if largest else -_NOTHING["low"]
    if widths is not None and not rows.is_cpu:
        rows = _filled(rows, widths, nothing)
    found = rows.amax(-1) if largest else rows.amin(-1)
    if widths is not None and rows.is_cpu and bool((doubt := found == 0).any()):
        again = _filled(rows[doubt], widths[doubt], nothing)  # it may be one of the zeros behind the end
        found[doubt] = again.amax(-1) if largest else again.amin(-1)
    return found


def _doubt(name: str, found: torch.Tensor) -> torch.Tensor:
    """Which sums or norms of rows float32 was perhaps too narrow for."""
    doubt = ~torch.isfinite(found)
    return doubt | (found < SMALL_ROW) if name == "squares" else doubt


def _exactly(name: str, rows: torch.Tensor) -> torch.Tensor:
    """The sum, the sum of the magnitudes ("abs"), or the norm ("squares") of each of ``rows``, in float64."""
    if name == "squares":
        return exact_norms(rows)
    return (rows if name == "sum" else rows.abs()).double().sum(-1)
