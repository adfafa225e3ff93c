"""``fit: true`` under ``disthooks.run``: two ranks keep the budget, are killed, and go on from what fit had learnt."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

from disthooks import memory
from tests.support import ROOT
from tests.support.jobs.folder import free_port

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")]

SCRIPT = """
import json, os, pathlib, signal, sys
import torch
import torch.distributed as dist
from torch import nn
import disthooks as dh

folder, dies = pathlib.Path(sys.argv[1]), sys.argv[2] == "dies"
dist.init_process_group("gloo")
rank = dist.get_rank()
dh.memory.release_promptly()
torch.manual_seed(0)
blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
hooks = dh.prepare(model, optimizer) if sys.argv[2] != "plain" else None
fitted = hooks and hooks.saving.fitted
file, first = folder / f"{rank}.pt", 0
if file.exists():
    state = torch.load(file)
    model.load_state_dict(state["model"])
    hooks.load_state_dict(state["hooks"])
    first = state["step"]
begin = dh.memory.resident()
for step in range(first, 8):
    dh.memory.reset_peak_resident()
    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = model(x).square().mean()
    limit = fitted.report().limit if fitted else 0
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    row = {"step": step, "loss": loss.item(), "limit": limit, "begin": begin, "peak": dh.memory.peak_resident()}
    del loss
    with open(folder / f"{rank}.jsonl", "a") as log:
        log.write(json.dumps(row) + "\\n")
    if dies and step == 4:
        torch.save({"model": model.state_dict(), "hooks": hooks.state_dict(), "step": step + 1}, file)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(folder: pathlib.Path, how: str, hooks: pathlib.Path | None = None) -> tuple[int, list[list[dict[str, float]]]]:
    """The exit status, and what each rank has logged in ``folder``."""
    folder.mkdir(exist_ok=True)
    script = folder.parent / "train.py"
    script.write_text(SCRIPT)
    launched = [str(script)] if hooks is None else ["-m", "disthooks.run", "--hooks", str(hooks), str(script)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, *launched, str(folder), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or "SIGKILL" in done.stderr, done.stderr
    logs = [(folder / f"{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    return done.returncode, [list(map(json.loads, lines)) for lines in logs]


@pytest.mark.full_tier
def test_killed_ranks_go_on_with_what_they_had_learnt(tmp_path: pathlib.Path) -> None:
    _, plain = _run(tmp_path / "plain", "plain")
    begin, peak = (max(row[name] for rows in plain for row in rows) for name in ("begin", "peak"))
    assert peak - begin > 100 << 20
    budget, hooks = int(begin + 0.7 * (peak - begin)), tmp_path / "hooks.yaml"
    store = {"kind": "OnDisk", "directory": str(tmp_path), "in_flight": "8 MiB"}
    hooks.write_text(yaml.safe_dump({"budget": budget, "fit": True, "save": [{"modules": "*", "store": store}]}))

    status, killed = _run(tmp_path / "fitted", "dies", hooks)
    assert status != 0
    assert [len(rows) for rows in killed] == [5, 5]
    _, resumed = _run(tmp_path / "fitted", "goes on", hooks)
    for rank, rows in enumerate(resumed):
        assert [row["step"] for row in rows] == list(range(8))
        assert [row["loss"] for row in rows] == [row["loss"] for row in plain[rank]]
        assert max(row["peak"] for row in rows) <= budget
        limits = [row["limit"] for row in rows]
        assert limits[0] == 0
        assert limits[5] > 16 << 20, "the first step after the restart keeps tensors"
