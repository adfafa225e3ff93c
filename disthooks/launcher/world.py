"""How many processes there should be, how many there are, and who can be attached to."""

from __future__ import annotations

import os
import sys

from torch import nn

from disthooks._match import is_of_class
from disthooks._ranks import has_process_group, has_several_ranks, launched_world_size, trains_alone, world_size
from disthooks.engines.base import DataParallel, Plain
from disthooks.engines.detect import detect_engine
from disthooks.errors import AttachError


def alone() -> str | None:
    """What to do when several were started and this one believes to be the only one; None if all is well."""
    if not trains_alone():
        return None
    there = "a process group of one" if has_process_group() else "no process group"
    return (
        f"{launched_world_size()} processes were started and this one has {there}: each trains alone. Call "
        "torch.distributed.init_process_group() before the model is wrapped; with accelerate on CPUs set "
        "ACCELERATE_USE_CPU=true"
    )


def one_of_several() -> str | None:
    """What to say in a process that accelerate started alone although several were asked for; None if all is well.

    For CPUs accelerate leaves the other processes to mpirun. It sets a port for them to meet at, and no WORLD_SIZE.
    """
    of_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    if not of_accelerate or any("WORLD_SIZE" in name or name == "PMI_SIZE" for name in os.environ):
        return None
    return (
        "WARNING: accelerate was told to start several processes and started this one alone: on CPUs it leaves the "
        "others to mpirun. This is one process's training. disthooks launch starts all of them; so does accelerate "
        "launch --multi_gpu with ACCELERATE_USE_CPU=true"
    )


def _started_by_lightning() -> bool:
    """Whether Lightning ran the script again for each other rank; it says so in variables of its own, without RANK."""
    of_lightning = "NODE_RANK" in os.environ and "WORLD_SIZE" in os.environ and "RANK" not in os.environ
    modules = ("lightning", "pytorch_lightning", "lightning_fabric")
    return has_several_ranks() and of_lightning and any(name in sys.modules for name in modules)


def refusal(model: nn.Module) -> str | None:
    """Why a model that is called cannot be the one to attach to; None if it can."""
    try:
        engine = detect_engine(model)
    except AttachError as error:
        return str(error)
    if _started_by_lightning():
        return (
            "Lightning started the other processes itself, without disthooks.run: they would not take part in what "
            "this one asks of them. Start all with torchrun --nproc-per-node N -m disthooks.run, or give the Trainer "
            "disthooks.integrations.lightning's DisthooksCallback"
        )
    count = max(launched_world_size(), world_size())
    if isinstance(engine, (Plain, DataParallel)) and count > 1:
        return alone() or (
            f"{type(model).__name__} was called without a wrapper, and there are {count} processes: wrap it with "
            "DistributedDataParallel, FullyShardedDataParallel, fully_shard, deepspeed.initialize or "
            "Accelerator.prepare, and call what that returns; on CPUs accelerate wraps only under "
            "ACCELERATE_USE_CPU=true"
        )
    return alone()


def reshard(model: nn.Module) -> None:
    """Have FSDP2 put its own parameters back: after a forward without gradients the root's are still whole ones."""
    for part in model.modules():
        if is_of_class(part, "FSDPModule"):
            part.reshard()  # type: ignore[operator]
