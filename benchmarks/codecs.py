"""What each codec makes of what networks save: how much smaller, how fast each way, and how far off.

    python benchmarks/codecs.py
    python benchmarks/codecs.py --device cuda --megabytes 256 --out benchmarks/results/codecs_cuda.json

The tensors are the output of a GELU, of a ReLU and of a LayerNorm of normal noise, and a dropout mask (0 or 1 / 0.9)
with 10% dropped, in float32 and bfloat16, and such a mask as bools. GB/s are of the tensor that goes in or comes out,
the median of several rounds on one thread. "Of copy" is the other figure: bytes read and written each second, the
tensor's and those it becomes, over what a copy of the tensor to other memory of the device reads and writes in the same
round, between the two. The figures are written as JSON with the machine they came from.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import statistics
from collections.abc import Callable

import torch
from accelerator import Device, simulate
from torch.nn import functional
from written import reason, write

import disthooks as dh
from disthooks.saved.codecs.base import Codec, relative_error

CODECS: dict[str, Callable[[], Codec]] = {
    "Quantize(4)": lambda: dh.Quantize(4),
    "Quantize(8)": lambda: dh.Quantize(8),
    "Cast(bfloat16)": lambda: dh.Cast(torch.bfloat16),
    "Cast(float8_e4m3fn)": lambda: dh.Cast(torch.float8_e4m3fn),
    "Cast(float8_e5m2)": lambda: dh.Cast(torch.float8_e5m2),
    "Quantize(4, stochastic=False)": lambda: dh.Quantize(4, stochastic=False),
    "Quantize(8, stochastic=False)": lambda: dh.Quantize(8, stochastic=False),
    "Compact()": lambda: dh.Compact(),
}


def tensors(count: int, device: str) -> dict[str, torch.Tensor]:
    """By name; ``count`` elements each, rounded down to rows of 1024."""
    noise = torch.randn(count // 1024, 1024, generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.rand(noise.shape, generator=torch.Generator().manual_seed(1)).to(device) > 0.1
    floats = {
        "GELU": functional.gelu(noise),
        "ReLU": functional.relu(noise),
        "LayerNorm": functional.layer_norm(noise, (1024,)),
        "dropout mask": mask / 0.9,
    }
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        found |= {f"{name}, {str(dtype).removeprefix('torch.')}": x.to(dtype) for name, x in floats.items()}
    return found | {"dropout mask, bool": mask}


def once(work: Callable[[], object], device: Device) -> float:
    """How long ``work`` takes; on a GPU between two events of its stream, so without the launch of the first kernel."""
    if device.cuda:
        torch.cuda._sleep(200_000)  # the host runs ahead, as in training
    before = device.mark()
    work()
    after = device.mark()
    device.wait()
    return device.between(before, after)


def measure(codec: Codec, tensor: torch.Tensor, rounds: int, device: Device) -> dict[str, float] | None:
    """Ratio, speeds and error; None where the codec leaves the tensor alone."""
    parts, spec = codec.encode(tensor)
    if parts[0] is tensor:
        return None
    billions, small = tensor.nbytes / 1e9, sum(part.nbytes for part in parts)
    back = codec.decode(parts, spec)
    error = float(relative_error(back, tensor)) if codec.lossy else 0.0
    assert codec.lossy or torch.equal(back, tensor)
    ways = {
        "encode": lambda: codec.encode(tensor),
        "copy": lambda: back.copy_(tensor),
        "decode": lambda: codec.decode(parts, spec),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            taken[name].append(once(way, device))
    encode, copy, decode = (statistics.median(times[1:]) for times in taken.values())
    moved = (tensor.nbytes + small) / (2 * tensor.nbytes)
    return {
        "ratio": round(tensor.nbytes / small, 2),
        "encode, GB/s": round(billions / encode, 2),
        "decode, GB/s": round(billions / decode, 2),
        "relative error": float(f"{error:.3g}"),
        "copy, GB/s read and written": round(2 * billions / copy, 1),
        "encode, of copy": round(moved * copy / encode, 3),
        "decode, of copy": round(moved * copy / decode, 3),
    }


def facts(options: argparse.Namespace) -> dict[str, object]:
    """What the figures come from."""
    machine: dict[str, object] = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if options.device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    machine |= {"device": options.device, "python": platform.python_version(), "torch": torch.__version__}
    return machine | {"megabytes": options.megabytes, "rounds": options.rounds, "threads": 1}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", type=int, default=64, help="of each tensor in float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default=str(pathlib.Path(__file__).parent / "results" / "codecs.json"))
    options = parser.parse_args()
    simulate(options.device)
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    not_run: dict[str, str] = {}
    print(f"{'':24}{'':32}{'ratio':>8}{'encode GB/s':>14}{'decode GB/s':>14}{'error':>10}{'of copy, each way':>20}")
    machine, device = facts(options), Device(options.device)
    for name, tensor in tensors(options.megabytes * 2**20 // 4, options.device).items():
        results[name] = {}
        for title, made in CODECS.items():
            try:
                figures = measure(made(), tensor, options.rounds, device)
            except Exception as error:  # no memory, for example: the others run
                not_run[f"{title}, {name}"] = reason(error)
                print(f"{name:24}{title:32} not run: {reason(error)}")
                continue
            if figures is not None:
                results[name][title] = figures
                ratio, encode, decode, error, _, there, back = figures.values()
                print(
                    f"{name:24}{title:32}{ratio:8.2f}{encode:14.2f}{decode:14.2f}{error:10.2g}{there:9.2f}{back:9.2f}"
                )
        # Each time: the rest may find no time.
        write(pathlib.Path(options.out), {"results": results, "machine": machine, "not_run": not_run})


if __name__ == "__main__":
    main()
