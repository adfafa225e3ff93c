"""Ranks that read a wrong configuration: forked from a process that has imported torch, or started by torchrun.

``python wrong_ranks.py FOLDER`` reads names of files from its standard input and answers each with a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh

WORLD = 2
MOST = 120.0  # seconds
# What ranks would import, each anew in every fork; torch's optimizers and DistributedDataParallel take two seconds.
ONCE = ("yaml", "disthooks.config.schema", "torch._dynamo", "torch.distributed.fsdp", "disthooks.engines.fsdp2")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.net(x))


def train(config: str | None) -> None:
    """What a script does: two lines of disthooks in it."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Model()) if dist.is_initialized() else Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.prepare(model, optimizer, config):
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
    print("trained", flush=True)


def _rank(rank: int, store: str, job: dict[str, str]) -> None:
    """One forked rank, to the end of its process."""
    code = 0
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
        os.environ.update(job.get("environment", {}))
        os.chdir(job["folder"])
        sys.path.insert(0, job["folder"])
        sys.stdout = sys.stderr = open(f"{store}.{rank}", "w")  # noqa: SIM115  (until the process ends)
        torch.set_num_threads(1)
        if not job.get("alone"):
            dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
        train(job["second"] if rank and "second" in job else job.get("file"))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _run(job: dict[str, str]) -> list[tuple[int, str]]:
    """The exit code and the output of each rank; -9 for one that hangs."""
    store = tempfile.mktemp(dir=job["folder"], prefix="store-")
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            _rank(rank, store, job)
        children.append(child)
    end = time.monotonic() + MOST
    codes = [_code(child, end) for child in children]
    return [(code, pathlib.Path(f"{store}.{rank}").read_text()) for rank, code in enumerate(codes)]


def _code(child: int, end: float) -> int:
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        train(sys.argv[1])
    else:
        for name in ONCE:
            importlib.import_module(name)
        for line in sys.stdin:
            print(json.dumps(_run(json.loads(line))), flush=True)
