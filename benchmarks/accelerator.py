"""What ``gpu.py`` asks of a device: times, peaks, the link, what it is. All that is said of CUDA is here."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import disthooks as dh
from disthooks.saved.stores.host import node_memory


class Device:
    """A device by its kind: "cuda", "cpu", or another accelerator's name.

    Attributes:
        locks_per_s: bytes of host memory that the driver page-locks in a second, once :meth:`link` has tried.
    """

    def __init__(self, kind: str) -> None:
        self.cuda, self.behind = kind == "cuda", kind != "cpu"
        self.locks_per_s: float | None = None
        self.device = torch.device(kind)
        if self.behind:
            self.device = torch.device(kind, torch.accelerator.current_device_index())

    def wait(self) -> None:
        """Until all is done."""
        if self.behind:
            torch.accelerator.synchronize()

    def mark(self) -> Any:
        """A point in the device's work, or of time where the host does it."""
        if not self.cuda:
            self.wait()
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two marks; the work before them must be done."""
        return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3

    def reset_peak(self) -> None:
        """From now on."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            dh.memory.reset_peak_resident()

    def peak(self) -> int:
        """Most bytes of tensors on the device since then; resident memory of the process where that is not counted."""
        return torch.cuda.max_memory_allocated() if self.cuda else dh.memory.peak_resident()

    def empty(self) -> None:
        """Give memory back that torch keeps, the host's page-locked too."""
        gc.collect()
        self.wait()
        if self.cuda:
            torch.cuda.empty_cache()
            with contextlib.suppress(AttributeError):  # private; without it the host's stays
                torch._C._host_emptyCache()

    def link(self, nbytes: int) -> dict[str, float]:
        """Bytes a second that page-locked copies and copies on the device reach; those count reads and writes."""
        here, there = (torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        begin = time.perf_counter()
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.cuda)
        if self.cuda:
            self.locks_per_s = nbytes / (time.perf_counter() - begin)
        copies: dict[str, tuple[Callable[[], object], int]] = {
            "to_host": (lambda: host.copy_(here, non_blocking=True), 1),
            "to_device": (lambda: here.copy_(host, non_blocking=True), 1),
            "on_device": (lambda: there.copy_(here), 2),
        }
        return {name: times * nbytes / self.median(copy) for name, (copy, times) in copies.items()}

    def median(self, work: Callable[[], object]) -> float:
        """Seconds of the device for ``work``."""
        taken = []
        for _ in range(8):
            begin = self.mark()
            work()
            end = self.mark()
            self.wait()
            taken.append(self.between(begin, end))
        return statistics.median(taken[1:])

    def about(self) -> dict[str, Any]:
        """What the figures come from."""
        cpu = ""
        with contextlib.suppress(OSError):
            lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
        found: dict[str, Any] = {
            "device": self.device.type,
            "cpu": cpu or platform.processor(),
            "cores": os.cpu_count(),
        }
        found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
        found |= {"host_memory_bytes": (node_memory() or (0, None))[1]}
        if self.cuda:
            about = torch.cuda.get_device_properties(self.device)
            found |= {"gpu": about.name, "gpu_memory_bytes": about.total_memory}
            found |= {"multiprocessors": about.multi_processor_count, "cudnn": torch.backends.cudnn.version()}
        return found


def simulate(kind: str) -> None:
    """Have the simulated accelerator there, if it is the one that was asked for."""
    if kind == "sim":
        sys.path.append(str(pathlib.Path(__file__).parent.parent))
        from tests.support.sim import simulated

        simulated.load()
