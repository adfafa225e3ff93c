"""Small collectives of whole numbers: a sum, and what every rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_LOW = 0xFFFFFFFF
_MOST = 1 << 21  # numbers that are received at once, 16 MiB


def world() -> tuple[int, ...]:
    """All ranks of the default process group; one alone where there is none.

    >>> world()
    (0,)
    """
    ready = dist.is_available() and dist.is_initialized()
    return tuple(range(dist.get_world_size())) if ready else (0,)


def rank() -> int:
    """This process's global rank; 0 where there is no process group.

    >>> rank()
    0
    """
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def total(group: Any, numbers: torch.Tensor) -> torch.Tensor:
    """The sum of int64 ``numbers`` over the ranks, modulo 2**64: one all-reduce of twice their size.

    The halves of each number are summed apart, so that no backend has to add beyond 63 bits.

    >>> total(None, torch.tensor([-3, 2**62]))
    tensor([                 -3, 4611686018427387904])
    """
    if group is None:
        return numbers
    halves = torch.stack((numbers & _LOW, (numbers >> 32) & _LOW))
    dist.all_reduce(halves, dist.ReduceOp.SUM, group=group)
    return halves[0] + (halves[1] << 32)


def gather(group: Any, numbers: torch.Tensor) -> list[list[int]]:
    """The int64 ``numbers`` (one dimension, as many on every rank) of each rank, on the host.

    One all-gather for every 16 MiB received, so that memory stays bounded however many ranks there are.

    >>> gather(None, torch.tensor([1, 2]))
    [[1, 2]]
    """
    if group is None:
        return [numbers.tolist()]
    size = dist.get_world_size(group)
    found: list[list[int]] = [[] for _ in range(size)]
    for part in torch.split(numbers, max(1, _MOST // size)):
        rows = part.new_empty(size, part.numel())
        dist.all_gather(list(rows), part, group=group)
        for mine, row in zip(found, rows.tolist(), strict=True):
            mine += row
    return found
