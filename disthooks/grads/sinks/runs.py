"""Which run a line of a log belongs to: several write to one file, and a run that is restarted goes on in it.

A run is what one launcher started: its restarts have its name. The name is ``DISTHOOKS_RUN`` if that is set, and
otherwise made of the time when the launcher, or this process without one, was started, and of the number of that
process. A second training in one process, after the first was detached, is a run of its own: its name ends in ``.1``.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import socket
import time

from disthooks._locks import Order, shared

VARIABLE = "DISTHOOKS_RUN"
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

_lock = shared(Order.WATCH)
#: Of each file: how many attachments write to it now, and how many runs of this process have ended there.
_writers: dict[str, list[int]] = {}


def run() -> str:
    """The name of the run that this process is part of."""
    return os.environ.get(VARIABLE) or _made(os.getpid())


def restart() -> int:
    """How often the launcher and the scheduler have started this run again; 0 in its first life."""
    told = (os.environ.get(name, "") for name in _RESTARTS)
    return sum(int(value) for value in told if value.isdigit())


def begin(path: str) -> str:
    """The name under which an attachment writes to ``path``: its own, unless another one writes there now."""
    with _lock:
        writers = _writers.setdefault(path, [0, 0])
        writers[0] += 1
        return f"{run()}.{writers[1]}" if writers[1] else run()


def end(path: str) -> None:
    """An attachment has written its last line to ``path``."""
    with _lock:
        writers = _writers.setdefault(path, [1, 0])
        writers[0] = max(0, writers[0] - 1)
        writers[1] += writers[0] == 0


@functools.cache
def _made(pid: int) -> str:
    """A name for the run of process ``pid``; of torchrun, which restarts its workers, the number and the start."""
    owner = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else pid
    began = _started(owner)
    mark = f"{socket.gethostname()} {owner} {began} {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
    return f"{stamp}-{hashlib.sha256(mark.encode()).hexdigest()[:6]}"


def _started(pid: int) -> float:
    """When a process was started, in seconds since 1970, as Linux tells it; the time of this call elsewhere."""
    try:
        ticks = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(line for line in pathlib.Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return time.time()
