"""The first two minutes on a GPU: what the machine gives, and whether what everything else rests on works there.

    make bench NAME=gpu_first                                         # or: python benchmarks/gpu_first.py --limit 115
    python benchmarks/gpu_first.py --device cpu --size tiny           # to see that it runs

In this order: the memory and the packages; the speed of page-locking; the link, one way, the other way and both at
once; batch norm of cuDNN computed again, bit for bit or not; six steps of one lasting ``Recompute`` attachment; the
tests of transfers and of codecs. Each part that fails or is missing is named with its reason. The JSON is written after
every part, so a command that is ended loses nothing that it had found.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerator import Device, simulate
from workloads import image, language
from written import reason, write

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores.host import node_memory

ROOT = pathlib.Path(__file__).parent.parent
#: What other commands of docs/gpu.md use where it is installed.
PACKAGES = (
    "pytest",
    "xdist",
    "pytest_timeout",
    "expecttest",
    "hypothesis",
    "numpy",
    "matplotlib",
    "pydantic",
)
PACKAGES += ("trl", "transformers", "accelerate", "torchtune", "transformer_engine")
TESTS = ("tests/gpu/test_transfer_gpu.py", "tests/gpu/test_codecs_gpu.py")
STEPS = 6


class First:
    """All parts in order.

    Attributes:
        found: what is written.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin, self.found = options, time.monotonic(), dict[str, Any]()
        self.full = options.size == "full"

    def left(self) -> float:
        """Seconds."""
        return self.begin + self.options.limit - time.monotonic()

    def all_parts(self) -> None:
        """No failure of one part ends the others."""
        self._part("packages", packages)
        self._part("memory", memory)
        try:
            device = Device(self.options.device)
            self._part("machine", device.about)
        except Exception as error:  # a driver that does not fit: the parts above say what is there
            self.found["device"] = {"failed": reason(error)}
            self._write()
            return
        self._part("page_locking", lambda: page_locking(device, self.full))
        self._part("link", lambda: device.link(1 << (30 if self.full else 20)))
        self._part("both_ways", lambda: both_ways(device, 1 << (30 if self.full else 20)))
        size = "first" if self.full else "tiny"
        for name, options in (
            ("batch norm, NCHW fp32", {}),
            ("batch norm, channels_last bf16", {"bf16": True, "channels_last": True}),
        ):
            self._part(name, lambda options=options: six_steps(device, image(size, device.device, **options)))
        self._part("decoder, bf16", lambda: six_steps(device, language(size, device.device)))
        for test in TESTS:
            self._part(test, lambda test=test: self._tests(test))

    def _part(self, name: str, work: Callable[[], Any]) -> None:
        begin = time.monotonic()
        if self.left() <= 0:
            self.found[name] = {"not_run": "no time was left"}
        else:
            try:
                self.found[name] = work()
            except Exception as error:
                self.found[name] = {"failed": reason(error)}
            if isinstance(self.found[name], dict):
                self.found[name]["took_s"] = round(time.monotonic() - begin, 2)
        print(f"{name}: {json.dumps(self.found[name])}", flush=True)
        self._write()

    def _write(self) -> None:
        if self.options.json:
            write(self.options.json, self.found)

    def _tests(self, test: str) -> dict[str, Any]:
        """In a process of its own, which ends when the time does."""
        if importlib.util.find_spec("pytest") is None:
            return {"not_run": "pytest is not installed"}
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "found.json")
            groups = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py"), "--only", test, "--json", str(out)]
            groups += ["--limit", str(max(1, int(self.left()))), "--device", self.options.device]
            groups += ["--jobs", "6" if self.full else "1"]
            subprocess.run(groups, cwd=ROOT, capture_output=True, timeout=self.left() + 20, check=False)
            return json.loads(out.read_text())["groups"][test]


def packages() -> dict[str, Any]:
    """The version of each, or None."""
    found: dict[str, Any] = {name: importlib.util.find_spec(name) is not None for name in PACKAGES}
    return found | {"python": sys.version.split()[0], "torch": torch.__version__}


