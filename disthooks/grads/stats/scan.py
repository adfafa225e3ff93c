"""Read each gradient once for all statistics: count, sum, squares, extremes, zeros, and elements that are not finite.

Gradients are read in blocks that stay in the cache of a CPU, so that only the first of several kernels waits for
memory. Small gradients of one size are put side by side, so that one kernel reads many of them. Rows of 1024 elements
are summed in float32 (float64 for float64 gradients), and the sums of rows in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks.grads.stats.base import (
    Fact,
    Local,
    LocalFact,
    LocalStats,
    Measure,
    Merge,
    moved,
    onto,
    real,
    row_norms,
    stack,
    take,
    wide,
)

Facts = frozenset[Fact]

_ROW = 1024
_BLOCK = {"cpu": 2**19, "cuda": 2**24}  # elements; on the CPU 2 MiB of float32
# Of one row, in the order of a table. "high" and "low" are merged as maxima, of g and of -g.
_ORDER: tuple[Fact, ...] = ("count", "sum", "m2", "squares", "abs", "zeros", "nonfinite", "high", "low")
_LARGEST: Facts = frozenset({"high", "low"})
_NOTHING = {"high": float("-inf"), "low": float("-inf")}


def known(local: Local, facts: Facts) -> Mapping[Fact, torch.Tensor]:
    """``facts`` of every parameter: what ``local`` has of them, and the others found now.

    ``count`` elements, their ``sum`` and the sum of their squared distances to their mean, ``m2``; the sums of
    ``squares`` and of magnitudes, ``abs``; how many are ``zeros`` or ``nonfinite``; the largest, ``high``, and the
    largest of their negatives, ``low``: minus infinity where there are none. ``own`` is the sum of the squared norms
    of what this rank saw before the reduction; ``dot``, ``kept`` and ``final`` are the inner products of what it kept
    of that with the final gradient, and of both with themselves. Of complex gradients they are those of the magnitudes.
    """
    missing = facts - local.known.keys()
    final = missing & set(_ORDER)
    found = scan(local.grads, final, local.device) if final else {}
    if "own" in missing:
        found["own"] = own(local.seen, local.device)
    if missing & {"dot", "accumulated", "final"}:
        found |= zip(("dot", "accumulated", "final"), products(local), strict=True)
    return {**local.known, **found}


def own(seen: Sequence[LocalStats], device: torch.device) -> torch.Tensor:
    """For each parameter the sum over micro-batches of the squared norms, in float64."""
    flat = [onto(norm, device) for entry in seen for norm in entry.norms]
    total = torch.zeros(len(seen), dtype=torch.float64, device=device)
    if flat:
        places = torch.tensor([place for place, entry in enumerate(seen) for _ in entry.norms])
        total.index_add_(0, moved(places, device), torch.stack(flat).double().square())
    return total


def products(local: Local) -> torch.Tensor:
    """Three inner products for each parameter, in float64; zeros where nothing was kept."""
    zero = torch.zeros(3, dtype=torch.float64, device=local.device)
    found = [
        zero
        if seen.accumulated is None or (final := shard.gradient()) is None
        else _dots(seen.accumulated, final).to(local.device)
        for shard, seen in zip(local.shards, local.seen, strict=True)
    ]
    return torch.stack(found, dim=1) if found else zero[:, None][:, :0]


def _dots(kept: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
    kept, final = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (kept, final))
    most = _block(final.device)
    pairs = zip(torch.split(kept.reshape(-1), most), torch.split(final.reshape(-1), most), strict=True)
    total = torch.zeros(3, dtype=torch.float64, device=final.device)
    for one, other in pairs:
        a, b = one.to(final.device).double(), other.double()
        total += torch.stack([a.dot(b), a.dot(a), b.dot(b)])
    return total


def scan(grads: Sequence[torch.Tensor | None], facts: Facts, device: torch.device) -> dict[Fact, torch.Tensor]:
    """``facts`` of every gradient, in float64; of one that is not there or has no elements those of nothing.

    >>> found = scan([torch.tensor([3.0, -4.0]), None], frozenset({"sum", "abs", "high"}), torch.device("cpu"))
    >>> {fact: values.tolist() for fact, values in found.items()}
    {'sum': [-1.0, 0.0], 'abs': [7.0, 0.0], 'high': [3.0, -inf]}
    """
    names = [fact for fact in _ORDER if fact in facts or (fact == "sum" and "m2" in facts)]
    reader, tables, order = _Reader(names), [], []
    for places in _alike(grads):
        tables.append(onto(reader.table([grads[i] for i in places]), device))  # type: ignore[misc]
        order += places
    nothing = torch.tensor([[_NOTHING.get(fact, 0.0)] for fact in names], dtype=torch.float64)
    place = {i: at for at, i in enumerate(order)}
    table = torch.cat([*tables, moved(nothing, device)], dim=1)
    picked = take(table, [place.get(i, len(order)) for i in range(len(grads))])
    return dict(zip(names, picked, strict=True))


def _alike(grads: Sequence[torch.Tensor | None]) -> Iterator[list[int]]:
    """The gradients that have elements, in groups of one device, dtype and size that fit into a block together."""
    groups: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    for i, grad in enumerate(grads):
        if grad is not None and (size := grad.numel()):
            groups.setdefault((grad.device, grad.dtype, size), []).append(i)
    for (device, _, size), places in groups.items():
        many = max(1, _block(device) // size)
        yield from (places[at : at + many] for at in range(0, len(places), many))


class _Reader:
    """Reads gradients of one size, block by block; what is not a sum over elements is made of the rows' numbers."""

    def __init__(self, names: list[Fact]) -> None:
        self.names, wanted = names, set(names)
        kernels: list[tuple[set[Fact], Fact, Callable[[torch.Tensor], torch.Tensor]]] = [
            ({"sum", "m2", "nonfinite"}, "sum", _row_sums),
            ({"squares", "m2"}, "squares", row_norms),
            ({"high"}, "high", lambda rows: rows.amax(-1)),
            ({"low"}, "low", lambda rows: rows.amin(-1)),
        ]
        self._kernels = [(name, kernel) for needed_by, name, kernel in kernels if needed_by & wanted]
        self._sizes = bool({"abs", "zeros"} & wanted)
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def table(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """A row for each fact, a column for each gradient."""
        blocks = self._blocks(grads)
        size, many = grads[0].numel(), -(-grads[0].numel() // _ROW)
        widths = torch.full((many,), _ROW, dtype=torch.float64, device=grads[0].device)
        widths[-1:].fill_(size - _ROW * (many - 1))
        parts = [self._read(block.to(wide(block.dtype))) for block in blocks]
        found = {name: torch.cat([part[name] for part in parts], dim=1).double() for name in parts[0]}
        if "m2" in self.names:
            found["sum"], m2 = _moments(blocks, found["sum"], found["squares"].square(), widths)
        rest: dict[str, Callable[[], torch.Tensor]] = {
            "count": lambda: widths.expand(len(grads), many),
            "m2": lambda: m2,
            "squares": lambda: found["squares"].square(),
            "zeros": lambda: widths - found["zeros"],
            "low": lambda: -found["low"],
            "nonfinite": lambda: _nonfinite(blocks, found["sum"]),
        }
        rows = torch.stack([rest[name]() if name in rest else found[name] for name in self.names])
        return self._merged(rows, widths)

    def _blocks(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Views of gradients x rows x elements, the last one of what does not fill a row."""
        flat = [real(grad).reshape(-1) for grad in grads]
        together = flat[0][None] if len(flat) == 1 else self._stacked(flat)
        size, most = together.shape[1], _block(together.device)
        body = size // _ROW * _ROW
        step = max(_ROW, most // len(flat) // _ROW * _ROW)
        blocks = [together[:, at : min(at + step, body)].view(len(flat), -1, _ROW) for at in range(0, body, step)]
        return blocks + ([together[:, None, body:]] if body < size else [])

    def _stacked(self, flat: list[torch.Tensor]) -> torch.Tensor:
        if flat[0].device.type != "cpu":
            return torch.stack(flat)
        return torch.stack(flat, out=self._room("stack", (len(flat), len(flat[0])), flat[0].dtype))

    def _read(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What kernels give for each row; "squares" is still a norm, "zeros" those that are none."""
        found: dict[str, torch.Tensor] = {name: kernel(rows) for name, kernel in self._kernels}
        if self._sizes:
            cpu = rows.device.type == "cpu"
            sizes = torch.abs(rows, out=self._room("abs", rows.shape, rows.dtype)) if cpu else rows.abs()
            if "abs" in self.names:
                found["abs"] = _row_sums(sizes) if cpu else sizes.sum(-1, dtype=torch.float64)
            if "zeros" in self.names:
                found["zeros"] = _not_zero(sizes)
        return found

    def _room(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that is used again and again: to get it from the system each time took longer than to fill it."""
        size, had = math.prod(shape), self._scratch.get((what, dtype))
        if had is None or had.numel() < size:
            had = self._scratch[what, dtype] = torch.empty(max(size, _block(torch.device("cpu"))), dtype=dtype)
        return had[:size].view(shape)

    def _merged(self, rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        """The facts of whole gradients from those of their rows."""
        added = sum(name not in _LARGEST for name in self.names)
        parts = [rows[:added].sum(-1), rows[added:].amax(-1)]
        if "m2" in self.names and len(widths) > 1:
            sums = rows[self.names.index("sum")]
            apart = sums / widths - sums.sum(-1, keepdim=True) / widths.sum()
            parts[0][self.names.index("m2")] += (apart.square() * widths).sum(-1)
        return torch.cat(parts)


def _block(device: torch.device) -> int:
    return _BLOCK.get(device.type, _BLOCK["cuda"])


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sums along the last dimension; on the CPU, where the host may look, no sum of finite elements overflows."""
    found = rows.sum(-1)
    if not found.is_cpu or bool(torch.isfinite(found.sum())):
        return found
    found, bad = found.double(), ~torch.isfinite(found)
    found[bad] = rows[bad].double().sum(-1)
    return found


def _not_zero(sizes: torch.Tensor) -> torch.Tensor:
    """How many elements of each row are not zero; ``sizes`` have no signs, and are lost.

    Their bits are those of an integer that is zero when they are, and integers are counted five times as fast.
    """
    bits = sizes.view(torch.int32 if sizes.dtype == torch.float32 else torch.int64)
    found: torch.Tensor = bits.clamp_(max=1).sum(-1, dtype=bits.dtype)
    return found


def _moments(
    blocks: list[torch.Tensor], sums: torch.Tensor, squares: torch.Tensor, widths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the sum, and the sum of squared distances to the mean.

    As the sum of squares minus the squared sum, unless that would cancel: then of what is left when a number near the
    mean is taken off, which float32 does without rounding. Only on the CPU the host may look which one it is.
    """
    between = sums.square() / widths
    if sums.device.type == "cpu" and not bool((between > squares / 2).any()):
        return sums, (squares - between).clamp(min=0)
    found, at = [], 0
    for block in blocks:
        rows, width = block.to(wide(block.dtype)), block.shape[-1]
        near = (sums[:, at : at + rows.shape[1]] / width).to(rows.dtype).nan_to_num(0.0, 0.0, 0.0)
        left, at = rows - near.unsqueeze(-1), at + rows.shape[1]
        rest = left.sum(-1).double()
        inside = torch.linalg.vector_norm(left, dim=-1).double().square() - rest.square() / width
        found.append(torch.stack([near.double() * width + rest, inside.clamp(min=0)]))
    again, m2 = torch.cat(found, dim=2)
    return again, m2


def _nonfinite(blocks: list[torch.Tensor], sums: torch.Tensor) -> torch.Tensor:
    """How many elements of each row are not finite; on the CPU counted only where a sum is not."""
    if sums.device.type == "cpu" and bool(sums.isfinite().all()):
        return torch.zeros_like(sums)
    return torch.cat([(~torch.isfinite(block)).sum(-1) for block in blocks], dim=1).double()


#: Ranks that have a bit of their own in a float64, whose mantissa has 52 of them and one that is not stored.
_BITS = 52


@dataclass(frozen=True)
class NonFiniteCount(Measure):
    """How many elements are infinite or not a number."""

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"nonfinite"})

    def local(self, local: Local) -> torch.Tensor:
        """The count for each parameter."""
        found = known(local, self.facts)["nonfinite"]
        if all(other is None for other in local.apart):
            return found
        return found + stack(local.apart, lambda grads: [(~torch.isfinite(g)).sum() for g in grads], local.device)


@dataclass(frozen=True)
class FirstToFail(Measure):
    """Which rank comes first whose own gradient was non-finite: world minus its place, and 0 for none."""

    merge: ClassVar[Merge] = "max"
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        """World minus this rank's place wherever its own gradient was non-finite."""
        return own_nonfinite(local).long() * (local.world - local.position)


@dataclass(frozen=True)
class OwnNonFinite(Measure):
    """Which ranks had a non-finite gradient of their own, in one number for each parameter: :func:`ranks_in`.

    Up to 52 ranks have a bit each, and a sum of different bits loses none. Of more ranks the number has how many there
    are and the sum of their places, since the bytes must not grow with the world: one rank can be told, and all.
    """

    merge: ClassVar[Merge] = "sum"
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        """This rank's number wherever its own gradient was non-finite."""
        return own_nonfinite(local).double() * _mark(local.position, local.world)


def ranks_in(mark: float, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The global ranks that a number of :class:`OwnNonFinite` stands for; None where they cannot be told.

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
    """For each parameter whether any gradient of this rank's own, before the reduction, was not finite."""
    found = [(place, value) for place, seen in enumerate(local.seen) for value in seen.norms or seen.finite_probes]
    if not found:
        return torch.zeros(len(local.seen), dtype=torch.bool, device=local.device)
    values = [onto(value, local.device) for _, value in found]
    if len({value.dtype for value in values}) > 1:
        values = [value.double() for value in values]
    bad, places = ~torch.isfinite(torch.stack(values)), [place for place, _ in found]
    if places == list(range(len(local.seen))):
        return bad
    counts = torch.zeros(len(local.seen), dtype=torch.int64, device=local.device)
    return counts.index_add_(0, moved(torch.tensor(places), local.device), bad.long()) > 0


def _mark(place: int, world: int) -> float:
    return float(1 << place if world <= _BITS else (1 << _shift(world)) + place)


def _shift(world: int) -> int:
    """Above it is the number of ranks: the sum of all places is below ``2 ** _shift(world)``."""
    return 2 * world.bit_length()


def finite_probe(grad: torch.Tensor) -> torch.Tensor:
    """A number without dimensions that is finite where all elements of ``grad`` are, by one reading.

    On the CPU it is the sum of the elements, which reads a hundred times as fast as the largest one. The sum of finite
    float32 elements can overflow, and there the host may look whether it did.
    """
    if not grad.is_cpu:
        return torch.linalg.vector_norm(grad, torch.inf, dtype=wide(grad.dtype)) if grad.numel() else grad.new_zeros(())
    total = grad.sum(dtype=None if grad.is_complex() else wide(grad.dtype))
    if bool(torch.isfinite(total)) or not bool(torch.isfinite(grad).all()):
        return total.abs() if total.is_complex() else total
    return torch.zeros(())
