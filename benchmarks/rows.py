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
from written import reason

from disthooks.saved.report import SavedReport
from disthooks.saved.stores.host import node_memory


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
        self._has_locked = False  # whether ours have their page-locked memory

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
                found = {"failed": reason(error)}
                traceback.clear_frames(error.__traceback__)
            self.work.model.zero_grad()
            if "step_ms" in found:
                self._took[ours] = time.perf_counter() - begin
                self._has_locked |= self._page_locks(name)
        self.rows[name] = found
        return found

    def _locking(self, name: str) -> float:
        """Seconds that page-locking alone will take, in the rows that begin with it: ours all use one pool."""
        if self.device.locks_per_s is None:
            return 0.0
        first_of_ours = self._page_locks(name) and not self._has_locked
        return (self._saved[1] if name == ON_CPU else first_of_ours * self._saved[0]) / self.device.locks_per_s

    def _page_locks(self, name: str) -> bool:
        return name.startswith("disthooks") and "OnDevice" not in name

    def _made(self, name: str) -> Way:
        if name == ON_CPU and self.device.cuda:
            there = (node_memory() or (0,))[0]
            if self._saved[1] > 7 / 8 * there:  # with less left the system ends this process, and all rows to come
                raise Absent(f"it would page-lock {self._saved[1] / 1e9:.0f} GB of {there / 1e9:.0f} GB that are free")
        return self.ways.made[name](self.rows)

    def _measured(self, name: str, way: Way) -> dict[str, Any]:
        plain = Way()
        if name == NOTHING:
            self._count_saved()
        with way.attached():
            first = [self._step(way) for _ in range(2)]
            compared = self._compare(name, way)
            steps, others, before = [], [], way.report()
            for _ in range(self.repeats):
                if steps and self.left() < 0:
                    break
                if name != NOTHING:
                    with way.aside():
                        others.append(self._step(plain))
                steps.append(self._step(way))
            found = self._figures(steps, others or steps) | compared
            found["first_steps"] = [{"step_ms": round(1e3 * one.seconds, 3), "peak_bytes": one.peak} for one in first]
            return found | self._bytes(before, way.report(), len(steps))

    def _bytes(self, before: SavedReport | None, after: SavedReport | None, steps: int) -> dict[str, Any]:
        """What ours says of a step, and of the steps before it."""
        if before is None or after is None:
            return {}
        names = ("stored", "moved", "loaded")
        found: dict[str, Any] = {f"{n}_bytes": (getattr(after, n) - getattr(before, n)) // steps for n in names}
        found |= {"kept_bytes": {why: count // after.calls for why, count in after.kept_by.items()}}
        found |= {"recomputed_in_steps": list(after.recomputed_in_steps), "differed": after.differed}
        return found | {"said": str(after).splitlines()}

    def _figures(self, steps: Sequence[Step], others: Sequence[Step]) -> dict[str, Any]:
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
        return found

    def _step(self, way: Way) -> Step:
        """One forward and backward."""
        self.work.model.zero_grad()
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
