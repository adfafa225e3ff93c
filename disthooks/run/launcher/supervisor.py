"""Run the launcher as a child of this process: pass signals on to it, and end workers that outlive it."""

# [Note: signals that were ignored]
# A process inherits from its parent which signals it ignores. `nohup` starts its command with SIGHUP ignored, so that
# the job survives the end of the terminal. Then SIGHUP stays ignored here, and is not passed on to the launcher. A
# shell without job control starts `command &` with SIGINT ignored. torchrun sets a handler for SIGINT all the same. The
# other launchers and their workers do not, so they would ignore a SIGINT that is passed on to them. So the launcher's
# process always begins with Python's own handler for SIGINT, and each launcher ends its job at SIGINT (decision 101).

# [Note: a session of its own]
# The launcher gets a session of its own. So a Ctrl-C reaches it once, from this process, and not a second time from the
# terminal. torchrun passes signals on to its workers. accelerate's and deepspeed's launchers leave this to the
# terminal, so for these two the signal is sent to the whole group. The terminal does not control this session, so a
# script can read it at any time. Ctrl-Z stops this process alone: the job goes on.

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from disthooks.run.launcher.command import MODULES

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 15.0  # seconds that workers have to end after their launcher


def run(launcher: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[int]]:
    """Run a launcher to its end, in a fork of this process, which has imported its modules to read its options.

    Returns its exit code, or 128 plus the number of the signal that ended it; and the signals that were passed on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    received: list[int] = []
    # See [Note: signals that were ignored]
    passed_on = [one for one in _SIGNALS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # a signal that comes now waits until it can be passed on
    child = os.fork()
    if child == 0:
        _become(launcher, arguments, environment, passed_on)

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        with contextlib.suppress(OSError):  # see [Note: a session of its own]
            to_group = launcher != "torchrun" and os.getpgid(child) == child
            (os.killpg if to_group else os.kill)(child, number)

    before = {one: signal.signal(one, pass_on) for one in passed_on}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return (code if code >= 0 else 128 - code), received
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _become(
    launcher: str, arguments: Sequence[str], environment: Mapping[str, str], blocked: Sequence[int]
) -> NoReturn:
    """Run the launcher in the forked child, as its own command runs."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        os.environ.update(environment)
        sys.argv = [launcher, *arguments]
        importlib.import_module(MODULES[launcher]).main()
        code = 0
    except SystemExit as error:
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_workers(started: Sequence[Mapping[str, Any]], mark: str, interrupted: bool = False) -> None:
    """End the workers that outlived their launcher: processes of ``started`` that have ``mark`` in their environment.

    After a Ctrl-C they have time to write a checkpoint; accelerate's launcher waits only a quarter of a second.
    """
    mine = [int(one["pid"]) for one in started if one["host"] == socket.gethostname()]
    if interrupted:
        _await(mine, mark)
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [pid for pid in mine if _runs(pid, mark)]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        _await(left, mark)


def _await(workers: Sequence[int], mark: str) -> None:
    deadline = time.monotonic() + _GRACE
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: the user does not want to wait
        while any(_runs(pid, mark) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)


def _runs(pid: int, mark: str) -> bool:
    try:
        process = pathlib.Path("/proc", str(pid))
        state = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and mark.encode() in process.joinpath("environ").read_bytes()
    except (OSError, IndexError):
        return False
