"""What a saved tensor costs in Python, pack and unpack together, over plain autograd and over the copy itself.

    make bench NAME=overhead                   # or: python benchmarks/overhead.py --rounds 31

A chain of operations, each of which saves one tensor, is run forward and backward under each way in turn; the medians
are printed in microseconds a tensor and written as JSON with the machine they came from. Beside them stand torch's own
``saved_tensors_hooks``: with two functions that return what they get, and with two that clone it. The calls of Python
and C functions (``cProfile``) and the objects that the garbage collector tracks are counted in the same chain.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import os
import pathlib
import platform
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import disthooks as dh
from disthooks.saved.stores.base import Store

Hooks = torch.autograd.graph.saved_tensors_hooks
TENSORS = 200
LARGE, SMALL = (32, 32), (16, 16)  # 4 KiB, the least that goes to the store; 1 KiB, which is kept


@dataclass(frozen=True)
class Memory(Store):
    """A store that really copies, in the memory the tensor is in."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket.clone()

    def drop(self, ticket: torch.Tensor) -> None:
        pass


def chain(x: torch.Tensor) -> list[torch.Tensor]:
    """Each operation saves what the one before it made."""
    for _ in range(TENSORS):
        x = x.abs()
    return [x]


def star(x: torch.Tensor) -> list[torch.Tensor]:
    """Each operation saves the same tensor."""
    x = x.abs()
    return [x.abs() for _ in range(TENSORS)]


def views(x: torch.Tensor) -> list[torch.Tensor]:
    """Each operation saves a view of its own of the same tensor."""
    x = x.abs()
    return [x.view(-1, 8).abs() for _ in range(TENSORS)]


def once(work: Callable[[torch.Tensor], list[torch.Tensor]], x: torch.Tensor, context: object) -> float:
    """Microseconds a saved tensor of one forward and backward."""
    x.grad = None
    begin = time.perf_counter()
    with context or contextlib.nullcontext():  # type: ignore[attr-defined]
        ys = work(x)
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    del ys
    return (time.perf_counter() - begin) / TENSORS * 1e6


def measure(rounds: int, folder: str) -> dict[str, float]:
    """Medians by name of the case."""
    small, large = (torch.randn(shape, requires_grad=True) for shape in (SMALL, LARGE))
    cases: dict[str, Callable[[], float]] = {}
    for name, work, x in (
        ("small", chain, small),
        ("large", chain, large),
        ("same", star, large),
        ("views", views, large),
    ):
        cases[f"{name}: warm up"] = lambda w=work, x=x: once(w, x, None)
        cases[f"{name}: nothing"] = lambda w=work, x=x: once(w, x, None)
        for way, function in (("as it is", lambda t: t), ("a copy each way", lambda t: t.clone())):
            cases[f"{name}: torch's hooks, {way}"] = lambda w=work, x=x, f=function: once(w, x, Hooks(f, f))
        for way, to in (("disthooks, in memory", Memory()), ("disthooks, on disk", dh.OnDisk(folder))):
            cases[f"{name}: {way}"] = lambda w=work, x=x, to=to: once(w, x, dh.saving(to, at_least="4 KiB"))
    found: dict[str, list[float]] = {name: [] for name in cases}
    gc.disable()
    for i in range(rounds + 2):
        for name, case in cases.items():
            figure = case()
            if i >= 2:
                found[name].append(figure)
        gc.collect()
    return {name: statistics.median(figures) for name, figures in found.items() if not name.endswith("warm up")}


def counted(x: torch.Tensor, context: Callable[[], contextlib.AbstractContextManager[object]]) -> dict[str, float]:
    """The calls that a saved tensor costs, pack and unpack, and the tracked objects that are alive between the two."""
    for _ in range(3):  # the first rounds make what later ones find
        once(chain, x, context())
    profile = cProfile.Profile()
    profile.runcall(once, chain, x, context())
    gc.collect()
    before = len(gc.get_objects())
    with context():
        ys = chain(x)
    objects = len(gc.get_objects()) - before
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return {"calls": round(calls / TENSORS, 1), "objects": round(objects / TENSORS, 1)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--out", default=str(pathlib.Path(__file__).parent / "results" / "overhead.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    medians = measure(options.rounds, options.directory)
    copies = medians["large: torch's hooks, a copy each way"] - medians["large: torch's hooks, as it is"]
    over = {name: figure - medians[f"{name.split(':')[0]}: nothing"] for name, figure in medians.items()}
    costs = {
        "kept": over["small: disthooks, in memory"],
        "shared, the same tensor": over["same: disthooks, in memory"],
        "shared, a view": over["views: disthooks, in memory"],
        "stored in memory, over the two copies": over["large: disthooks, in memory"] - copies,
        "stored on disk, writing and reading included": over["large: disthooks, on disk"],
        "torch's hooks with functions that do nothing": over["large: torch's hooks, as it is"],
        "the two copies": copies,
    }
    empty = costs["torch's hooks with functions that do nothing"]
    for name, value in costs.items():
        print(f"{name:48s} {value:6.1f} µs a tensor, {value / empty:5.1f} times torch's empty hooks")
    small, large = (torch.randn(shape, requires_grad=True) for shape in (SMALL, LARGE))
    memory, disk = Memory(), dh.OnDisk(options.directory)
    far, near = (dh.Tiered(dh.OnDevice(limit), dh.OnDisk(options.directory)) for limit in (0, "1 GiB"))
    counts = {
        "torch's hooks": counted(large, lambda: Hooks(lambda t: t, lambda t: t)),
        "kept": counted(small, lambda: dh.saving(memory, at_least="4 KiB")),
        "stored in memory": counted(large, lambda: dh.saving(memory, at_least="4 KiB")),
        "stored on disk": counted(large, lambda: dh.saving(disk, at_least="4 KiB")),
        "stored on disk by Tiered": counted(large, lambda: dh.saving(far, at_least="4 KiB")),
        "left in memory by Tiered": counted(large, lambda: dh.saving(near, at_least="4 KiB")),
    }
    for name, count in counts.items():
        print(f"{name:48s} {count['calls']:6.1f} calls, {count['objects']:5.1f} tracked objects")
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"python": platform.python_version(), "torch": torch.__version__, "rounds": options.rounds}
    report = {
        "microseconds a tensor, pack and unpack": {name: round(value, 2) for name, value in costs.items()},
        "calls and tracked objects a tensor": counts,
        "medians": {name: round(value, 2) for name, value in medians.items()},
        "machine": machine,
    }
    pathlib.Path(options.out).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
