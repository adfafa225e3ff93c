"""What goes wrong between launchers and what they start: rules over the facts of ``disthooks env``.

``disthooks launch``: start a training script with a hooks file under a launcher.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer

Facts = Mapping[str, Any]
Told = Iterator[tuple[str, str, str]]
_ALONE = "each process would believe to be alone: it trains on all the data, and nobody adds up gradients"


def _number(told: Mapping[str, str], *names: str) -> int:
    """The first of the variables that is a number; 1 without."""
    return next((int(told[name]) for name in names if told.get(name, "").isdigit()), 1)


def _whole(value: Any, otherwise: int) -> int:
    """A number of somebody's file, which may hold anything."""
    return value if isinstance(value, int) else otherwise


def _alone(facts: Facts) -> Told:
    told = facts["environment"]
    world = _number(told, "WORLD_SIZE")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in told]
    if world > 1 and missing:
        why = f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set, so no process group can be made; {_ALONE}"
        yield "several processes", why, "start them with torchrun, accelerate launch, deepspeed or `disthooks launch`"
    started = {"srun": "SLURM_NTASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "a PMI launcher": "PMI_SIZE"}
    for by, name in started.items():
        if _number(told, name) > 1 and "WORLD_SIZE" not in told:
            yield (
                "several processes",
                f"{by} started {told[name]} ({name}), and torch reads none of its variables; {_ALONE}",
                "one task for each node, and torchrun in it, as launch/slurm.sbatch does",
            )


def _rendezvous(facts: Facts) -> Told:
    told = facts["environment"]
    world, here = _number(told, "WORLD_SIZE"), _number(told, "LOCAL_WORLD_SIZE")
    if world > here > 0 and "LOCAL_WORLD_SIZE" in told and told.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        why = f"MASTER_ADDR is {told['MASTER_ADDR']}, and {world - here} of {world} processes are on other nodes"
        yield "several nodes", why, "give the address of the first node"


def _restarts(facts: Facts) -> Told:
    told = facts["environment"]
    restarts = max(
        _number(told, name) if name in told else 0 for name in ("PET_MAX_RESTARTS", "TORCHELASTIC_MAX_RESTARTS")
    )
    restarts = max(restarts, _whole((facts["accelerate"] or {}).get("max_restarts"), 0))
    if restarts and told.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        why = (
            f"--max-restarts {restarts} never recovered with torch 2.13 and gloo: the store dies with the first attempt"
        )
        yield "restarts", why, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"


def _threads(facts: Facts) -> Told:
    told, usable = facts["environment"], facts["cpu"]["usable"]
    processes = max(_number(told, "LOCAL_WORLD_SIZE"), _number(told, "PET_NPROC_PER_NODE"))
    wanted = max(1, usable // processes)
    if processes > 1 and told.get("OMP_NUM_THREADS", "1") == "1" and wanted > 1:
        why = f"torchrun sets OMP_NUM_THREADS to 1 where it is not set: {processes} of {usable} cores would compute"
        yield "threads", why, f"OMP_NUM_THREADS={wanted}"


def _accelerate(facts: Facts) -> Told:
    config = facts["accelerate"] or {}
    kind, count = str(config.get("distributed_type", "")).upper(), _whole(config.get("num_processes"), 1)
    where = f"accelerate launch with {config.get('path')}"
    if "disthooks" in config.get("keys", ()):
        why = "accelerate refuses keys that it does not know, `disthooks` too"
        yield where, why, "`disthooks launch --config_file FILE`, which takes it out; or DISTHOOKS_CONFIG=hooks.yaml"
    if kind == "MULTI_CPU" and count > 1 and not facts["tools"]["mpirun"]:
        yield where, f"MULTI_CPU without mpirun starts one process, not {count}", "torchrun, or install an MPI"
    if kind == "MULTI_GPU" and config.get("use_cpu"):
        yield where, f"MULTI_GPU with use_cpu: {_ALONE}", "distributed_type: MULTI_CPU with an MPI, or use torchrun"
    yield from _on_cpu(facts, where, kind, bool(config.get("use_cpu")))


def _on_cpu(facts: Facts, where: str, kind: str, asked: bool) -> Told:
    """What ``ACCELERATE_USE_CPU``, which ``use_cpu: true`` sets too, does to engines."""
    told = facts["environment"]
    if told.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        asked, where = True, "ACCELERATE_USE_CPU"
        for name, engine in (("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"), ("ACCELERATE_USE_FSDP", "FSDP")):
            kind = engine if told.get(name, "").lower() in ("1", "true", "yes") else kind
    if asked and kind in ("DEEPSPEED", "FSDP"):
        why = f"on the CPU accelerate makes DDP of {kind} without a word: nothing would be sharded"
        yield where, why, "without GPUs use the engine by itself: torchrun with fully_shard, or deepspeed"
    if kind == "DEEPSPEED" and not facts["torch"]["devices"] and facts["versions"]["transformers"] is None:
        yield (
            where,
            "accelerate's DeepSpeed needs transformers on a CPU, and it is not installed",
            "pip install transformers",
        )


LAUNCHERS: tuple[Callable[[Facts], Told], ...] = (_alone, _rendezvous, _restarts, _threads, _accelerate)


def launch(words: typer.Context) -> None:
    """Start a script under accelerate (or torchrun, deepspeed) with its hooks: launch [LAUNCHER] OPTIONS SCRIPT ARGS.

    LAUNCHER is torchrun, deepspeed or accelerate, which it is when there is none. Every word after "launch" goes to
    the launcher as it stands, and every word after the script to the script.
    """
    # Asked for by name: of this package no other file, and no other command, needs it.
    started: int = importlib.import_module("disthooks.launcher").main(list(words.args))
    raise typer.Exit(started)
