"""Run the launcher as a child of this process: pass signals on to it, and end workers that outlive it."""

# [Note: signals that were ignored]
# A process inherits from its parent which signals it ignores. `nohup` starts its command with SIGHUP ignored, so that
# the job survives the end of the terminal. Then SIGHUP stays ignored here, and is not passed on to the launcher. A
# shell without job control starts `command &` with SIGINT ignored. torchrun sets a handler for SIGINT all the same. The
# other launchers and their workers do not, so they would ignore a SIGINT that is passed on to them. So the launcher's
# process always begins with Python's own handler for SIGINT, and each launcher ends its job at SIGINT (decision 101).

# [Note: a process group of its own]
# The launcher gets a process group of its own. So a Ctrl-C reaches it once, from this process, and not a second time
# from the terminal. torchrun passes signals on to its workers. accelerate's and deepspeed's launchers leave this to the
# terminal, so for these two the signal is sent to the whole group. The cost is job control: the kernel stops a group in
# the background that reads the terminal (for a password, or in a debugger). Then `_resume` gives it the terminal, or
# stops this process too, so that the shell sees one job.

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 15.0  # seconds that workers have to end after their launcher


def run(launcher: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[int]]:
    """Run a launcher to its end.

    The launcher runs in a fork of this process, which has imported its modules already to read its options.
    See [Note: a process group of its own].

    Args:
        launcher: "torchrun", "accelerate" or "deepspeed".
        arguments: its command line.
        environment: variables to set for it.

    Returns:
        Its exit code, or 128 plus the number of the signal that ended it; and the signals that were passed on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    received: list[int] = []
    # See [Note: signals that were ignored]
    passed_on = [one for one in _SIGNALS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, lambda number, _: received.append(number)) for one in passed_on}
    child = os.fork()
    if child == 0:
        for one, handler in before.items():
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else handler)
        _become(launcher, arguments, environment, parent)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    try:
        with _forwarding(child, passed_on, to_group=launcher != "torchrun", received=received):
            while os.WIFSTOPPED(status := os.waitpid(child, os.WUNTRACED)[1]):
                _resume(child, os.WSTOPSIG(status))
            _terminal(child, os.getpgrp())
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), received
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def end_workers(started: Sequence[Mapping[str, Any]], mark: str, interrupted: bool = False) -> None:
    """End the workers that outlived their launcher.

    Args:
        started: the records of the workers.
        mark: a text in the environment of each worker. A process without it is another one that has got the number of
            a worker that ended.
        interrupted: whether the workers got a Ctrl-C from the terminal. Then they have time to write a checkpoint
            before they are ended; accelerate's launcher waits only a quarter of a second.
    """
    mine = [int(one["pid"]) for one in started if one["host"] == socket.gethostname()]
    if interrupted:
        _await(mine, mark, _GRACE)
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [pid for pid in mine if _runs(pid, mark)]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        _await(left, mark, _GRACE)


def _await(workers: Sequence[int], mark: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: the user does not want to wait
        while any(_runs(pid, mark) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)


def _become(launcher: str, arguments: Sequence[str], environment: Mapping[str, str], parent: int) -> None:
    """Run the launcher in the forked child, as its own command runs. Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        # The kernel shall send SIGTERM to this process when its parent ends: a killed parent passes no signal on.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it ended before that line
            os._exit(1)
        os.environ.update(environment)
        sys.argv = [launcher, *arguments]
        importlib.import_module(_MAINS[launcher]).main()
        code = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _forwarding(child: int, signals: Sequence[int], to_group: bool, received: list[int]) -> Iterator[None]:
    """Pass ``signals`` on, also those that came before the child began. See [Note: a process group of its own]."""

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        with contextlib.suppress(OSError):
            (os.killpg if to_group else os.kill)(child, number)

    early = list(received)
    for one in signals:
        signal.signal(one, pass_on)
    received.clear()
    for number in early:
        pass_on(number, None)
    yield


def _resume(child: int, number: int) -> None:
    """Continue a stopped launcher. See [Note: a process group of its own]."""
    needs_terminal = number in (signal.SIGTTIN, signal.SIGTTOU)
    if not needs_terminal and number != signal.SIGTSTP:
        return  # another process sent SIGSTOP, and will send SIGCONT itself
    if not (needs_terminal and _terminal(os.getpgrp(), child)):
        _terminal(child, os.getpgrp())
        os.kill(0, signal.SIGTSTP)  # after Ctrl-Z, or in the background: the shell continues this process later
        time.sleep(0.1)
        _terminal(os.getpgrp(), child)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGCONT)


def _terminal(owner: int, group: int) -> bool:
    """Give the terminal from one process group to another; False if ``owner`` does not have it."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        if os.tcgetpgrp(terminal) != owner:
            return False
        os.tcsetpgrp(terminal, group)
        return True
    except OSError:
        return False
    finally:
        signal.signal(signal.SIGTTOU, before)
        os.close(terminal)


def _runs(pid: int, mark: str) -> bool:
    try:
        process = pathlib.Path("/proc", str(pid))
        state = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and mark.encode() in process.joinpath("environ").read_bytes()
    except (OSError, IndexError):
        return False


_MAINS = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}
