"""From the command line to the launcher's exit code."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from disthooks.config import from_config
from disthooks.config.locate import VARIABLE
from disthooks.errors import ConfigError, DisthooksError, as_line
from disthooks.launcher import accelerate_config, command, failure_report, supervisor
from disthooks.launcher.records import VARIABLE as RECORDS
from disthooks.launcher.worker import Command, check_target, configuration

_FAULTY = 2
# A process that mpirun started has one of these.
_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
USAGE = """usage: disthooks launch [--hooks FILE] [accelerate] [OPTIONS of accelerate launch] SCRIPT ARGS...
       disthooks launch [--hooks FILE] torchrun [OPTIONS of torchrun] SCRIPT ARGS...
       disthooks launch [--hooks FILE] deepspeed [OPTIONS of deepspeed] SCRIPT ARGS...

Every worker runs SCRIPT with hooks attached, as python -m disthooks.run does. The configuration is FILE, else the
'disthooks' section of accelerate's configuration, which accelerate does not get to see, else that of disthooks.run."""


def main(argv: Sequence[str]) -> int:
    """Launch a job and wait for it.

    Args:
        argv: what stands after ``disthooks launch``.

    Returns:
        The launcher's exit code; 2, with nothing started, when the command line or the configuration is wrong.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else _FAULTY
    with tempfile.TemporaryDirectory(prefix="disthooks-") as folder:
        try:
            asked = command.read(argv)
            check_target(asked.script, asked.module)
            asked, hooks = _configured(asked, pathlib.Path(folder))
            asked, environment = _several_on_cpus(asked)
        except DisthooksError as error:
            print(as_line(error), file=sys.stderr)
            return _FAULTY
        return _launched(asked, hooks, folder, environment)


def _launched(asked: command.Line, hooks: str | None, folder: str, more: dict[str, str]) -> int:
    records = os.environ.get(RECORDS) or os.path.join(folder, "records")
    began = time.time()
    environment = {RECORDS: os.path.abspath(records)} | ({VARIABLE: hooks} if hooks else {}) | more
    code, signals = supervisor.run(asked.launcher, command.command(asked, hooks), environment)
    if code == 128 + signal.SIGINT:  # a launcher that had the terminal, and its Ctrl-C with no word to this process
        signals = signals or [signal.SIGINT]
    told = failure_report.read(pathlib.Path(records), since=began)
    left, mark = [one.values for one in told if not one.ended], f"{RECORDS}={environment[RECORDS]}"
    supervisor.end_workers(left, mark, interrupted=signal.SIGINT in signals)
    if code:
        sys.stdout.flush()
        told = failure_report.read(pathlib.Path(records), since=began)
        print(failure_report.tell(told, signals), end="", file=sys.stderr, flush=True)
    return code


def _configured(asked: command.Line, folder: pathlib.Path) -> tuple[command.Line, str | None]:
    """The command line without the section, and the path of the configuration; None if DeepSpeed's JSON has it."""
    if asked.launcher == "accelerate":
        named = asked.chosen.config_file
        found = (
            accelerate_config.split(named or accelerate_config.default_file() or os.devnull, folder)
            if _there(named)
            else None
        )
        if found is not None:
            shown = named or str(accelerate_config.default_file())
            asked = _without_section(asked, found[1])
            if asked.hooks is None:
                _check(found[0], shown)
                return asked, found[0]
            print(
                f"disthooks: warning: --hooks is given: the disthooks section of {shown} is not read", file=sys.stderr
            )
    source: Any = configuration(Command(asked.script, asked.module, asked.args, asked.hooks)).source
    from_config(source)
    return asked, os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else None


def _several_on_cpus(asked: command.Line) -> tuple[command.Line, dict[str, str]]:
    """Have accelerate start as many processes as its configuration says, where it would start one.

    Under MULTI_CPU it leaves that to mpirun, and without a hostfile it runs the script once, whatever num_processes is.
    Its launcher for several GPUs starts them, and ACCELERATE_USE_CPU=true makes them train on gloo.
    """
    chosen = asked.chosen
    if asked.launcher != "accelerate" or any(name in os.environ for name in _OF_MPI):
        return asked, {}
    said = accelerate_config.values(chosen.config_file)
    count, nodes = (getattr(chosen, name) or said.get(name) or 1 for name in ("num_processes", "num_machines"))
    others = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "mpirun_hostfile")
    other = [name for name in others if getattr(chosen, name, False) or (name == "mpirun_hostfile" and _hostfile(said))]
    if said.get("distributed_type") != "MULTI_CPU" or other or count < 2 or nodes > 1:
        return asked, {}
    told = (
        f"accelerate starts one process for MULTI_CPU, unless mpirun starts it: disthooks launch has it start {count}"
    )
    print(f"disthooks: {told}, which train on this machine's CPUs with gloo", file=sys.stderr)
    return dataclasses.replace(asked, options=(*asked.options, "--multi_gpu")), {"ACCELERATE_USE_CPU": "true"}


def _hostfile(said: dict[str, Any]) -> bool:
    return bool((said.get("mpirun_config") or {}).get("mpirun_hostfile"))


def _there(named: str | None) -> bool:
    return os.path.isfile(named) if named else accelerate_config.default_file() is not None


def _check(path: str, shown: str) -> None:
    """Read the section; what is wrong stands in the file that the user knows."""
    try:
        from_config(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace(path, shown)) from None
    if os.environ.get(VARIABLE):
        print(f"disthooks: warning: {shown} has a disthooks section: {VARIABLE} is not read", file=sys.stderr)


def _without_section(asked: command.Line, path: str) -> command.Line:
    return dataclasses.replace(asked, options=(*asked.options, "--config_file", path))  # the last one counts
