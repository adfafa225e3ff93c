"""Budgets of resident memory on a CPU: what ``fit`` keeps of each, and what a step takes under it.

    make bench NAME=fit                        # or: python benchmarks/fit.py --directory /scratch

A transformer trains in memory, with every saved tensor on disk, and under budgets that leave 60 to 90% of the resident
memory that its training adds to that of the process before the first step. With every layer in an activation checkpoint
it trains without a budget, and under the same budgets: once as ``fit`` decides with the times that it measures, and
once by size only, as it does before it has measured. A peer is torch's selective checkpoint, which keeps the results of
matrix products.
``--throttle 200`` makes the disk as slow as that many MB/s, in reading and in writing.

Each run is a process of its own, because resident memory is of a process. All of them live at once (16 processes of 0.7
to 1.4 GiB at full size) and take turns step by step, each turn in an order of its own, because the steps of one process
drift by a third within minutes on a shared machine. Of each process the peaks of all steps count, and the seconds of
those after the 28th, when ``fit`` has found its limit and has kept or given up its mixture. Ratios are of two steps of
the same turn. Their medians are printed and written as JSON, with the time over that of "size only" and the middle half
of the turns, and drawn as SVG with ``--figure``. All runs have ``disthooks.memory.release_promptly()``, without which
memory that was freed stays resident.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from disk import RESULTS, machine
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import disthooks as dh
from disthooks._tensors import format_bytes
from disthooks.saved.fit import Fitted
from disthooks.saved.stores.scratch_file import ScratchFile

MEMORY, DISK, CHECKPOINTS, BYTES = "in memory", "OnDisk", "checkpoints", "size only"
SELECTIVE = "torch selective checkpoints"
aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
SHARES = (0.9, 0.8, 0.7, 0.6)
SETTLED = 28
# Layers, width, batch, length, dropout, in_flight. Without dropout attention saves no weights, and computing it again
# takes long.
SIZES = {
    "full": (8, 384, 8, 256, 0.1, "64 MiB"),
    "small": (8, 128, 16, 128, 0.1, "64 MiB"),
    "long": (6, 256, 1, 2048, 0.0, "16 MiB"),
}


def throttle(speed: float) -> None:
    """Let each read and write of a file take as long as on a disk of so many bytes a second."""

    def slowed(name: str) -> None:
        move = getattr(ScratchFile, name)

        def wait(file: ScratchFile, buffer: memoryview, *rest: int) -> None:
            begin = time.perf_counter()
            move(file, buffer, *rest)
            nbytes = rest[1] if len(rest) > 1 else buffer.nbytes  # read has an offset and a number of bytes
            time.sleep(max(0.0, nbytes / speed - (time.perf_counter() - begin)))

        setattr(ScratchFile, name, wait)

    slowed("write")
    slowed("read")


def train(way: str, budget: int, size: str, directory: str) -> None:
    """Train in this process: one step for each line that is read, whose seconds and peak are written as one line."""
    layers, width, batch, length, dropout, in_flight = SIZES[size]
    if way.endswith(BYTES):
        Fitted._rates = lambda *_: None  # type: ignore[method-assign, assignment]
    dh.memory.release_promptly()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.randn(batch, length, width)
    if way.startswith(CHECKPOINTS):
        model.layers = nn.ModuleList(map(CheckpointWrapper, model.layers))
    elif way == SELECTIVE:
        contexts = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
        model.layers = nn.ModuleList(CheckpointWrapper(layer, context_fn=contexts) for layer in model.layers)
    if way == DISK:
        dh.save_activations(model, "*", dh.OnDisk(directory, in_flight=in_flight))
    elif budget:
        dh.fit(model, budget, dh.OnDisk(directory, in_flight=in_flight))
    before = dh.memory.resident()
    for _ in sys.stdin:
        dh.memory.reset_peak_resident()
        begin = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        row = {"before": before, "peak": dh.memory.peak_resident(), "seconds": seconds, "loss": loss.item().hex()}
        print(json.dumps(row), flush=True)


class Training:
    """A process that trains in one way, step by step; ``steps`` has what it wrote of each."""

    def __init__(self, way: str, budget: int, args: argparse.Namespace) -> None:
        self.scratch = tempfile.TemporaryDirectory(dir=args.directory)
        words = ["--one", way, "--budget", str(budget), "--size", args.size]
        call = [sys.executable, __file__, *words, "--directory", self.scratch.name, "--throttle", str(args.throttle)]
        self.process = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.steps: list[dict[str, Any]] = []

    def step(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        self.steps.append(json.loads(self.process.stdout.readline()))

    def end(self) -> None:
        self.process.communicate()
        self.scratch.cleanup()


def in_turns(ways: dict[str, int], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The steps of each way, which took turns."""
    dice, trainings = random.Random(0), {way: Training(way, budget, args) for way, budget in ways.items()}
    for turn in range(args.steps):
        print(f"turn {turn + 1} of {args.steps}", file=sys.stderr, flush=True)
        for training in dice.sample([*trainings.values()], len(trainings)):
            training.step()
    for training in trainings.values():
        training.end()
    return {way: training.steps for way, training in trainings.items()}


