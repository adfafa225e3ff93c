"""How each worker began and ended, as files that a launcher reads: ``DISTHOOKS_RECORDS=folder``."""

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import signal
import socket
import sys
import time
import traceback
from types import TracebackType
from typing import Any

VARIABLE = "DISTHOOKS_RECORDS"
_HERE = str(pathlib.Path(__file__).parent)


class Record:
    """The record of this process; without a folder it keeps nothing.

    ``attempt-0.rank-1.json`` is written when the worker begins, and again when it ends; a worker that was killed
    leaves the first. Where its threads stood when it was told to end, or crashed, is in ``attempt-0.rank-1.stack``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record = Record(folder)
    ...     record.end("exception", ValueError("bad batch"))
    ...     json.loads(pathlib.Path(folder, "attempt-0.rank-0.json").read_text())["message"]
    'bad batch'
    """

    def __init__(self, folder: str | None) -> None:
        self.values: dict[str, Any] = {
            "rank": _number("RANK"),
            "local_rank": _number("LOCAL_RANK"),
            "world_size": _number("WORLD_SIZE", 1),
            "attempt": _number("TORCHELASTIC_RESTART_COUNT"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
        }
        self._folder = None if folder is None else pathlib.Path(folder)
        self._name = f"attempt-{self.values['attempt']}.rank-{self.values['rank']}"
        self._write()

    def catch_signals(self) -> None:
        """Have the stacks written where python can no longer run: in a crash, and stopped inside a collective."""
        if self._folder is not None:
            stack = (self._folder / f"{self._name}.stack").open("w")
            faulthandler.enable(stack)
            faulthandler.register(signal.SIGTERM, stack, all_threads=True, chain=True)
            # Workers of a DataLoader or a pool are stopped by SIGTERM every day, and have this file open.
            os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
        elif "TORCHELASTIC_ERROR_FILE" in os.environ:
            faulthandler.enable()  # as @record does

    def end(self, kind: str, error: BaseException | None = None, code: Any = None, **more: Any) -> None:
        """Say how it ended.

        Args:
            kind: "finished", "exit", "exception", "interrupted" or "configuration".
            error: what was raised.
            code: the exit code of an "exit".
            more: what else is to be kept.
        """
        if self.values["pid"] != os.getpid():
            return  # a fork of the worker
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
        except OSError as problem:  # the job is worth more than its record
            print(f"disthooks: no record of this rank in {self._folder}: {problem}", file=sys.stderr)

    def _tell_elastic(self, error: BaseException) -> None:
        """What torch's ``@record`` writes, unless the script has it and wrote it."""
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
    """The traceback of ``error`` from the script on, as python would show it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace


def _number(name: str, default: int = 0) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default
