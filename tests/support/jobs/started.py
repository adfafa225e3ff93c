"""Jobs for the tests of launching: real launchers and real processes, all of them gone afterwards."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support import ROOT

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
RUN = (sys.executable, "-m", "disthooks.run")
#: disthooks.run, and each rank writes what became of its hooks.
RECORDED = "tests.support.jobs.recorded"


@dataclass(frozen=True)
class Job:
    """What became of one."""

    code: int
    out: str
    err: str
    folder: pathlib.Path

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines()]

    def lines(self) -> list[dict[str, Any]]:
        """What the script printed as JSON."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith('{"step"')]

    def logged(self) -> list[dict[str, Any]]:
        """What the sink wrote."""
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def records(self) -> list[dict[str, Any]]:
        """What became of the hooks of each rank."""
        return [json.loads(path.read_text()) for path in sorted((self.folder / "records").glob("rank-*.json"))]


def start(command: Sequence[object], folder: pathlib.Path, **more: str) -> subprocess.Popen[str]:
    """Start a job in ``folder``; it is not waited for."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "DISTHOOKS_CONFIG")}
    env = kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more
    words = [str(word) for word in command]
    return subprocess.Popen(words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[str], folder: pathlib.Path, timeout: float = 240) -> Job:
    """Wait for a job."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=120)
        raise AssertionError(f"the job did not end in {timeout} seconds\n{out}\n{err}") from None
    return Job(process.returncode, out, err, folder)


def job(command: Sequence[object], folder: pathlib.Path, **more: str) -> Job:
    """Run a job to its end."""
    return ended(start(command, folder, **more), folder)
