"""The records that the workers of a job write, and the report on a failed job that the launcher makes of them."""

# [Note: who failed first]
# A launcher cannot tell which rank failed first: it may see a rank that lost its connection as early as the rank that
# raised the error. So each worker writes a record when it begins and again when it ends (decision 70), into the folder
# that DISTHOOKS_RECORDS names. `first_failure` sorts the ranks by these records:
# 1. A rank that raised an error of its own, or crashed.
# 2. A rank that ended without a record of its end. It comes second, because a launcher kills workers that do not end
#    in time.
# 3. A rank whose collective failed because another rank was gone.
# 4. A rank that was stopped with SIGTERM.
# An error belongs to the third kind by its class and its words (`_PEER_IS_GONE`). ConnectionResetError does not: it
# comes from a socket of the script's own, such as a storage bucket that the script reads.

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from disthooks._ranks import launched_world_size, number_in_environment

VARIABLE = "DISTHOOKS_RECORDS"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # which torchrun names, and torch's @record writes
_HERE = str(pathlib.Path(__file__).parent)

# -- the record, which a worker writes


class RankRecord:
    """The record of this process, in ``folder``, and nothing without one; see [Note: who failed first].

    ``attempt-0.rank-1.json`` is written when the worker begins, and again when it ends. If the worker gets SIGTERM or
    crashes, the stacks of its threads are written to ``attempt-0.rank-1.stack``.
    """

    def __init__(self, folder: str | None) -> None:
        self.values: dict[str, Any] = {
            "rank": number_in_environment("RANK", 0),
            "local_rank": number_in_environment("LOCAL_RANK", 0),
            "world_size": launched_world_size(),
            "attempt": number_in_environment("TORCHELASTIC_RESTART_COUNT", 0),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
        }
        self._folder = None if folder is None else pathlib.Path(folder)
        self._name = f"attempt-{self.values['attempt']}.rank-{self.values['rank']}"
        self._write()

    def catch_signals(self) -> None:
        """Write the stacks of all threads at SIGTERM and in a crash, without Python: a collective lets none run."""
        if self._folder is not None:
            stack = (self._folder / f"{self._name}.stack").open("w")
            faulthandler.enable(stack)
            faulthandler.register(signal.SIGTERM, stack, all_threads=True, chain=True)
            # Workers of a DataLoader or a pool inherit the open file. Their parent ends them with SIGTERM, which is no
            # failure, so they write nothing.
            os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
        elif ERROR_FILE in os.environ:
            faulthandler.enable()  # as torch.distributed.elastic's @record does

    def end(self, kind: str, error: BaseException | None = None, code: Any = None, **more: Any) -> None:
        """Write how the worker ended: "finished", "exit", "exception", "interrupted" or "configuration"."""
        if self.values["pid"] != os.getpid():
            return  # this process is a fork of the worker, and the record is the worker's
        self.values |= {"ended": time.time(), "kind": kind, "code": code, **more}
        if error is not None:
            self.values |= {
                "exception": type(error).__qualname__,
                "module": type(error).__module__,
                "message": str(error),
                "traceback": "".join(traceback.format_exception(type(error), error, shortened(error))),
            }
        self._write()
        path = os.environ.get(ERROR_FILE)
        if kind == "exception" and error is not None and path and not os.path.exists(path):  # no @record in the script
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)

    def _write(self) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = self._folder / f".{self._name}.{os.getpid()}"
            draft.write_text(json.dumps(self.values, default=str))
            draft.replace(self._folder / f"{self._name}.json")
        except OSError as problem:  # a missing record must not end the job
            print(f"disthooks: no record of this rank in {self._folder}: {problem}", file=sys.stderr)


