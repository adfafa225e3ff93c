"""Two real processes that stay up between tests and run the functions they are given, on the CPU or on GPUs.

A fresh pair costs two imports of torch for every test; this pair pays once. A rank that raises has its
traceback relayed, a rank that hangs is made to print its stack and killed, and the next test gets a new pair.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

WORLD = 2
#: Of one process. Each group that a test made and left keeps one, which gloo wakes a hundred times a second.
MOST_THREADS = 80


class RankError(AssertionError):
    """What went wrong in the ranks, one section a rank."""


def _serve(rank: int, world: int, device: str, folder: str, pipe: multiprocessing.connection.Connection) -> None:
    stack = pathlib.Path(folder, f"stack.{rank}").open("w")  # noqa: SIM115  (open as long as the process is)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack, all_threads=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist

    import disthooks as dh

    dh.OnDisk.min_bytes = dh.OnCpu.min_bytes = 4096  # as in conftest.py
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        count = torch.cuda.device_count()
        backend = "nccl" if count >= world else "gloo"  # nccl refuses two ranks on one device
        torch.cuda.set_device(rank % count)
    if device != "cpu":
        from tests.support.switch import Here

        Here(device).__enter__()
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    linear = torch.nn.functional.linear
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            break
        pipe.send(_run(rank, job))
        torch.nn.functional.linear = linear  # DeepSpeed's ZeRO-3 replaces it by a Function of its own, for good
    os._exit(0)  # a rank whose peer was killed could wait for it in a destructor


def _run(rank: int, job: bytes) -> tuple[str, Any]:
    try:
        path, cwd, call = pickle.loads(job)
        sys.path[:] = path
        os.chdir(cwd)
        function, args = pickle.loads(call)
        return "value", function(rank, *args)
    except BaseException:
        return "error", traceback.format_exc()


class Ranks:
    """Call it with a top-level function ``f(rank, *args)``: the list of what each rank returned."""

    def __init__(self, world: int = WORLD, timeout: float = 300.0, device: str = "cpu") -> None:
        self.world, self.timeout, self.device = world, timeout, device
        self._workers: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run ``function`` on every rank; RankError with every traceback if any raised or none answered."""
        if not self._workers:
            self._start()
        job = pickle.dumps((sys.path, os.getcwd(), pickle.dumps((function, args))))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        answers = self._collect(time.monotonic() + (timeout or self.timeout))
        if any(kind == "error" for kind, _ in answers):
            self.stop()
            raise RankError("\n".join(f"--- rank {r} ---\n{a[1]}" for r, a in enumerate(answers) if a[0] == "error"))
        if len(os.listdir(f"/proc/{self._workers[0].pid}/task")) > MOST_THREADS:
            self.stop()  # a fresh pair costs less than these at rest
        return [value for _, value in answers]

    def _collect(self, deadline: float) -> list[tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < self.world:
            if any(kind == "error" for kind, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 3)  # its peers may wait for it in a collective
            waiting = [pipe for r, pipe in enumerate(self._pipes) if r not in answers]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    code = self._workers[rank].join(60) or self._workers[rank].exitcode
                    stack = pathlib.Path(self._folder.name, f"stack.{rank}").read_text()
                    answers[rank] = ("error", f"the process died with exit code {code}\n{stack}")
            if not ready:
                answers |= {r: ("error", self._stack(r)) for r in range(self.world) if r not in answers}
        return [answers[r] for r in range(self.world)]

    def _stack(self, rank: int) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._workers[rank].pid, signal.SIGUSR1)
        file, end = pathlib.Path(self._folder.name, f"stack.{rank}"), time.monotonic() + 60
        while not file.stat().st_size and self._workers[rank].is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)  # for the rest of it
        return f"no answer in time; it stood at\n{file.read_text()}"

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.world):
            here, there = spawn.Pipe()
            given = (rank, self.world, self.device, self._folder.name, there)
            worker = spawn.Process(target=_serve, args=given, daemon=True)
            worker.start()
            there.close()
            self._workers.append(worker)
            self._pipes.append(here)

    def stop(self) -> None:
        """Kill the processes; the next call starts new ones."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        if self._workers:
            self._folder.cleanup()
        self._workers, self._pipes = [], []
