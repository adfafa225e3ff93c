"""A copy of launch/ to run commands in as README writes them, and the truth to compare their losses with."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support import ROOT

README = (ROOT / "launch" / "README.md").read_text()
CLIP = 0.3  # every step is clipped, so that a rule that does nothing changes the losses
STEPS = 6


def commands() -> list[str]:
    """Every command of launch/README.md, lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", line.partition("  #")[0]).strip() for line in lines if line.strip()]


def command(*words: str) -> str:
    """The one command of README that has all these words."""
    found = [each for each in commands() if all(word in each for word in words)]
    assert len(found) == 1, f"{words} are in {found}"
    return found[0]


@functools.cache
def truth(clip: float | None = CLIP) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Losses and gradient norms of the example in one process, with torch's own clipping."""
    spec = importlib.util.spec_from_file_location("launch_model", ROOT / "launch" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = example.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(*example.batch(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses), tuple(norms)


@dataclass
class Done:
    """A command that has ended."""

    code: int
    output: str


@dataclass
class Folder:
    """Where commands run: launch/ beside the runs/ they make."""

    place: pathlib.Path
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, line: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command in bash, on the CPU, with this Python and this disthooks."""
        path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
        python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        fixed = {"PATH": path, "PYTHONPATH": python, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        fixed |= {"DISTHOOKS_TEST": self.marker, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.place,
            env=os.environ | fixed | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, process: subprocess.Popen[str], timeout: float = 180) -> Done:
        """Its exit code and what it printed; what hangs is killed, with all that it started."""
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            output, _ = process.communicate()
            raise AssertionError(f"not done in {timeout} s:\n{output}") from None
        return Done(process.returncode, output)

    def run(self, line: str, **environment: str) -> Done:
        """Start it and wait."""
        return self.wait(self.start(line, **environment))

    def succeed(self, line: str, **environment: str) -> str:
        """What a command printed that must end well."""
        done = self.run(line, **environment)
        assert done.code == 0, done.output
        return done.output

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A log of JSON lines under runs/."""
        return [json.loads(line) for line in (self.place / "runs" / name).read_text().splitlines()]

    def processes(self) -> list[int]:
        """Which of the processes that were started here still live."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"DISTHOOKS_TEST={self.marker}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """End all of them."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def end(self) -> None:
        """Nothing may be left: no process, no file of the store."""
        deadline = time.monotonic() + 60
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = self.processes()
        self.kill()
        assert not left, f"processes {left} live on"
        assert list((self.place / "store").iterdir()) == []


@contextlib.contextmanager
def folder(place: pathlib.Path) -> Iterator[Folder]:
    """launch/ as it is, but for where its hooks.yaml stores and that its rule clips every step."""
    shutil.copytree(ROOT / "launch", place / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    hooks = place / "launch" / "hooks.yaml"
    text = hooks.read_text()
    assert "directory: /tmp," in text
    assert "max_norm: 1.0" in text
    hooks.write_text(text.replace("/tmp", str(place / "store")).replace("max_norm: 1.0", f"max_norm: {CLIP}"))
    (place / "store").mkdir()
    made = Folder(place)
    try:
        yield made
    finally:
        made.end()


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def close(found: Sequence[float], expected: Sequence[float], tolerance: float = 2e-5) -> None:
    """Equal but for the order in which float32 sums are made: two halves here, one batch there."""
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)


def as_the_truth(made: Folder, clip: float | None = CLIP, run: str = "example", killed_in: int | None = None) -> None:
    """The losses of a run, and the norms in its log when hooks were attached.

    The next step writes the record of a step. So the step in which a rank was killed has none if the launcher stopped
    the first rank before its next step.
    """
    losses, norms = truth(clip)
    rows = made.rows(f"{run}/losses.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    close([row["loss"] for row in rows], losses)
    if clip is None:
        assert not (made.place / "runs" / "gradients.jsonl").exists()
        return
    log, steps = made.rows("gradients.jsonl"), list(range(STEPS))
    if killed_in is not None:
        steps = [*range(killed_in + 1), *range(STEPS - killed_in - 1)]  # each life counts anew
        if len(log) < STEPS:
            steps, norms = ([*each[:killed_in], *each[killed_in + 1 :]] for each in (steps, norms))
    assert [row["step"] for row in log] == steps
    close([row["grad_norm"] for row in log], norms)
    assert all(row["clip_ratio"] < 1 for row in log)
    assert all(row["saved/moved"] > 0 for row in log), "bytes went to disk"
