"""One way on one workload: steps of it and of nothing in turn, and what came of them."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerator import Device
from peers import NOTHING, ON_CPU
from ways import Absent, Way, Ways
from workloads import Workload

from disthooks.cli import doctor


@dataclasses.dataclass
class Step:
    """Seconds by the device's own clock, of the whole by the host's too; and the peak."""

    forward: float
    backward: float
    wall: float
    peak: int

    @property
    def seconds(self) -> float:
        """Of the device."""
        return self.forward + self.backward


class Bench:
    """A workload and its rows.

    Args:
        repeats: timed steps of each way, a step of nothing before each.
        left: seconds that are left of the time for everything.
    """

    def __init__(self, device: Device, work: Workload, repeats: int, left: Callable[[], float]) -> None:
        self.device, self.work, self.repeats, self.left = device, work, repeats, left
        self.ways = Ways(device, work)
        self.rows: dict[str, dict[str, Any]] = {}
        self._truth: list[torch.Tensor] = []  # gradients without hooks, in host memory
        self._saved = (0, 0)  # bytes, and bytes as they are page-locked by torch
        self._took = {True: 0.0, False: 0.0}  # seconds of the last row of ours, and of others

    def row(self, name: str) -> dict[str, Any]:
        """Measure ``name``, or say why not; no failure of one way ends the others."""
        begin = time.perf_counter()
        ours = name.startswith("disthooks")
        if self.left() <= 1.2 * self._took[ours] + self._locking(name):
            found: dict[str, Any] = {"not_run": "no time was left"}
        else:
            self.ways.rest(name)
            try:
                found = self._measured(name, self._made(name))
            except Absent as error:
                found = {"not_run": str(error)}
            except Exception as error:  # out of memory, most likely: the next one is smaller
                found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
                traceback.clear_frames(error.__traceback__)
            self.work.model.zero_grad()
            if "step_ms" in found:
                self._took[ours] = time.perf_counter() - begin
        self.rows[name] = found
        return found

    def _locking(self, name: str) -> float:
        """Seconds that page-locking alone will take, in the rows that begin with it: ours all use one pool."""
        if self.device.locks_per_s is None:
            return 0.0
        first_of_ours = name.startswith("disthooks") and not self._took[True]
        return (self._saved[1] if name == ON_CPU else first_of_ours * self._saved[0]) / self.device.locks_per_s

    def _made(self, name: str) -> Way:
        if name == ON_CPU and self.device.cuda:
            there = doctor.memory_facts()["available_bytes"] or 0
            if self._saved[1] > 7 / 8 * there:  # with less left the system ends this process, and all rows to come
                raise Absent(f"it would page-lock {self._saved[1] / 1e9:.0f} GB of {there / 1e9:.0f} GB that are free")
        return self.ways.made[name](self.rows)

    def _measured(self, name: str, way: Way) -> dict[str, Any]:
        plain = Way()
        if name == NOTHING:
            self._count_saved()
        for _ in range(2):
            self._step(way)
        compared = self._compare(name, way)
        steps, others = [], []
        for _ in range(self.repeats):
            if steps and self.left() < 0:
                break
            if name != NOTHING:
                others.append(self._step(plain))
            steps.append(self._step(way))
        return self._figures(way, steps, others or steps) | compared

    def _figures(self, way: Way, steps: Sequence[Step], others: Sequence[Step]) -> dict[str, Any]:
        def median(all_: Sequence[Step], name: str) -> float:
            return statistics.median(getattr(one, name) for one in all_)

        seconds, plain = median(steps, "seconds"), median(others, "seconds")
        found: dict[str, Any] = {
            "step_ms": 1e3 * seconds,
            "wall_ms": 1e3 * median(steps, "wall"),
            "forward_ms": 1e3 * median(steps, "forward"),
            "backward_ms": 1e3 * median(steps, "backward"),
            "nothing_beside_it_ms": 1e3 * plain,
            "ratio": seconds / plain,
        }
        found = {key: round(value, 4) for key, value in found.items()}
        found |= {"peak_bytes": int(median(steps, "peak")), "steps": len(steps)}
        found["steps_ms"] = [round(1e3 * one.seconds, 3) for one in steps]
        report = way.report()
        if report is not None:
            found |= {"stored_bytes": report.stored, "moved_bytes": report.moved, "loaded_bytes": report.loaded}
            found |= {"kept_bytes": report.kept_by, "said": str(report).splitlines()}
        return found

    def _step(self, way: Way) -> Step:
        """One forward and backward."""
        self.work.model.zero_grad()
        with way.whole():
            self.device.wait()
            self.device.reset_peak()
            begin, first = time.perf_counter(), self.device.mark()
            with way.around():
                loss = self.work.forward()
            middle = self.device.mark()
            loss.backward()
            last = self.device.mark()
            self.device.wait()
            wall = time.perf_counter() - begin
            del loss
        between = self.device.between
        return Step(between(first, middle), between(middle, last), wall, self.device.peak())

    def _compare(self, name: str, way: Way) -> dict[str, Any]:
        """The gradients of the last step with those of a step without hooks; that with itself, for what it varies."""
        grads = [p.grad for p in self.work.model.parameters() if p.grad is not None]
        if name != NOTHING and not self._truth:  # a step without hooks failed
            return {"gradients_identical": None, "gradient_error": None, "exact": way.exact}
        if not self._truth:
            self._truth = [grad.to("cpu", copy=True) for grad in grads]
            self._step(Way())
            grads = [p.grad for p in self.work.model.parameters() if p.grad is not None]
        same, off, all_ = len(grads) == len(self._truth), 0.0, 0.0
        for grad, other in zip(grads, self._truth, strict=False):
            true = other.to(grad.device)
            same &= torch.equal(grad, true)
            off += float((grad.double() - true.double()).square().sum())
            all_ += float(true.double().square().sum())
        return {"gradients_identical": same, "gradient_error": (off / all_) ** 0.5 if all_ else 0.0, "exact": way.exact}

    def _count_saved(self) -> None:
        """Bytes of all that is saved, views counted each time, as others move them."""
        total = rounded = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total, rounded
            total += tensor.nbytes
            rounded += 1 << max(0, tensor.nbytes - 1).bit_length()  # torch page-locks powers of two
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.work.forward()
        self._saved = total, rounded

    def about(self) -> dict[str, Any]:
        """What all rows have in common."""
        return self.work.about | {"saved_bytes": self._saved[0], "saved_bytes_page_locked_by_torch": self._saved[1]}


@contextlib.contextmanager
def alike() -> Any:
    """cuDNN gives the same bits each time, for every way alike."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
