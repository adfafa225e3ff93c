"""What it costs to see a training run: all statistics of layers and ranks, and fingerprints, beside a whole step.

    make bench NAME=seeing                   # or: python benchmarks/seeing.py --rounds 9

A decoder-only transformer of 100 parameters (27 million elements) takes whole steps on random tokens: forward, backward
and AdamW. Each round makes one step of every way in turn, each round beginning with another way; medians of the ratios
to the step without disthooks in the same round are printed, and written as JSON. On a machine that others use,
``OMP_NUM_THREADS=1 ... --cpu-time`` compares seconds of the CPU in place of those of the clock:

- ``stats.full()`` in every step: norms, spread, largest elements, updates, activations, loss and times;
- ``stats.Activations()`` alone;
- ``stats.full()`` in a step that is not logged; from both follows what every 10th costs, as README has it;
- ``stats.Fingerprints()`` in every step, and, from that, what it costs in every 50th.

The targets: all statistics cost at most 3% of a step, and 1% if every 10th has them; fingerprints of every 50th 2%.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import platform
import statistics
import time
from typing import Any

import torch
from gradients import SIZES, Decoder

import disthooks as dh

WAYS: dict[str, list[Any]] = {
    "nothing": [],
    "activations": [dh.stats.Activations()],
    "all statistics": list(dh.stats.full()),
    "between logged steps": list(dh.stats.full()),
    "fingerprints": [dh.stats.Fingerprints()],
}
EVERY, TENTH = 50, 10


class Turns:
    """A model of its own for each way, because what is attached stays attached, and keeps the memory that it needs."""

    def __init__(self, size: str, device: str, cpu_time: bool = False) -> None:
        self._clock = time.process_time if cpu_time else time.perf_counter
        blocks, width, sequences, length = SIZES[size]
        self.tokens = torch.randint(0, 2048, (sequences, length), device=device)
        self.models, self.optimizers, self.watches = {}, {}, {}
        for name, stats in WAYS.items():
            torch.manual_seed(0)
            model = self.models[name] = Decoder(blocks, width).to(device)
            optimizer = self.optimizers[name] = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
            if stats:
                every = 2**30 if name == "between logged steps" else 1  # step 0, which warms up, is logged
                self.watches[name] = dh.gradients(model, optimizer, stats=stats, every=every)
        self.ratios: dict[str, list[float]] = {name: [] for name in WAYS}
        self.steps: list[float] = []

    def round(self, number: int) -> None:
        """One step of every way; number -1 warms up."""
        names = list(WAYS)
        first = max(number, 0) % len(names)
        taken = {name: self._step(name) for name in [*names[first:], *names[:first]]}
        if number >= 0:
            self.steps.append(taken["nothing"])
            for name, seconds in taken.items():
                self.ratios[name].append(seconds / taken["nothing"])

    def _step(self, name: str) -> float:
        watch = self.watches.get(name)
        gc.collect()
        gc.disable()
        begin = self._now()
        loss = self.models[name](self.tokens)
        if watch is not None:
            watch.note_loss(loss)
        loss.backward()
        self.optimizers[name].step()
        if watch is not None:
            watch.flush()
        taken = self._now() - begin
        gc.enable()
        self.optimizers[name].zero_grad()
        return taken

    def _now(self) -> float:
        if self.tokens.is_cuda:
            torch.cuda.synchronize()
        return self._clock()

    def result(self) -> dict[str, Any]:
        over = {name: statistics.median(found) - 1 for name, found in self.ratios.items() if name != "nothing"}
        logged, between = over["all statistics"], over["between logged steps"]
        shares = {
            "all statistics": (over["all statistics"], 0.03),
            "in every 10th step": (between + (logged - between) / TENTH, 0.01),
            "fingerprints": (over["fingerprints"] / EVERY, 0.02),
        }
        return {
            "training_step_seconds": round(statistics.median(self.steps), 4),
            "added_share_of_a_step": {name: round(share, 4) for name, share in over.items()},
            "targets": {
                k: {"figure": round(v, 4), "at_most": most, "met": v <= most} for k, (v, most) in shares.items()
            },
        }


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of the CPU, which a busy machine hardly changes"
    )
    parser.add_argument("--sizes", nargs="+", default=["100 parameters"], choices=list(SIZES))
    parser.add_argument("--json", type=pathlib.Path, default=None)
    options = parser.parse_args(words)
    results = {}
    for size in options.sizes:
        turns = Turns(size, options.device, options.cpu_time)
        for number in range(-1, options.rounds):
            turns.round(number)
        results[size] = turns.result()
        print(size, json.dumps(results[size], indent=1))
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "clock": "CPU" if options.cpu_time else "wall",
    }
    machine |= {"gpu": torch.cuda.get_device_name()} if options.device.startswith("cuda") else {}
    result = {"machine": machine, "results": results}
    out = options.json or pathlib.Path(__file__).parent / "results" / f"seeing-{options.device}.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
