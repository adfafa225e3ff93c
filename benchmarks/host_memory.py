"""How much host memory the pool takes from the system anew when the lengths of batches vary.

The pool gives out parts for the tensors that a decoder of 24 layers saves in each step: all in forward, and back in
reverse in backward. The last tensors come back only in the next forward, as when their copies are still under way.
Nothing is written to the memory, so the system gives no pages, and no GPU is needed.

    python benchmarks/host_memory.py
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from disthooks.saved.stores.host import PinnedPool

LAYERS, WIDTH, INNER, HEADS = 24, 2560, 6912, 20
UNDER_WAY = 4  # tensors of the last backward that come back in the next forward
GB = 1e9


class Registered(NamedTuple):
    """What a training took from the system, in bytes."""

    first: int  # in the first ten steps
    later: int  # after them
    held: int  # at the end
    peak: int  # the most that was in use at once
    most: int  # the most that was held at once


def sizes(length: int) -> Iterator[int]:
    """Bytes of the tensors that one decoder saves at a sequence of ``length`` tokens, in bfloat16."""
    hidden, inner, row = 2 * length * WIDTH, 2 * length * INNER, 4 * length
    for _ in range(LAYERS):
        yield from (hidden, row, hidden, hidden, hidden, hidden, row * HEADS, hidden, hidden, row, hidden)
        yield from (inner, inner, inner)


def train(lengths: Sequence[int]) -> Registered:
    """Lease and give back the memory of one step for each of ``lengths``."""
    pool = PinnedPool(torch.device("cpu"), pin=False)
    under_way: collections.deque[object] = collections.deque()
    first = peak = most = 0
    for step, length in enumerate(lengths):
        saved = []
        for nbytes in sizes(length):
            saved.append(pool.lease(nbytes))
            if under_way:
                under_way.popleft()
        peak, most = max(peak, pool.in_use), max(most, pool.held)
        while saved:
            under_way.append(saved.pop())
            while len(under_way) > UNDER_WAY:
                under_way.popleft()
        first = pool.registered if step < 10 else first
    return Registered(first, pool.registered - first, pool.held, peak, most)


def cases() -> Iterator[tuple[str, list[int]]]:
    """Pairs of a name and the lengths of its steps. The longest random one comes among the first ten."""
    yield "8,192", [8192] * 30
    yield "8,192 and 5,000 in turn", [8192, 5000] * 15
    yield "5,000 and 8,192 in turn", [5000, 8192] * 15
    for seed in range(4):
        draw = random.Random(seed)
        lengths = [draw.randint(4096, 8192) for _ in range(60)]
        longest = lengths.index(max(lengths))
        lengths[9], lengths[longest] = lengths[longest], lengths[9]
        yield f"4,096 to 8,192 at random ({seed})", lengths


def main() -> None:
    print(f"{'lengths':32}{'10 steps':>10}{'later':>8}{'in use':>9}{'held / in use':>15}")
    for name, lengths in cases():
        found = train(lengths)
        print(
            f"{name:32}{found.first / GB:7.1f} GB{found.later / GB:5.1f} GB{found.peak / GB:6.1f} GB"
            f"{found.most / found.peak:15.3f}"
        )


if __name__ == "__main__":
    main()
