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
_HERE = str(pathlib.Path(__file__).parent)

# -- the record, which a worker writes


class Record:
    """The record of this process. See [Note: who failed first].

    ``attempt-0.rank-1.json`` is written when the worker begins, and again when it ends. If the worker is killed, the
    first version stays. If the worker gets SIGTERM or crashes, the stacks of its threads are written to
    ``attempt-0.rank-1.stack``.

    Args:
        folder: the folder of the files; None to write nothing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record = Record(folder)
    ...     record.end("exception", ValueError("bad batch"))
    ...     json.loads(pathlib.Path(folder, "attempt-0.rank-0.json").read_text())["message"]
    'bad batch'
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
        elif "TORCHELASTIC_ERROR_FILE" in os.environ:
            faulthandler.enable()  # as torch.distributed.elastic's @record does

    def end(self, kind: str, error: BaseException | None = None, code: Any = None, **more: Any) -> None:
        """Write how the worker ended.

        Args:
            kind: "finished", "exit", "exception", "interrupted" or "configuration".
            error: the exception that ended it; None without one.
            code: the exit code, if `kind` is "exit".
            more: further values for the record.
        """
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
        if kind == "exception" and error is not None:
            self._tell_elastic(error)

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

    def _tell_elastic(self, error: BaseException) -> None:
        """Write the error file that torchrun reads, unless the script's own ``@record`` has written it."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not path or os.path.exists(path):
            return
        extra = {"py_callstack": self.values["traceback"], "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        try:
            pathlib.Path(path).write_text(json.dumps({"message": message}))
        except OSError as problem:
            print(f"disthooks: no error file {path}: {problem}", file=sys.stderr)


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


@dataclass(frozen=True)
class Rank:
    """One worker: the values of its record, and the stacks of its threads if it was stopped or crashed."""

    values: dict[str, Any]
    stack: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the worker has written how it ended."""
        return "ended" in self.values

    @property
    def has_crashed(self) -> bool:
        """Whether a signal such as SIGSEGV ended Python."""
        return not self.has_ended and "Fatal Python error" in self.stack

    @property
    def is_stopped(self) -> bool:
        """Whether the worker got SIGTERM."""
        return not self.has_ended and bool(self.stack) and not self.has_crashed

    @property
    def is_killed(self) -> bool:
        """Whether the worker wrote nothing at its end: it got SIGKILL, or called ``os._exit``."""
        return not self.has_ended and not self.stack

    @property
    def has_failed(self) -> bool:
        """Whether the worker raised an error, or ended with an exit code that is not 0."""
        return self.has_ended and self.values["kind"] != "finished"

    @property
    def is_victim(self) -> bool:
        """Whether another rank or a signal ended the worker, and no error of its own. See [Note: who failed first]."""
        if self.is_stopped or self.values.get("kind") == "interrupted":
            return True
        text = f"{self.values.get('exception')}: {self.values.get('message')}"
        return self.has_failed and self.values.get("exception") in _COLLECTIVE and bool(_PEER_IS_GONE.search(text))


def read(folder: pathlib.Path, since: float = 0.0) -> list[Rank]:
    """Read the records in ``folder`` of workers that were started after ``since`` (as ``time.time`` counts).

    Returns:
        One :class:`Rank` for each, in order of attempts and ranks.
    """
    ranks = []
    for path in sorted(folder.glob("attempt-*.json")):
        values = json.loads(path.read_text())
        stack = path.with_suffix(".stack")
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
    if failed is not None and failed.values.get("kind") == "interrupted":
        signals = signals or [signal.SIGINT]  # the launcher got it from the terminal, and not from this process
    if signals and (failed is None or failed.is_victim or failed.is_killed):  # no rank had failed by itself
        names = ", ".join(dict.fromkeys(signal.Signals(number).name for number in signals))
        lines = ["", f"disthooks: {names} ended the job", *(f"  {_name(one)}: {_short(one)}" for one in now)]
    elif failed is not None:
        lines = ["", f"disthooks: {_name(failed)}: the first error:", *_in_full(failed)]
        lines += [f"  {_name(one)}: {_short(one)}" for one in now if one is not failed]
    else:
        lines = ["", "disthooks: the launcher failed, and no rank says of an error"]
        if all(one.values.get("kind") == "finished" for one in now):  # docs/upstream/index.md has this fault of torch
            lines += [
                "  every rank's script was done: a process died while Python closed. "
                "Under gloo, exit code -6 (SIGABRT) means",
                "  a collective that nobody waited for: end the script with torch.distributed.destroy_process_group()",
            ]
    for attempt in range(last):
        rank = first_failure([one for one in ranks if one.values["attempt"] == attempt])
        if rank is not None:
            has_raised = rank.has_ended and rank.values["kind"] != "exit"
            text = (
                f"{rank.values['exception']}: {rank.values['message']}".splitlines()[0] if has_raised else _short(rank)
            )
            lines.append(f"  attempt {attempt}, before a restart: {_name(rank)}: {text}")
    return "\n".join(lines) + "\n"


def first_failure(ranks: Sequence[Rank]) -> Rank | None:
    """The rank that failed first; None if none failed. See [Note: who failed first]."""

    def order(rank: Rank) -> tuple[int, float]:
        has_own_error = rank.has_crashed or (rank.has_failed and not rank.is_victim)
        kind = 1 if has_own_error else 2 if rank.is_killed else 4 if rank.is_stopped else 3
        return kind, rank.values.get("ended", 0.0)

    failed = [rank for rank in ranks if rank.has_failed or not rank.has_ended]
    return min(failed, key=order) if failed else None


def _in_full(rank: Rank) -> list[str]:
    values = rank.values
    if rank.has_crashed:
        text = rank.stack
    elif rank.is_killed:
        text = "it was killed from outside (SIGKILL: out of memory?), or left by os._exit: it had no time to say why"
    elif rank.is_stopped:
        text = f"it was stopped (SIGTERM) at\n{rank.stack}"
    elif values["kind"] == "exit":
        text = f"it ended with exit code {values['code']}\n{values.get('traceback', '')}"
    else:
        text = str(values["traceback"])
    when = time.strftime("%H:%M:%S", time.localtime(values["ended"])) if rank.has_ended else None
    return [f"  at {when}"] * bool(when) + [f"  {one}" for one in text.strip().splitlines()]


def _short(rank: Rank) -> str:
    values = rank.values
    if rank.is_stopped:
        return f"was stopped by the launcher (SIGTERM){_script_line(rank.stack)}"
    if rank.is_killed or rank.has_crashed:
        return "was killed" if rank.is_killed else "crashed"
    if not rank.has_failed:
        return "finished"
    if values["kind"] == "exit":
        return f"ended with exit code {values['code']}"
    if values["kind"] == "interrupted":
        return f"was interrupted (SIGINT){_script_line(values['traceback'])}"
    if rank.is_victim:
        return f"saw another rank go: {values['exception']}{_script_line(values['traceback'])}"
    return f"failed later: {values['exception']}: {str(values['message']).strip().splitlines()[:1] or ['']}"


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


def _name(rank: Rank) -> str:
    return f"rank {rank.values['rank']} (host {rank.values['host']}, pid {rank.values['pid']})"
