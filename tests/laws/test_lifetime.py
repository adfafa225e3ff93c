"""Law 6, nothing left: bytes go when the graph goes, files when the process goes, however it goes."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import disthooks as dh
from tests.support.models import Tiny, tokens


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone must do: a cycle would hold gigabytes until some collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("end", ["backward", "dropped", "forward fails", "interrupted", "backward interrupted"])
def test_bytes_go_with_the_graph(end: str, tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    model = Tiny()
    with dh.save_activations(model, "blocks.*", store) as saving, contextlib.suppress(ValueError, KeyboardInterrupt):
        _end(model, end)
    if end not in ("forward fails", "interrupted"):
        assert saving.report().moved > 10_000
    assert saving.report().held == 0
    assert store.account.held == 0


def _end(model: torch.nn.Module, end: str) -> None:
    if end in ("forward fails", "interrupted"):
        kind = ValueError if end == "forward fails" else KeyboardInterrupt

        def fail(*_: object) -> None:
            raise kind

        model.blocks[1].mlp[1].register_forward_hook(fail)
    y = model(tokens())
    if end == "backward interrupted":

        def interrupt(_: torch.Tensor) -> None:
            raise KeyboardInterrupt

        model.embed.weight.register_hook(interrupt)
    if end != "dropped":
        y.sum().backward()


def test_half_of_a_graph_releases_half(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(dh.OnDisk(tmp_path)) as saved:
        one, two = x.exp(), x.tan()
    held = saved.report().held
    one.sum().backward()
    assert 0 < saved.report().held < held
    two.sum().backward()
    assert saved.report().held == 0


def test_the_file_has_no_name_and_is_used_again(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    model = Tiny()
    sizes = []
    with dh.save_activations(model, "blocks.*", store):
        for _ in range(4):
            loss = model(tokens()).sum()
            store.wait()
            assert os.listdir(tmp_path) == []
            sizes.append(_anonymous_bytes(tmp_path))
            loss.backward()
    assert sizes[0] > 0
    assert sizes == [sizes[0]] * 4
    store.rest()
    del store, loss
    gc.collect()
    assert _anonymous_bytes(tmp_path) is None


def _anonymous_bytes(folder: pathlib.Path) -> int | None:
    """Size of this process's open, nameless file in ``folder``; None when there is none."""
    for fd in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith(str(folder)) and target.endswith("(deleted)"):
                return os.stat(fd).st_size
    return None


def test_one_file_for_all_stores_in_a_directory(tmp_path: pathlib.Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stores = [dh.OnDisk(tmp_path) for _ in range(5)]
    tickets = [store.put(torch.ones(1000) * i) for i, store in enumerate(stores) for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    for i, ticket in enumerate(tickets):
        assert stores[0].get(ticket)[0] == i // 10


KILLED = """
import os, signal, sys, torch, disthooks as dh
x = torch.randn(512, 512, requires_grad=True)
with dh.saving(dh.OnDisk(sys.argv[1])) as saved:
    y = x.exp().tanh()
print(saved.report().moved, flush=True)
{end}
"""
ENDS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "exit with a graph alive": "",
    "an exception": "raise SystemExit(3)",
    "_exit": "os._exit(0)",
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_however_the_process_ends(end: str, tmp_path: pathlib.Path) -> None:
    script = KILLED.format(end=ENDS[end])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert int(done.stdout) == 2 * 512 * 512 * 4
    assert done.returncode == {"SIGKILL": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM, "an exception": 3}.get(end, 0)
    assert done.stderr == ""
    assert os.listdir(tmp_path) == []


def test_a_fork_has_a_file_of_its_own(tmp_path: pathlib.Path) -> None:
    """A data loader's worker, forked after attaching, must not write into its parent's file."""
    store = dh.OnDisk(tmp_path)
    mine = store.put(torch.full((1000,), 1.0))
    pid = os.fork()
    if pid == 0:
        theirs = store.put(torch.full((1000,), 2.0))
        os._exit(0 if store.get(theirs)[0] == 2 and theirs[0] is not mine[0] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.equal(store.get(mine), torch.full((1000,), 1.0))
    store.drop(mine)
