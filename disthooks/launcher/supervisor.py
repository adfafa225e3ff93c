"""The launcher as a child of this process: signals go to it, its output is ours, and none of its workers is left."""

# [Note: signals that were ignored]
# A process inherits which signals are ignored. `nohup` starts its command with SIGHUP ignored, so that the job survives
# the end of the terminal: SIGHUP then stays ignored here, and the launcher, which has a process group of its own, never
# gets it. A shell without job control starts `command &` with SIGINT ignored. torchrun takes SIGINT all the same, and
# Python's own handler is missing in every other launcher and in its workers: they would ignore what is passed on to
# them. So the launcher's process always begins with Python's handler, and each launcher ends its job at SIGINT.

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

    It has a process group of its own, so that a Ctrl-C reaches it once, from here. It is a fork and not a new
    program: the launcher's modules were imported to read its options.

    Args:
        launcher: "torchrun", "accelerate" or "deepspeed".
        arguments: its command line.
        environment: variables to set for it.

    Returns:
        Its exit code, or 128 and the number of the signal that killed it; and the signals that were passed on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    came: list[int] = []
    # See [Note: signals that were ignored]
    kept = [one for one in _SIGNALS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in kept}
    child = os.fork()
    if child == 0:
        for one, handler in before.items():
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else handler)
        _become(launcher, arguments, environment, parent)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    try:
        with _forwarding(child, kept, whole=launcher != "torchrun", came=came):
            return _code(_wait(child)), came
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def end_workers(started: Sequence[Mapping[str, Any]], mark: str, interrupted: bool = False) -> None:
    """End the workers that outlived their launcher.

    Args:
        started: the records of what ran.
        mark: a text in the environment of each of them; another process may have the number of one by now.
        interrupted: whether they had the terminal's Ctrl-C as well. Accelerate's launcher waits a quarter of a
            second for what they do about it, and a checkpoint takes longer.
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
    with contextlib.suppress(KeyboardInterrupt):  # another Ctrl-C: somebody does not want to wait
        while any(_runs(pid, mark) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)


def _become(launcher: str, arguments: Sequence[str], environment: Mapping[str, str], parent: int) -> None:
    """In the child: be the launcher, as its own command would be; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with(parent)
        os.environ.update(environment)
        sys.argv = [launcher, *arguments]
        importlib.import_module(_MAINS[launcher]).main()
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _die_with(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent is gone, killed with no chance to pass it on."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def _forwarding(child: int, signals: Sequence[int], whole: bool, came: list[int]) -> Iterator[None]:
    """Pass ``signals`` on; to the whole group where the launcher leaves its workers to the terminal's Ctrl-C."""

    def pass_on(number: int, _frame: object) -> None:
        came.append(number)
        with contextlib.suppress(OSError):
            (os.killpg if whole else os.kill)(child, number)

    early = list(came)
    for one in signals:
        signal.signal(one, pass_on)
    came.clear()
    for number in early:
        pass_on(number, None)
    yield


def _wait(child: int) -> int:
    while True:
        status = os.waitpid(child, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            break
        _resume(child, os.WSTOPSIG(status))
    _terminal(child, os.getpgrp())
    return status


def _resume(child: int, number: int) -> None:
    """A script that asks for a password or stands in a debugger reads the terminal, and the launcher's group waits."""
    reads = number in (signal.SIGTTIN, signal.SIGTTOU)
    if not reads and number != signal.SIGTSTP:
        return  # somebody else's SIGSTOP, and somebody else's SIGCONT
    if not (reads and _terminal(os.getpgrp(), child)):
        _terminal(child, os.getpgrp())
        os.kill(0, signal.SIGTSTP)  # Ctrl-Z, or in the background: this goes on when the shell says so
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


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


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
