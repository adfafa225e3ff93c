"""Law 6, nothing left on a disk.

After Ctrl-C at any moment, and at the end of the process.
"""

from __future__ import annotations

import os
import pathlib
import time

import pytest

import disthooks as dh
from disthooks.saved.stores import file_worker
from tests.support.stores.faulty import soon
from tests.support.stores.moving import movers, right, script

pytestmark = pytest.mark.usefixtures("one_thread", "alone")
INTERRUPTED = """
import contextlib, random, signal, sys, time, torch, disthooks as dh
from tests.support.stores.moving import one_thread, chain, clean, pipe, right
lost = []
sys.unraisablehook = lambda _: lost.append(1)  # Ctrl-C inside a destructor, which may not have counted its bytes
random.seed(int(sys.argv[2]))
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
store = dh.OnDisk(sys.argv[1], in_flight=sys.argv[3])
saved = dh.saving(pipe(store))
def step():
    x = torch.linspace(-2, 2, 5000, requires_grad=True)
    with saved:
        y = chain(x, 20)
    y.backward()
for _ in range(3): step()
begin = time.perf_counter()
step()
took = time.perf_counter() - begin
hit = 0
for i in range(20 * int(sys.argv[4])):  # on a busy machine many come when the step is over
    if hit == int(sys.argv[4]): break
    try:
        signal.setitimer(signal.ITIMER_REAL, random.random() * took + 1e-5)
        step()
        time.sleep(took)
    except KeyboardInterrupt:
        hit += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert clean(store), (i, store.budget.held, store.open().worker.in_flight)
    assert saved.report().held == 0 or lost, (i, saved.report())
    assert right(store), i
print(hit)
"""


@pytest.mark.second_tier
@pytest.mark.parametrize("in_flight", ["64 MiB", "40 KiB"])
def test_an_interrupt_at_any_moment_leaves_nothing(in_flight: str, tmp_path: pathlib.Path) -> None:
    done = script(INTERRUPTED, tmp_path, 1, in_flight, 60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 60


KILLED = """
import os, sys, time, torch, disthooks as dh
if sys.argv[2] == "named": del os.O_TMPFILE  # tempfile then makes a file and unlinks it
from tests.support.stores.moving import one_thread, slow, write, chain, pipe
import tempfile
if sys.argv[2] == "named": tempfile._O_TMPFILE_WORKS = False
store = dh.OnDisk(sys.argv[1])
os.pwrite = slow(write, 30.0)
x = torch.linspace(-2, 2, 50_000, requires_grad=True)
with dh.saving(pipe(store)):
    y = chain(x, 20)
assert store.open().worker.in_flight > 0
print("in flight", time.time(), sep=",", flush=True)
if sys.argv[3] == "kill": os.kill(os.getpid(), 9)
if sys.argv[3] == "raise": raise SystemExit(3)
"""


@pytest.mark.first_tier(end=("kill",))
@pytest.mark.parametrize(
    ("end", "status", "file"),
    [("kill", -9, "nameless"), ("kill", -9, "named"), ("raise", 3, "named"), ("return", 0, "nameless")],
)
def test_a_process_that_ends_while_it_writes_leaves_nothing(
    end: str, status: int, file: str, tmp_path: pathlib.Path
) -> None:
    """With a graph alive and minutes of writes before it: it ends at once, and nothing is left of it."""
    done = script(KILLED, tmp_path, file, end, timeout=300)
    line, begin = done.stdout.split(",")
    assert (line, done.returncode, done.stderr) == ("in flight", status, "")
    assert time.time() - float(begin) < 60
    assert os.listdir(tmp_path) == []


def test_threads_end_when_there_is_nothing_to_do(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert soon(lambda: not movers())  # those of other tests
    monkeypatch.setattr(file_worker, "_IDLE", 3.0)  # on a busy machine a second is over before anybody looks
    store, fds = dh.OnDisk(tmp_path), len(os.listdir("/proc/self/fd"))
    assert not movers()
    assert right(store)
    assert movers()
    store.release_idle()
    assert not movers()
    assert right(store)
    assert 1 <= len(movers()) <= 1
    assert soon(lambda: not movers())  # by themselves
    assert right(store)
    assert len(os.listdir("/proc/self/fd")) <= fds  # the garbage of earlier tests may close some