def memory() -> dict[str, Any]:
    """What the host has, now, and may page-lock; a virtual machine may get more as it is used."""
    found: dict[str, Any] = {}
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    names = ("MemTotal", "MemFree", "MemAvailable", "Mlocked", "HugePages_Total")
    found["meminfo"] = {name: line.split()[1] for line in lines if (name := line.partition(":")[0]) in names}
    found["cores"] = len(os.sched_getaffinity(0))
    return found


def page_locking(device: Device, full: bool) -> dict[str, Any]:
    """Bytes a second that the driver registers, of blocks that grow; memory that is touched first, and not."""
    if not device.cuda:
        return {"not_run": "only CUDA page-locks"}
    found: dict[str, Any] = {}
    available = (node_memory() or (0,))[0]
    for nbytes in (1 << 28, 1 << 30, 1 << 32) if full else (1 << 20,):
        if nbytes > available / 4:
            found[str(nbytes)] = {"not_run": f"of {available} bytes that are free"}
            continue
        host = torch.empty(nbytes, dtype=torch.uint8)
        begin = time.perf_counter()
        host.fill_(1)
        touched = time.perf_counter()
        error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0))
        end = time.perf_counter()
        row: dict[str, Any] = {"touch_bytes_per_s": nbytes / (touched - begin)}
        if error:
            row["refused"] = error
        else:
            row["register_bytes_per_s"] = nbytes / (end - touched)
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
            row["unregister_s"] = round(time.perf_counter() - end, 4)
        found[str(nbytes)] = row
        del host
    return found


def both_ways(device: Device, nbytes: int) -> dict[str, Any]:
    """Copies to the host and from it on two streams at once: bytes a second of each, by the time of both together."""
    here = [torch.empty(nbytes, dtype=torch.uint8, device=device.device) for _ in range(2)]
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.cuda) for _ in range(2)]
    streams = [torch.Stream(device.device) for _ in range(2)] if device.behind else []

    def run() -> None:
        if not streams:
            host[0].copy_(here[0])
            here[1].copy_(host[1])
            return
        for stream in streams:
            stream.wait_stream(torch.accelerator.current_stream())
        with streams[0]:
            host[0].copy_(here[0], non_blocking=True)
        with streams[1]:
            here[1].copy_(host[1], non_blocking=True)
        for stream in streams:
            torch.accelerator.current_stream().wait_stream(stream)

    return {"each_way": nbytes / device.median(run)}


def six_steps(device: Device, work: Any) -> dict[str, Any]:
    """One attachment for all steps: what is dropped in each, what was not the same bits, and whether gradients are."""

    def step() -> list[torch.Tensor]:
        work.model.zero_grad()
        work.forward().backward()
        return [p.grad for p in work.model.parameters() if p.grad is not None]

    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        truth = [grad.clone() for grad in step()]
        again = all(torch.equal(a, b) for a, b in zip(step(), truth, strict=True))
        with dh.save_activations(work.model, "", pipeline(dh.Recompute(), dh.OnDevice())) as saving:
            same, peaks = [], []
            for _ in range(STEPS):
                work.model.zero_grad()
                device.wait()
                device.reset_peak()
                same.append(all(torch.equal(a, b) for a, b in zip(step(), truth, strict=True)))
                device.wait()
                peaks.append(device.peak())
            report = saving.report()
    finally:
        torch.backends.cudnn.deterministic = before
    found = {"recomputed_in_steps": list(report.recomputed_in_steps), "recomputed_by": report.recomputed_by}
    found |= {"differed": report.differed, "stored": report.stored, "proof_waits": report.proof_waits}
    return found | {"identical_in_steps": same, "identical_without_hooks": again, "peak_bytes_in_steps": peaks}


def main() -> None:
    """Find, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu, or sim, the simulated accelerator: to see that it runs")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--limit", type=float, default=115.0, help="seconds for all")
    parser.add_argument("--json", type=pathlib.Path, help="default results/gpu-first.json; of a tiny run, nowhere")
    options = parser.parse_args()
    if options.size == "full":
        options.json = options.json or pathlib.Path(__file__).parent / "results" / "gpu-first.json"
    simulate(options.device)
    First(options).all_parts()


if __name__ == "__main__":
    main()
