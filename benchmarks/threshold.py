"""What one tensor costs to be stored on disk and brought back, by its size: from which size on it is worth it.

    make bench NAME=threshold                  # or: python benchmarks/threshold.py --rounds 9

A chain of operations, each of which saves one tensor of that size, is run forward and backward with nothing and with
everything on disk, in turn; the difference of the medians is what moving costs. One tensor in so many may be in flight,
as many at every size: with the default, small ones would never be written at all. Printed in microseconds a tensor and
nanoseconds a byte, with the smallest size from which on a byte costs at most twice what it costs in large tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

import torch

import disthooks as dh
from disthooks._tensors import format_bytes

SIZES = [1 << power for power in range(10, 23)]  # 1 KiB to 4 MiB
LARGE = 2  # the largest so many are what large ones cost
IN_FLIGHT = 16  # tensors


def links(size: int) -> int:
    """How many tensors of ``size`` bytes: enough to be more than those in flight, and to be timed."""
    return max(4 * IN_FLIGHT, min(1024, (128 << 20) // size))


def once(size: int, x: torch.Tensor, context: contextlib.AbstractContextManager[object]) -> float:
    """Seconds a tensor of one forward and backward: put, got and dropped."""
    x.grad = None
    begin = time.perf_counter()
    with context:
        y = x
        for _ in range(links(size)):
            y = y.relu()  # saves what it makes, and computes next to nothing
    y.backward(torch.ones_like(y))
    del y
    return (time.perf_counter() - begin) / links(size)


def measure(rounds: int, folder: str) -> dict[int, float]:
    """What moving adds, by size, in seconds a tensor: the difference of medians."""
    tensors = {size: torch.rand(size // 4, requires_grad=True) for size in SIZES}
    stores = {size: dh.OnDisk(folder, in_flight=IN_FLIGHT * size) for size in SIZES}
    found: dict[tuple[int, bool], list[float]] = {(size, moved): [] for size in SIZES for moved in (False, True)}
    gc.disable()
    for number in range(-1, rounds):
        for (size, moved), figures in found.items():
            context = dh.saving(stores[size], at_least=0) if moved else contextlib.nullcontext()
            figure = once(size, tensors[size], context)
            if number >= 0:  # the first round warms up
                figures.append(figure)
            stores[size].release_idle()
        gc.collect()
    return {size: statistics.median(found[size, True]) - statistics.median(found[size, False]) for size in SIZES}


def gate(costs: dict[int, float]) -> int | None:
    """The smallest size such that it and all above cost at most twice per byte of what large ones cost."""
    per_byte = {size: cost / size for size, cost in costs.items()}
    most = 2 * statistics.mean(per_byte[size] for size in SIZES[-LARGE:])
    dear = [size for size in SIZES if per_byte[size] > most]
    return next((size for size in SIZES if not dear or size > dear[-1]), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", default=None, help="where the files live; default the system's temporary one")
    parser.add_argument("--json", default=str(pathlib.Path(__file__).parent / "results" / "threshold.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        costs = measure(options.rounds, folder)
    smallest = gate(costs)
    for size, cost in costs.items():
        print(f"{format_bytes(size):>10}{cost * 1e6:10.1f} µs a tensor{cost / size * 1e9:10.2f} ns a byte")
    said = "none" if smallest is None else format_bytes(smallest)
    print(f"smallest size from which on a byte costs at most twice what it does in large tensors: {said}")
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    figures = {
        "microseconds_a_tensor": {str(size): round(cost * 1e6, 2) for size, cost in costs.items()},
        "nanoseconds_a_byte": {str(size): round(cost / size * 1e9, 3) for size, cost in costs.items()},
        "smallest_at_twice_the_cost_of_large": smallest,
        "machine": machine | {"python": platform.python_version(), "torch": torch.__version__},
        "rounds": options.rounds,
    }
    pathlib.Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