def ratios(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """What the settled steps took, over the other way's step of the same turn."""
    pairs = zip(steps[SETTLED:], others[SETTLED:], strict=True)
    return [a["seconds"] / b["seconds"] for a, b in pairs]


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    """The time of a step over its peak: a line for each rule of ``fit``, a point for each way without a budget."""
    import matplotlib
    from figure import GIB, machine_of
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[float, float]]] = {}
    for way, row in found["results"].items():
        rule = re.sub(r", \d+%", "", way)
        lines.setdefault(rule, []).append((row["peak_bytes"] / GIB, row["ratio"]))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o" if "fit" in name else "s", label=name)
    about = found["throttle"]
    disk = f"a disk of {about:.0f} MB/s" if about else "the disk as it is"
    axes.set(xlabel="peak resident memory, GiB", ylabel="time of a step, of that in memory", ylim=(0.9, None))
    axes.set_title(f"{machine_of(found)}, {disk}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "disthooks"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=SETTLED + 12)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on a real disk")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="the budgets, as parts of that memory")
    parser.add_argument("--throttle", type=float, default=0.0, help="MB/s of the disk, each way; 0 for as it is")
    parser.add_argument("--json", default=str(RESULTS / "fit-cpu.json"))
    parser.add_argument("--figure", type=pathlib.Path, help="draw the results as an SVG to this path")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < SETTLED + 2:
        parser.error(f"--steps {args.steps}: the first {SETTLED} are not timed, and two others are needed at least")
    if args.one:
        if args.throttle:
            throttle(1e6 * args.throttle)
        train(args.one, args.budget, args.size, args.directory)
        return
    free = in_turns({MEMORY: 0}, argparse.Namespace(**{**vars(args), "steps": 5}))[MEMORY]
    before, most = free[0]["before"], max(step["peak"] for step in free)
    kept = {share: int(before + share * (most - before)) for share in args.shares}
    ways = {MEMORY: 0, **{f"fit, {share:.0%}": kept[share] for share in args.shares}, DISK: 0}
    ways |= {CHECKPOINTS: 0, SELECTIVE: 0}
    for share, budget in kept.items():
        ways |= {f"{CHECKPOINTS}, fit, {share:.0%}{rule}": budget for rule in ("", f", {BYTES}")}
    runs = in_turns(ways, args)
    results = {}
    for way, budget in ways.items():
        steps = runs[way]
        peak = max(step["peak"] for step in steps)
        row = results[way] = {
            "seconds": statistics.median(step["seconds"] for step in steps[SETTLED:]),
            "ratio": statistics.median(ratios(steps, runs[MEMORY])),
            "budget_bytes": budget or None,
            "peak_bytes": peak,
            "used": round(peak / budget, 4) if budget else None,
            "is_kept": peak <= budget if budget else None,
            "same_loss": steps[-1]["loss"] == runs[MEMORY][-1]["loss"],
        }
        line = f"{way:<32} {row['seconds']:6.2f} s  {row['ratio']:5.2f}  {format_bytes(peak):>10}  {row['used']}"
        if f"{way}, {BYTES}" in runs:
            over = ratios(steps, runs[f"{way}, {BYTES}"])
            row["over_bytes"] = statistics.quantiles(over)
            line += "  time / size only {:.2f} ({:.2f} to {:.2f})".format(*(row["over_bytes"][i] for i in (1, 0, 2)))
        print(line)
    about = {
        "machine": machine("cpu"),
        **{name: getattr(args, name) for name in ("size", "steps", "throttle")},
    }
    found = {**about, "results": results}
    pathlib.Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
