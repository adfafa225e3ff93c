"""How the time of a step grows with the number of saved tensors that share something: in proportion, or faster.

    make bench NAME=growth                     # or: python benchmarks/growth.py --count 1000 --rounds 5

Five programs: one operator saves many rows of one tensor; one saves its columns; steps share a weight that is no
Parameter; steps share a mask; a function of the user's own asks for its saved tensors many times. Each runs with
nothing and with everything on disk, with ``count`` and with four times as many. Printed and written as JSON: the
medians, the ratio of the times at four times the count and at the count (4 is linear, 16 is quadratic), and the ratio
to no hooks at the larger count.
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
from collections.abc import Callable
from typing import Any

import torch

import disthooks as dh

MORE = 4


class Takes(torch.autograd.Function):
    """Saves all that it is given; its backward asks for the saved tensors ``times`` times."""

    @staticmethod
    def forward(ctx: Any, times: int, *given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*given)
        ctx.times = times
        return given[0].sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for _ in range(ctx.times - 1):
            _ = ctx.saved_tensors
        return (None, *(grad * tensor for tensor in ctx.saved_tensors))


def views(count: int) -> torch.Tensor:
    leaf = torch.rand(count, 1024, requires_grad=True)
    return Takes.apply(1, *(leaf * 2).unbind(0))


def columns(count: int) -> torch.Tensor:
    leaf = torch.rand(1024, count, requires_grad=True)
    return Takes.apply(1, *(leaf * 2).unbind(1))


def weight(count: int) -> torch.Tensor:
    leaf = (torch.eye(64) * 1.1).requires_grad_()
    shared, h = leaf * 0.9, torch.rand(16, 64)
    for _ in range(count):
        h = torch.tanh(h @ shared)
    return h.sum()


def mask(count: int) -> torch.Tensor:
    h = torch.rand(16, 64, requires_grad=True)
    shared = (torch.rand(16, 64) > 0.1).float()
    for _ in range(count):
        h = torch.tanh(h * shared)
    return h.sum()


def asked(count: int) -> torch.Tensor:
    leaf = torch.rand(16, 1024, requires_grad=True)
    return Takes.apply(count, *[leaf * (i + 1) for i in range(3)])


PROGRAMS: dict[str, Callable[[int], torch.Tensor]] = {
    "views": views,
    "columns": columns,
    "weight": weight,
    "mask": mask,
    "asked": asked,
}


def once(program: Callable[[int], torch.Tensor], count: int, context: contextlib.AbstractContextManager[Any]) -> float:
    """Seconds of one forward and backward."""
    begin = time.perf_counter()
    with context:
        loss = program(count)
    loss.backward()
    del loss
    return time.perf_counter() - begin


def measure(name: str, count: int, rounds: int, folder: str) -> dict[str, Any]:
    """The medians of one program, in turn with nothing and with hooks, and their ratios."""
    store, program = dh.OnDisk(folder, in_flight="1 MiB"), PROGRAMS[name]
    counts = count, MORE * count
    found: dict[tuple[bool, int], list[float]] = {(hooks, n): [] for hooks in (False, True) for n in counts}
    moved = 0
    for number in range(-1, rounds):
        for (hooks, n), times in found.items():
            saved = dh.saving(store, at_least=0)
            seconds = once(program, n, saved if hooks else contextlib.nullcontext())
            moved = saved.report().moved if hooks else moved
            if number >= 0:  # the first round warms up
                times.append(seconds)
            store.release_idle()
            gc.collect()
    medians = {key: statistics.median(times) for key, times in found.items()}
    few, many = counts
    return {
        "count": few,
        "nothing_seconds": [round(medians[False, n], 4) for n in counts],
        "hooks_seconds": [round(medians[True, n], 4) for n in counts],
        "growth": round(medians[True, many] / medians[True, few], 2),
        "growth_with_nothing": round(medians[False, many] / medians[False, few], 2),
        "ratio_to_nothing": round(medians[True, many] / medians[False, many], 2),
        "moved_bytes": moved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where the files live; default the system's temporary one")
    default = pathlib.Path(__file__).parent / "results" / "growth.json"
    parser.add_argument("--json", type=pathlib.Path, default=default)
    args = parser.parse_args()
    folder = args.directory or tempfile.gettempdir()
    results = {}
    for name in PROGRAMS:
        results[name] = row = measure(name, args.count, args.rounds, folder)
        print(
            f"{name:8} {row['count']} and {MORE * row['count']}: {row['hooks_seconds'][0]:.3f} s and "
            f"{row['hooks_seconds'][1]:.3f} s, {row['growth']:.1f} times as long (with nothing "
            f"{row['growth_with_nothing']:.1f}); {row['ratio_to_nothing']:.1f} times as long as with nothing",
            flush=True,
        )
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"machine": machine, "rounds": args.rounds, "more": MORE, "results": results}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
