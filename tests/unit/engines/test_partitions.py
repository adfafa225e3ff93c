"""Ranges of flattened groups: every element of every parameter is on one rank, wherever the boundaries fall."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from disthooks.engines.deepspeed import PartitionRange, cut_partition


def _layout(sizes: list[int], align: int, world: int) -> tuple[list[int], int]:
    """Where each parameter begins, and how much a rank has, as DeepSpeed lays them out."""
    offsets, end = [], 0
    for size in sizes:
        end += -end % align
        offsets.append(end)
        end += size
    return offsets, -(-end // (2 * world)) * 2


def _ends(place: PartitionRange) -> tuple[int, int]:
    assert place.part.span is not None
    return place.part.span


@pytest.mark.parametrize("seed", range(30))
def test_cut_covers_every_element_once(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([1, 2, 3, 5, 40]) for _ in range(chance.randint(1, 8))]
    world, align = chance.randint(1, 7), chance.choice([1, 4, 8])
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    offsets, size = _layout(sizes, align, world)
    seen = [torch.zeros(n) for n in sizes]
    for rank in range(world):
        # The list of gradients, as DeepSpeed makes it: parts that are here, with a member for each gap before one.
        filled, listed = rank * size, 0
        for (parameter, place), count, offset in zip(
            cut_partition(0, parameters, offsets, rank * size, size), seen, offsets, strict=True
        ):
            first, last = _ends(place)
            count[first:last] += 1
            assert place.count == last - first <= parameter.numel()
            if last > first:
                assert place.offset == offset + first - rank * size
                listed += offset + first > filled
                assert place.index == listed
                filled, listed = offset + last, listed + 1
    assert all(bool((count == 1).all()) for count in seen)
