"""All statistics of gradients on the CPU: this checkout, an older commit and torch's ``clip_grad_norm_`` in turn.

    python benchmarks/reading.py 69914ba --turns 15

Gradients are given to an optimizer that does nothing, so a step is the reading of its gradients and the record that is
made of them. Two processes, one with the code of each commit, have the same gradients and take turns, step by step;
``clip_grad_norm_`` runs in each turn too. Printed and written as JSON are, for each kind of gradients and number of
threads: medians in milliseconds, medians of the ratios of one turn each, how many operators a step calls, and how many
bytes they read and write for each byte of the gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

HERE = pathlib.Path(__file__).resolve().parent
CASES = {  # name: sizes of the gradients, dtype
    "2,000 small, float32": ([4096, 12544, 112, 37632] * 500, torch.float32),
    "2,000 small, bfloat16": ([4096, 12544, 112, 37632] * 500, torch.bfloat16),
    "4 large, float32": ([2**23] * 4, torch.float32),
    "4 large, bfloat16": ([2**23] * 4, torch.bfloat16),
}


class Idle(torch.optim.Optimizer):
    """Does nothing in its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Touched(TorchDispatchMode):
    """Counts the operators, and the bytes of the tensors that they read and write. Views are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:
            self.operators += 1
            given = [*args, *(kwargs or {}).values(), *(made if isinstance(made, (tuple, list)) else [made])]
            flat = [t for each in given for t in (each if isinstance(each, (tuple, list)) else [each])]
            tensors = {id(t): t for t in flat if isinstance(t, torch.Tensor)}
            self.bytes += sum(t.numel() * t.element_size() for t in tensors.values())
        return made


class Timed:
    """The seconds that passed inside, and the seconds in which this process ran on a core."""

    def __enter__(self) -> Timed:
        self._begin = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: Any) -> None:
        self.seconds = [time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]]


class Worker:
    """Steps of one commit's code, on request."""

    def __init__(self) -> None:
        self.parameters: dict[str, list[nn.Parameter]] = {}

    def gradients(self, case: str) -> list[nn.Parameter]:
        if case not in self.parameters:
            self.parameters.clear()  # of one case at a time
            sizes, dtype = CASES[case]
            generator = torch.Generator().manual_seed(0)
            self.parameters[case] = parameters = [nn.Parameter(torch.empty(size, dtype=dtype)) for size in sizes]
            for parameter in parameters:
                parameter.grad = (1e-3 * torch.randn(parameter.shape, generator=generator)).to(dtype)
        return self.parameters[case]

    def run(self, case: str, what: str, threads: int) -> list[float]:
        import disthooks as dh

        torch.set_num_threads(threads)
        parameters = self.gradients(case)
        if what == "clip":
            with Timed() as timed:
                torch.nn.utils.clip_grad_norm_(parameters, 1e9)
            return timed.seconds
        optimizer = Idle(parameters)
        with dh.gradients(nn.ParameterList(parameters), optimizer, stats=dh.stats.standard(), every=1) as watch:
            optimizer.step()
            watch.flush()
            if what == "count":
                with Touched() as touched:
                    optimizer.step()
                    watch.flush()
                size = sum(p.numel() * p.element_size() for p in parameters)
                return [touched.operators, round(touched.bytes / size, 2)]
            with Timed() as timed:
                optimizer.step()
                watch.flush()
            return timed.seconds


class Process:
    """A worker in a process of its own, with the code of the checkout ``root``."""

    def __init__(self, root: pathlib.Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(root)}
        environment.pop("OMP_NUM_THREADS", None)
        command = [sys.executable, str(HERE / "reading.py"), "--worker"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": root}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def run(self, *asked: Any) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        result: list[float] = json.loads(self._process.stdout.readline())
        return result

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(now: Process, before: Process, case: str, threads: int, turns: int) -> dict[str, Any]:
    """Medians and ratios of one kind of gradients.

    Processor time counts what other programs on the machine do not disturb. With one thread it is the figure to look
    at; with several threads it also has the time in which threads wait for each other.
    """
    times: dict[str, list[list[float]]] = {"now": [], "before": [], "clip_grad_norm_": []}
    for turn in range(-1, turns):
        found = {}
        for name in ("now", "before") if turn % 2 else ("before", "now"):
            found[name] = (now if name == "now" else before).run(case, "statistics", threads)
        found["clip_grad_norm_"] = now.run(case, "clip", threads)
        if turn >= 0:
            for name, seconds in found.items():
                times[name].append(seconds)
    result: dict[str, Any] = {}
    for i, clock in enumerate(("wall", "processor")):
        values = {name: [seconds[i] for seconds in rows] for name, rows in times.items()}
        pairs = {name: [a / b for a, b in zip(values["now"], values[name], strict=True)] for name in values}
        result[clock] = {
            "milliseconds": {name: round(1e3 * statistics.median(each), 2) for name, each in values.items()},
            "now / before": round(statistics.median(pairs["before"]), 3),
            "now / clip_grad_norm_": round(statistics.median(pairs["clip_grad_norm_"]), 2),
        }
    counts = {name: process.run(case, "count", threads) for name, process in (("now", now), ("before", before))}
    result["operators"] = {name: count[0] for name, count in counts.items()}
    result["bytes read and written for each byte"] = {name: count[1] for name, count in counts.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="the older commit: a tag, a branch or a hash")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=pathlib.Path, default=HERE / "results" / "reading.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker = Worker()
        for line in sys.stdin:
            print(json.dumps(worker.run(*json.loads(line))), flush=True)
        return
    if options.commit is None:
        parser.error("say the older commit")
    git = ["git", "-C", str(HERE.parent)]
    commit = subprocess.check_output([*git, "rev-parse", f"{options.commit}^{{commit}}"], text=True).strip()
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"python": platform.python_version(), "torch": torch.__version__, "turns": options.turns}
    results: dict[str, Any] = {}
    whole = {"before": commit, "machine": machine, "results": results}
    with tempfile.TemporaryDirectory(prefix="disthooks-before-") as folder:
        older = pathlib.Path(folder) / "before"
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(older), commit], check=True)
        now, before = Process(HERE.parent), Process(older)
        try:
            for case in CASES:
                for threads in options.threads:
                    found = results[f"{case}, {threads} threads"] = measure(now, before, case, threads, options.turns)
                    print(f"{case}, {threads} threads: {json.dumps(found)}", flush=True)
                    # Written after each, so that an interrupt loses no more than the one under way.
                    options.json.write_text(json.dumps(whole, indent=1) + "\n")
        finally:
            now.stop()
            before.stop()
            subprocess.run([*git, "worktree", "remove", "--force", str(older)], check=True)


if __name__ == "__main__":
    main()