def shortened(error: BaseException) -> TracebackType | None:
    """The traceback of ``error`` from the script's first frame on, as Python would show it without disthooks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace


# -- the report, which the launcher makes

# Words of errors that a rank raises because another rank is gone.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (timeout|closed)|recvvalue failed|"
    r"sendbytes failed|failed to recv|remote process exited|communicator was aborted|nccl comm.*abort|"
    r"watchdog caught collective|timed out (after )?waiting|gloo.*(pair|timeout)|pair closure|peer.*(gone|exited)|"
    r"application timeout|store.*(timeout|timed out)|its error says why",
    re.IGNORECASE,
)
# The classes of errors that collectives raise. See [Note: who failed first].
_COLLECTIVE = (
    *("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "NCCLError"),
    *("AttachError", "SystemExit"),
)
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|/disthooks/(run|launcher)/")
# What became of a rank, and its place among the others; see [Note: who failed first].
_ORDER = {"failed": 1, "crashed": 1, "killed": 2, "lost a peer": 3, "interrupted": 3, "stopped": 4}


@dataclass(frozen=True)
class Rank:
    """One worker: the values of its record, and the stacks of its threads if it was stopped or crashed."""

    values: dict[str, Any]
    stack: str = ""

    @property
    def fate(self) -> str:
        """What became of the worker: "finished", or one of ``_ORDER``."""
        values = self.values
        if "ended" not in values:
            return "crashed" if "Fatal Python error" in self.stack else "stopped" if self.stack else "killed"
        if values["kind"] in ("finished", "interrupted"):
            return str(values["kind"])
        text = f"{values.get('exception')}: {values.get('message')}"
        is_lost = values.get("exception") in _COLLECTIVE and bool(_PEER_IS_GONE.search(text))
        return "lost a peer" if is_lost else "failed"

    def __str__(self) -> str:
        return f"rank {self.values['rank']} (host {self.values['host']}, pid {self.values['pid']})"


def read(folder: pathlib.Path, since: float = 0.0) -> list[Rank]:
    """The workers that were started after ``since`` and have records in ``folder``, in order of attempts and ranks."""
    ranks = []
    for path in folder.glob("attempt-*.json"):
        values, stack = json.loads(path.read_text()), path.with_suffix(".stack")
        if values["started"] >= since:
            ranks.append(Rank(values, stack.read_text() if stack.exists() else ""))
    return sorted(ranks, key=lambda one: (one.values["attempt"], one.values["rank"]))


def tell(ranks: Sequence[Rank], signals: Sequence[int] = ()) -> str:
    """A short report on a job that failed, or that ``signals`` ended: the first error in full, a line for each rank.

    >>> lost = Rank({"rank": 0, "attempt": 0, "host": "a", "pid": 1, "ended": 1.0, "kind": "exception",
    ...              "exception": "RuntimeError", "message": "Connection closed by peer", "traceback": ""})
    >>> bad = Rank({"rank": 1, "attempt": 0, "host": "a", "pid": 2, "ended": 2.0, "kind": "exception",
    ...             "exception": "ValueError", "message": "bad batch", "traceback": "ValueError: bad batch"})
    >>> print(tell([lost, bad]).strip())  # doctest: +ELLIPSIS
    disthooks: rank 1 (host a, pid 2): the first error:
      at ...:02
      ValueError: bad batch
      rank 0 (host a, pid 1): saw another rank go: RuntimeError
    """
    if not ranks:
        return "\ndisthooks: the launcher failed, and no worker had begun; what it says is above\n"
    last = max(one.values["attempt"] for one in ranks)
    now = [one for one in ranks if one.values["attempt"] == last]
    failed = first_failure(now)
    if signals and (failed is None or _ORDER[failed.fate] > 1):  # no rank had failed by itself
        names = ", ".join(dict.fromkeys(signal.Signals(number).name for number in signals))
        lines = ["", f"disthooks: {names} ended the job", *(f"  {one}: {_short(one)}" for one in now)]
    elif failed is not None:
        lines = ["", f"disthooks: {failed}: the first error:", *_in_full(failed)]
        lines += [f"  {one}: {_short(one)}" for one in now if one is not failed]
    else:  # docs/upstream/index.md has this fault of torch
        lines = [
            "",
            "disthooks: the launcher failed, and no rank says of an error",
            "  every rank's script was done: a process died while Python closed. "
            "Under gloo, exit code -6 (SIGABRT) means",
            "  a collective that nobody waited for: end the script with torch.distributed.destroy_process_group()",
        ]
    for attempt in range(last):
        rank = first_failure([one for one in ranks if one.values["attempt"] == attempt])
        if rank is not None:
            lines.append(f"  attempt {attempt}, before a restart: {rank}: {_short(rank)}")
    return "\n".join(lines) + "\n"


def first_failure(ranks: Sequence[Rank]) -> Rank | None:
    """The rank that failed first; None if none failed. See [Note: who failed first]."""
    failed = [rank for rank in ranks if rank.fate != "finished"]
    return min(failed, key=lambda rank: (_ORDER[rank.fate], rank.values.get("ended", 0.0)), default=None)


def _in_full(rank: Rank) -> list[str]:
    values, fate = rank.values, rank.fate
    if fate == "crashed":
        text = rank.stack
    elif fate == "killed":
        text = "it was killed from outside (SIGKILL: out of memory?), or left by os._exit: it had no time to say why"
    elif fate == "stopped":
        text = f"it was stopped (SIGTERM) at\n{rank.stack}"
    else:
        code = f"it ended with exit code {values['code']}\n" if values["kind"] == "exit" else ""
        when = time.strftime("%H:%M:%S", time.localtime(values["ended"]))
        text = f"at {when}\n{code}{values.get('traceback', '')}"
    return [f"  {one}" for one in text.strip().splitlines()]


def _short(rank: Rank) -> str:
    values, fate = rank.values, rank.fate
    if fate == "stopped":
        return f"was stopped by the launcher (SIGTERM){_script_line(rank.stack)}"
    if fate == "killed":
        return "was killed"
    if fate in ("crashed", "finished"):
        return fate
    if values["kind"] == "exit":
        return f"ended with exit code {values['code']}"
    if fate == "interrupted":
        return f"was interrupted (SIGINT){_script_line(values['traceback'])}"
    if fate == "lost a peer":
        return f"saw another rank go: {values['exception']}{_script_line(values['traceback'])}"
    return f"failed: {values['exception']}: {values['message']}".splitlines()[0]


def _script_line(stack: str) -> str:
    """The innermost line of the traceback or stack that is in the script, not in Python or an installed package."""
    own = _script_lines(stack)
    if "Current thread" in stack:  # a stack of all threads: take the thread that got the signal, if it runs the script
        own = _script_lines(stack[stack.index("Current thread") :].partition("\n\n")[0]) or own
    if not own:
        return ""
    path, number, function = own[-1] if "Traceback" in stack else own[0]  # faulthandler lists the innermost first
    return f", at {path}:{number} in {function}"


def _script_lines(stack: str) -> list[tuple[str, str, str]]:
    lines = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', stack)
    return [one for one in lines if one[0][0] != "<" and not _FOREIGN.search(one[0])]
