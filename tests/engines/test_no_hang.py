"""Law 12's other half: ranks that differ, and a rank that fails, never leave the others waiting for ever."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from tests.support.engines import close
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist
STEPS = 500
BRANCHES = 6


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 3)
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(BRANCHES))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return sum((self.parts[i](x) for i in chosen), self.stem(x))


def chosen(rank: int, step: int) -> list[int]:
    """Any of the branches, none of them included."""
    return [i for i in range(BRANCHES) if random.Random(f"{rank} {step} {i}").random() < 0.4]


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + rank))
    return (model(x, chosen(rank, step)) - 1).square().mean()


def _rules() -> dict[str, Any]:
    rules = [dh.ClipNorm(0.5), dh.only("parts.*", dh.ClipValue(0.1))]
    return {"rules": rules, "stats": [stats.Norm(per_parameter=True), stats.MaxAbs(), stats.NonFinite()], "every": 7}


def _random(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = nn.parallel.DistributedDataParallel(Branches().double(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms = []
    with dh.gradients(model, optimizer, **_rules(), sinks=[]) as watch:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            norms.append(watch.latest.get("grad_norm", 0.0))
    return norms, dict(model.module.state_dict())


def test_random_parameters_unused_on_random_ranks_for_500_steps(ranks: Ranks) -> None:
    model = Branches().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms = []
    with dh.gradients(model, optimizer, **_rules()) as watch:
        for step in range(STEPS):
            optimizer.zero_grad()
            ((loss(model, 0, step) + loss(model, 1, step)) / 2).backward()
            optimizer.step()
            norms.append(watch.latest.get("grad_norm", 0.0))
    for found, state in ranks(_random):
        assert close(found, norms, 1e-9)
        assert close(state, dict(model.state_dict()), 1e-9)


# --- processes that are started by hand


def _started(code: str, *words: str, world: int) -> list[subprocess.Popen[str]]:
    """A process for each rank: its number, and ``words``."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, str(rank), *words], **pipes) for rank in range(world)]  # type: ignore[call-overload]


FAILS = """
import datetime, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import disthooks as dh
rank, path, how, engine = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=8))
model = torch.nn.Linear(4, 4)
if engine == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), 0

def broken(name, grad):
    if rank == 1 and step == 3:
        raise ArithmeticError("only here")
    return grad

watch = dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0), broken, dh.ClipNorm(0.5)])
try:
    for step in range(6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
except ArithmeticError:
    if how == "stays":  # as in a notebook: the process lives on
        time.sleep(600)
    raise
"""


@pytest.mark.parametrize(
    ("how", "engine"), [("dies", "ddp"), ("dies", "fsdp2"), pytest.param("stays", "ddp", marks=pytest.mark.full_tier)]
)
def test_a_rule_that_raises_on_one_rank_ends_the_others(how: str, engine: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        processes = _started(FAILS, f"{folder}/store", how, engine, world=2)
        _, told = processes[0].communicate(timeout=300)
        processes[1].kill() if how == "stays" else None
        _, raised = processes[1].communicate(timeout=300)
    assert processes[0].returncode not in (0, None)
    assert "Error" in told
    assert how == "stays" or "ArithmeticError: only here" in raised


# --- models on overlapping groups of ranks, which are in different numbers of process groups

GROUPS = """
import sys, torch, torch.distributed as dist
import disthooks as dh
rank, path, reverse = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "reverse"
dist.init_process_group("gloo", store=dist.FileStore(path, 3), rank=rank, world_size=3)
dist.new_group([0])
pairs = [[0, 1], [1, 2]]
groups = [dist.new_group(pair) for pair in pairs]
for i in (1, 0) if reverse else (0, 1):
    if rank not in pairs[i]:
        continue
    torch.manual_seed(i)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=groups[i])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[dh.stats.Norm()], every=1) as watch:
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        true = float(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm())
        optimizer.step()
    print(abs(watch.latest["grad_norm"] - true) < 1e-6 * true)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
dh.gradients(model, torch.optim.SGD(model.parameters(), lr=0.1), rules=[dh.ClipNorm(1.0)])
print("all")
"""


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_models_on_overlapping_groups(order: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        processes = _started(GROUPS, f"{folder}/store", order, world=3)
        try:
            said = [process.communicate(timeout=200)[0].split() for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert said == [["True", "all"], ["True", "True", "all"], ["True", "all"]]
