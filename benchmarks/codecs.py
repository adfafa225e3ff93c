"""What each codec makes of what networks save: how much smaller, how fast each way, and how far off.

    python benchmarks/codecs.py                      # or: --device cuda --megabytes 256

The tensors are the output of a GELU, of a ReLU and of a LayerNorm of normal noise, and a dropout mask (0 or 1 / 0.9)
with 10% dropped, in float32 and bfloat16, and such a mask as bools. GB/s are of the tensor that goes in or comes out,
the median of several rounds on one thread. The figures are written as JSON with the machine they came from.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

import disthooks as dh
from disthooks.saved.codecs.base import Codec, relative_error

CODECS: dict[str, Codec] = {
    "Cast(bfloat16)": dh.Cast(torch.bfloat16),
    "Cast(float8_e4m3fn)": dh.Cast(torch.float8_e4m3fn),
    "Cast(float8_e5m2)": dh.Cast(torch.float8_e5m2),
    "Quantize(8)": dh.Quantize(8),
    "Quantize(8, stochastic=False)": dh.Quantize(8, stochastic=False),
    "Quantize(4)": dh.Quantize(4),
    "Quantize(4, stochastic=False)": dh.Quantize(4, stochastic=False),
    "Compact()": dh.Compact(),
    "Compress('zstd')": dh.Compress("zstd"),
    "Compress('lz4')": dh.Compress("lz4"),
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


def seconds(work: Callable[[], object], rounds: int, device: str) -> float:
    """The median time of ``work``, what the device does included."""
    taken = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def measure(codec: Codec, tensor: torch.Tensor, rounds: int) -> dict[str, float] | None:
    """Ratio, speeds and error; None where the codec leaves the tensor alone."""
    parts, spec = codec.encode(tensor)
    if parts[0] is tensor:
        return None
    kind, billions = tensor.device.type, tensor.nbytes / 1e9
    back = codec.decode(parts, spec)
    error = float(relative_error(back, tensor)) if codec.lossy else 0.0
    assert codec.lossy or torch.equal(back, tensor)
    return {
        "ratio": round(tensor.nbytes / sum(part.nbytes for part in parts), 2),
        "encode, GB/s": round(billions / seconds(lambda: codec.encode(tensor), rounds, kind), 2),
        "decode, GB/s": round(billions / seconds(lambda: codec.decode(parts, spec), rounds, kind), 2),
        "relative error": float(f"{error:.3g}"),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", type=int, default=64, help="of each tensor in float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default=str(pathlib.Path(__file__).parent / "results" / "codecs.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'':24}{'':32}{'ratio':>8}{'encode GB/s':>14}{'decode GB/s':>14}{'error':>10}")
    for name, tensor in tensors(options.megabytes * 2**20 // 4, options.device).items():
        results[name] = {}
        for title, codec in CODECS.items():
            figures = measure(codec, tensor, options.rounds)
            if figures is not None:
                results[name][title] = figures
                ratio, encode, decode, error = figures.values()
                print(f"{name:24}{title:32}{ratio:8.2f}{encode:14.2f}{decode:14.2f}{error:10.2g}")
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"device": options.device, "python": platform.python_version(), "torch": torch.__version__}
    machine |= {"megabytes": options.megabytes, "rounds": options.rounds, "threads": 1}
    pathlib.Path(options.out).write_text(json.dumps({"results": results, "machine": machine}, indent=2) + "\n")


if __name__ == "__main__":
    main()
