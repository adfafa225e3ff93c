"""launch/multinode.sh on two nodes: network namespaces, each with its address."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.jobs.folder import Folder, as_the_truth, close, command, folder, truth

pytestmark = pytest.mark.dist
_numbers = itertools.count()


def _ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True, capture_output=True, text=True, timeout=300)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two namespaces joined by a cable, 10.0.0.1 and 10.0.0.2; skips where that is not permitted."""
    if not shutil.which("ip"):
        pytest.skip("no ip command (iproute2)")
    names = [f"dh{os.getpid()}x{next(_numbers)}" for _ in range(2)]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                _ip(f"netns add {name}")
                stack.callback(_ip, f"netns del {name}")
            _ip(f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
            for number, name in enumerate(names, 1):
                _ip(f"-n {name} addr add 10.0.0.{number}/24 dev cable")
                _ip(f"-n {name} link set lo up")
                _ip(f"-n {name} link set cable up")
            for name, first in zip(names, ("127.0.1.1", "10.0.0.1"), strict=True):
                stack.callback(shutil.rmtree, _hosts(name, f"127.0.0.1 localhost\n{first} first-node\n"))
        except (subprocess.CalledProcessError, PermissionError) as error:
            pytest.skip(f"network namespaces are not permitted: {getattr(error, 'stderr', '') or error}")
        yield names


def _hosts(name: str, text: str) -> pathlib.Path:
    """A file of names for a namespace: ``ip netns exec`` puts it in the place of /etc/hosts."""
    place = pathlib.Path("/etc/netns") / name
    place.mkdir(parents=True)
    (place / "hosts").write_text(text)
    return place


def test_two_nodes_train_as_one_process_and_restart_together(tmp_path: pathlib.Path, nodes: list[str]) -> None:
    """The second node's rank is killed in its third step: both launchers start their process again.

    Each node has a folder of its own for the checkpoint, and the first one knows its own name as 127.0.1.1.
    """
    line = command("multinode.sh", "RDZV=10.0.0.1", "HOOKS").replace("RDZV=10.0.0.1", "RDZV=first-node")
    with folder(tmp_path) as made:
        started = []
        for name in nodes:
            own = line.replace("runs/multinode", f"runs/of-{name}")
            (tmp_path / f"{name}.sh").write_text(f"{own} --die 2")
            started.append(made.start(f"ip netns exec {name} bash {name}.sh"))
        outputs = [made.wait(process) for process in started]
        assert [done.code for done in outputs] == [0, 0], "\n".join(done.output for done in outputs)
        for number, done in enumerate(outputs, 1):
            assert f"10.0.0.{number} (cable)" in done.output, "the address and interface it found"
        # A launcher whose own process did not fail does not count the restart: its logs stay in attempt_0.
        logs = tmp_path / "runs" / "logs"
        assert sorted(log.name for log in logs.iterdir()) == ["10.0.0.1", "10.0.0.2"], "which machine's they are"
        assert len(list((logs / "10.0.0.2").glob("*/attempt_1/0/stdout.log"))) == 1
        as_the_truth(made, run=f"of-{nodes[0]}", killed_in=2)
        assert not (tmp_path / "runs" / f"of-{nodes[1]}" / "checkpoint.pt").exists(), "rank 0 told the step"


@pytest.mark.slow
@pytest.mark.skipif("DISTHOOKS_FULL" not in os.environ, reason="DISTHOOKS_FULL is not set: heartbeats take a minute")
def test_the_run_goes_on_with_the_node_that_is_left(tmp_path: pathlib.Path, nodes: list[str]) -> None:
    """NNODES=1:2, and all of the second node is killed, its launcher too."""
    line = command("multinode.sh", "RDZV=10.0.0.1", "HOOKS").replace("NNODES=2", "NNODES=1:2")
    with folder(tmp_path) as made:
        (tmp_path / "line.sh").write_text(f"{line} --steps 100000")
        started = [made.start(f"exec ip netns exec {name} bash line.sh", LOGS="") for name in nodes]
        _wait_for(made, ranks=2)
        pids = subprocess.run(["ip", "netns", "pids", nodes[1]], capture_output=True, text=True, check=True).stdout
        for pid in map(int, pids.split()):
            os.kill(pid, signal.SIGKILL)
        _wait_for(made, ranks=1)
        made.kill()
        for process in started:
            made.wait(process)
        rows = made.rows("multinode/losses.jsonl")[:-1]
        assert [row["step"] for row in rows] == list(range(len(rows))), "no step is lost, none is made twice"
        assert [row["ranks"] for row in rows] == sorted((row["ranks"] for row in rows), reverse=True)
        losses, _ = truth()
        close([row["loss"] for row in rows[: len(losses)]], losses)
        assert all(math.isfinite(row["loss"]) for row in rows)


def _wait_for(made: Folder, ranks: int) -> None:
    deadline = time.monotonic() + 150
    log = made.place / "runs" / "multinode" / "losses.jsonl"
    while not (log.exists() and f'"ranks": {ranks}' in log.read_text()[-2000:]):
        assert time.monotonic() < deadline, f"never {ranks} ranks"
        time.sleep(0.2)
