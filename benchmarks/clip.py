"""``ClipNorm`` with the optimizer's step, beside torch's ``clip_grad_norm_`` and step: the ratio of the two, in turn.

    make bench NAME=clip                     # or: python benchmarks/clip.py --threads 1 2

Two equal models have the same gradients in each round. One has ``ClipNorm`` attached, and its steps are not logged. In
the other torch clips before the step. Both step by AdamW (foreach). The models have 100 or 2,000 parameters, of 64 to
4,096 elements each, or of 27 million together; the norm is above the limit or below it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import time

import torch
from torch import nn

import disthooks as dh


def model_of(count: int, is_large: bool) -> nn.ParameterList:
    """Parameters of one dimension."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(64, 4096, (count,), generator=draw).tolist()
    return nn.ParameterList(torch.randn(27_000_000 // count if is_large else size) for size in sizes)


def ratio(count: int, is_large: bool, limit: float, rounds: int) -> float:
    """The median time of clipping and step with ``ClipNorm``, over that with torch's function."""
    models = [model_of(count, is_large) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True) for model in models]
    given = [torch.randn_like(parameter) for parameter in models[0]]
    seconds: list[list[float]] = [[], []]
    with dh.gradients(models[0], optimizers[0], rules=[dh.ClipNorm(limit)], every=10**9):
        for number in range(-3, rounds):
            for model in models:
                for parameter, grad in zip(model, given, strict=True):
                    parameter.grad = grad.clone()
            for which in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                if which:
                    torch.nn.utils.clip_grad_norm_(models[which].parameters(), limit)
                optimizers[which].step()
                if number >= 0:
                    seconds[which].append(time.perf_counter() - begin)
    return statistics.median(seconds[0]) / statistics.median(seconds[1])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15, help="with large parameters; ten times as many with small")
    out = pathlib.Path(__file__).parent / "results" / "clip-cpu.json"
    parser.add_argument("--json", type=pathlib.Path, default=out)
    options = parser.parse_args()
    ratios = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        for is_large in (False, True):
            for count in (100, 2000):
                for about, limit in (("clipped", 1.0), ("below the limit", 1e9)):
                    rounds = options.rounds if is_large else 10 * options.rounds
                    name = f"{count} {'large' if is_large else 'small'}, {about}, threads: {threads}"
                    ratios[name] = round(ratio(count, is_large, limit, rounds), 3)
                    print(f"{name:45s} {ratios[name]:.3f}")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "rounds": options.rounds}
    found = {"machine": machine, "target": 0.95, "clip_and_step_against_torch": ratios}
    options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
