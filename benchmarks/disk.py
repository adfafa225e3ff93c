"""One model and batch with its saved tensors left alone, by torch's save_on_cpu, by a file a tensor, and by disthooks.

    make bench                                       # or: python benchmarks/disk.py --model mlp --rounds 7

The ways take turns in one process, a step of each a round; the medians and the ratio to nothing are printed and
written as JSON with the machine they came from. On a CPU-only machine freed memory is returned at once, for every
way alike; without that no way lowers resident memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks._tensors import format_bytes

Way = Callable[[], contextlib.AbstractContextManager[object]]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def build(name: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    """The model, and a batch for it whose saved tensors come to a few hundred megabytes."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [part for _ in range(12) for part in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers).to(device), torch.randn(8192, 1024, device=device)
    return nn.Sequential(*[Block(256, 4) for _ in range(8)]).to(device), torch.randn(8, 256, 256, device=device)


class TemporaryFile:
    """The tutorial's file: it is deleted when the tensor saved in it is not needed any more."""

    written = 0

    def __init__(self, tensor: torch.Tensor, folder: str) -> None:
        self.name = os.path.join(folder, str(uuid.uuid4()))
        torch.save(tensor, self.name)
        TemporaryFile.written += os.path.getsize(self.name)

    def __del__(self) -> None:
        os.remove(self.name)


def tutorial(folder: str, at_least: int) -> contextlib.AbstractContextManager[object]:
    """The way of torch's tutorial: each saved tensor in a file of its own."""

    def pack(tensor: torch.Tensor) -> object:
        return tensor if tensor.nbytes < at_least else TemporaryFile(tensor, folder)

    def unpack(packed: object) -> torch.Tensor:
        return torch.load(packed.name) if isinstance(packed, TemporaryFile) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Measured:
    """Step times, peaks and bytes of one way."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.grads: list[torch.Tensor] = []
        self.written = 0

    def row(self, base: Measured) -> dict[str, object]:
        step, plain = statistics.median(self.seconds), statistics.median(base.seconds)
        return {
            "step_seconds": round(step, 4),
            "ratio": round(step / plain, 3),
            "added_seconds": round(step - plain, 4),
            "peak_bytes": int(statistics.median(self.peaks)),
            "written_bytes_per_step": self.written,
            "gradients_identical": all(map(torch.equal, self.grads, base.grads)),
        }


def step(model: nn.Module, x: torch.Tensor, way: Way, into: Measured) -> None:
    """One forward and backward, timed, with the peak memory during it."""
    model.zero_grad()
    cuda = x.is_cuda
    torch.cuda.reset_peak_memory_stats() if cuda else dh.memory.reset_peak_resident()
    begin = time.perf_counter()
    with way():
        loss = model(x).square().mean()
    loss.backward()
    if cuda:
        torch.cuda.synchronize()
    into.seconds.append(time.perf_counter() - begin)
    into.peaks.append(torch.cuda.max_memory_allocated() if cuda else dh.memory.peak_resident())
    into.grads = [p.grad.clone() for p in model.parameters()]


def run(args: argparse.Namespace, folder: str) -> dict[str, dict[str, object]]:
    """Every way in turn, ``rounds`` times, after one round that is not counted."""
    model, x = build(args.model, args.device)
    store = dh.OnDisk(folder)
    saved = [dh.saving(store)]
    ways: dict[str, Way] = {
        "nothing": contextlib.nullcontext,
        "torch save_on_cpu": torch.autograd.graph.save_on_cpu,
        "torch.save, a file a tensor": lambda: tutorial(folder, 4096),
        "disthooks OnDisk": lambda: saved[0],
    }
    results = {name: Measured() for name in ways}
    for counted in range(-1, args.rounds):
        for name, way in ways.items():
            TemporaryFile.written, saved[0] = 0, dh.saving(store)
            into = results[name] if counted >= 0 else Measured()
            step(model, x, way, into)
            into.written = TemporaryFile.written + saved[0].report().moved
    return {name: measured.row(results["nothing"]) for name, measured in results.items()}


def machine(device: str) -> dict[str, object]:
    """What the figures came from."""
    about = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in about if line.startswith("model name")), platform.processor())
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memory_returned_promptly": device == "cpu" and dh.memory.release_promptly(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["transformer", "mlp"], default="transformer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default=None, help="where the files live; default the system's temporary one")
    parser.add_argument("--json", type=pathlib.Path, default=None, help="write the results here")
    args = parser.parse_args()
    about = machine(args.device)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        results = run(args, folder)
    print(f"{args.model}, {args.rounds} rounds, {about}")
    print(f"{'':30}{'step':>9}{'ratio':>8}{'added':>9}{'peak':>12}{'written':>12}  exact")
    for name, row in results.items():
        print(
            f"{name:30}{row['step_seconds']:8.3f}s{row['ratio']:8.2f}{row['added_seconds']:8.3f}s"
            f"{format_bytes(row['peak_bytes']):>12}{format_bytes(row['written_bytes_per_step']):>12}"
            f"  {row['gradients_identical']}"
        )
    added = results["disthooks OnDisk"]["added_seconds"] / results["torch.save, a file a tensor"]["added_seconds"]
    print(f"disthooks adds {added:.2f} of the time that a file a tensor adds")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"model": args.model, "machine": about, "added_time_against_tutorial": added, "results": results}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
