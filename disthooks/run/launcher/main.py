"""``disthooks launch``: read its command line, run the launcher, and return the launcher's exit code."""

# [Note: accelerate starts one process for MULTI_CPU]
# Under `distributed_type: MULTI_CPU` accelerate leaves the number of processes to mpirun. Without a hostfile it runs
# the script once, whatever `num_processes` is, and prints no message. It does the same without a `distributed_type` on
# a machine without a GPU. Its launcher for several GPUs starts `num_processes` processes, and with
# ACCELERATE_USE_CPU=true they train on CPUs with gloo. So `disthooks launch` chooses that launcher, and says so on
# stderr. It changes nothing if mpirun has started it, or if the command line asks for another launcher.

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
from disthooks.config.source import VARIABLE
from disthooks.errors import DisthooksError, as_line
from disthooks.run.launcher import accelerate_config, command, failure_report, supervisor
from disthooks.run.launcher.failure_report import VARIABLE as RECORDS
from disthooks.run.launcher.worker import Command, check_target, configuration

_FAULTY = 2
# Environment variables of a process that mpirun has started: it has at least one of them.
_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
USAGE = """usage: disthooks launch [--hooks FILE] [accelerate] [OPTIONS of accelerate launch] SCRIPT ARGS...
       disthooks launch [--hooks FILE] torchrun [OPTIONS of torchrun] SCRIPT ARGS...
       disthooks launch [--hooks FILE] deepspeed [OPTIONS of deepspeed] SCRIPT ARGS...

Every worker runs SCRIPT with hooks attached, as python -m disthooks.run does. The configuration is FILE, else that of
disthooks.run."""


def main(argv: Sequence[str]) -> int:
    """Launch the job of ``argv`` and wait for it. Returns the launcher's exit code; 2 if nothing was started."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else _FAULTY
    try:
        launch = command.read(argv)
        check_target(launch.script, launch.module)
        hooks = _checked_hooks(launch)
        launch, environment = _several_on_cpus(launch)
    except DisthooksError as error:
        print(as_line(error), file=sys.stderr)
        return _FAULTY
    with tempfile.TemporaryDirectory(prefix="disthooks-") as folder:
        return _run(launch, hooks, folder, environment)


def _checked_hooks(launch: command.LaunchCommand) -> str | None:
    """Check the configuration. Returns the path of the hooks file; None if DeepSpeed's JSON has the configuration."""
    if launch.launcher == "accelerate":
        path = launch.chosen.config_file or accelerate_config.default_file()
        if path is not None:
            accelerate_config.refuse_section(path)
    source: Any = configuration(Command(launch.script, launch.module, launch.args, launch.hooks)).source
    from_config(source)
    return os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else None


def _several_on_cpus(launch: command.LaunchCommand) -> tuple[command.LaunchCommand, dict[str, str]]:
    """The command line, and environment, with which accelerate starts all processes on CPUs.

    See [Note: accelerate starts one process for MULTI_CPU].
    """
    chosen = launch.chosen
    if launch.launcher != "accelerate" or any(name in os.environ for name in _OF_MPI):
        return launch, {}
    config = accelerate_config.values(chosen.config_file)
    count, nodes = (getattr(chosen, name) or config.get(name) or 1 for name in ("num_processes", "num_machines"))
    others = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "mpirun_hostfile")
    is_other = any(getattr(chosen, name, False) for name in others)
    is_other |= bool((config.get("mpirun_config") or {}).get("mpirun_hostfile"))
    kind = config.get("distributed_type", "")
    if is_other or count < 2 or nodes > 1 or kind not in ("", "MULTI_CPU") or (not kind and _has_gpu()):
        return launch, {}
    where = "for MULTI_CPU" if kind else "on a machine without a GPU"
    print(
        f"disthooks: accelerate starts one process {where}, unless mpirun starts it: disthooks launch has it "
        f"start {count}, which train on this machine's CPUs with gloo",
        file=sys.stderr,
    )
    return dataclasses.replace(launch, options=(*launch.options, "--multi_gpu")), {"ACCELERATE_USE_CPU": "true"}


def _has_gpu() -> bool:
    import torch  # it takes a second or two, and most command lines do not need it

    return torch.accelerator.is_available()


def _run(launch: command.LaunchCommand, hooks: str | None, folder: str, variables: dict[str, str]) -> int:
    """Run the launcher, and end the workers that outlive it. If it failed, print the rank that failed first."""
    records = os.path.abspath(os.environ.get(RECORDS) or os.path.join(folder, "records"))
    began = time.time()
    environment = {RECORDS: records} | ({VARIABLE: hooks} if hooks else {}) | variables
    code, signals = supervisor.run(launch.launcher, command.launcher_arguments(launch, hooks), environment)
    ranks = failure_report.read(pathlib.Path(records), since=began)
    left = [rank.values for rank in ranks if "ended" not in rank.values]
    supervisor.end_workers(left, f"{RECORDS}={records}", interrupted=signal.SIGINT in signals)
    if code:
        sys.stdout.flush()
        ranks = failure_report.read(pathlib.Path(records), since=began)
        print(failure_report.tell(ranks, signals), end="", file=sys.stderr, flush=True)
    return code
