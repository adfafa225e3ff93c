"""From the command line to the exit code."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from disthooks.config.find import Found, find
from disthooks.config.front import read_found
from disthooks.errors import DisthooksError, UsageError, as_line
from disthooks.run import records
from disthooks.run.command import USAGE, Command, check_target, parse
from disthooks.run.program import execute, shortened
from disthooks.run.session import Session

_FAULTY = 2


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run what the command line says; ends the process as the script would.

    Args:
        argv: the arguments; those of this process by default. Exit code 2, before the script starts, when they or
            the configuration are wrong.
    """
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"{as_line(error)}\n{USAGE}", file=sys.stderr)
        sys.exit(_FAULTY)
    record = records.Record(os.environ.get(records.VARIABLE) or None)
    session = _session(command, record)
    record.catch_signals()
    _run(command, record, session)


def _session(command: Command, record: records.Record) -> Session:
    try:
        check_target(command.target, command.module)
        found = configuration(command)
        session = Session(read_found(found), found, command.hooks)
    except DisthooksError as error:
        record.end("configuration", error)
        print(as_line(error), file=sys.stderr)
        sys.exit(_FAULTY)
    session.arm()
    return session


def _run(command: Command, record: records.Record, session: Session) -> NoReturn:
    here = os.getpid()
    try:
        execute(command)
    except SystemExit as error:
        code = _code(error)
        more = session.finish(here, failed=bool(code))
        record.end("exit" if code else "finished", error if code else None, code, **more)
        raise
    except KeyboardInterrupt as error:
        record.end("interrupted", error)
        session.finish(here, failed=True)
        raise
    except BaseException as error:
        # What is attached is taken off last: it may wait for the device, and the time of the error is now.
        record.end("exception", error)
        sys.excepthook(type(error), error.with_traceback(shortened(error)), shortened(error))
        session.finish(here, failed=True)
        sys.exit(1)
    record.end("finished", None, 0, **session.finish(here))
    sys.exit(0)


def _code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    return 1


def configuration(command: Command) -> Found:
    """Which configuration is taken; that of DeepSpeed is looked for in the JSON files among the script's arguments.

    Raises:
        ConfigError: when there is none.
    """
    return find(command.hooks, _of_deepspeed(command.args))


def _of_deepspeed(args: Sequence[str]) -> dict[str, Any] | None:
    named = [argument.rpartition("=")[2] for argument in args]
    for name in [*named, os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")]:
        if name.endswith(".json") and pathlib.Path(name).is_file():
            try:
                found = json.loads(pathlib.Path(name).read_text())
            except (OSError, ValueError):
                continue
            if isinstance(found, dict) and "disthooks" in found:
                return found
    return None
