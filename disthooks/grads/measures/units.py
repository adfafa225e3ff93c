"""Sums of squares for each output unit of a parameter, however the parameter is split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from disthooks.engines.shard import Part, Shard
from disthooks.grads.measures.base import Local, Measure, Merge, onto, real, row_norms
from disthooks.grads.measures.power import norms


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
            tensor = grad if self.of == "gradient" else shard.values().detach() if shard.owned else None
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
