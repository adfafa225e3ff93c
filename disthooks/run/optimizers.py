"""The optimizers that a script has made, and the model that each of them belongs to."""

# [Note: whose parameters an optimizer holds]
# An optimizer belongs to the model that holds all its parameters. Parameters are compared by identity, when a module is
# called, because a wrapper may replace them after the optimizer was made (FSDP1, FSDP2). DeepSpeed's optimizers hold
# flat partitions that no module has, so DeepSpeed's engine is asked for its optimizers instead. A module that holds
# only some of an optimizer's parameters is a part of the model, such as a generator beside its discriminator, or the
# network inside a LightningModule. The session then waits for the whole model, and keeps this reason for its message.

# [Note: ranks without hooks]
# Besides the ways in [Note: processes that train alone] there are two more. `accelerate launch` on CPUs starts one
# process and leaves the others to mpirun: nothing is wrong with that process, so the user is only warned. Lightning
# starts the other ranks itself, without disthooks in them: this process would wait forever for ranks that run no hooks.
# So the session does not attach, and the user is told how to start the ranks.

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disthooks._match import is_of_class
from disthooks._ranks import has_several_ranks, launched_world_size, world_size
from disthooks.config.agree import reason_alone
from disthooks.engines.base import DataParallel, Engine, Plain
from disthooks.engines.detect import detect_engine
from disthooks.errors import AttachError

_MAX_LOOKS = 4  # how often one module is compared with the waiting optimizers; its later calls cost nothing


class ScriptOptimizers:
    """The optimizers of a script: those that wait for their model, and those for which the session is done.

    All of them are held weakly; see [Note: nothing is kept alive].
    """

    def __init__(self) -> None:
        self.left_alone: list[str] = []
        self._waiting: list[weakref.ref[Any]] = []
        self._done: list[weakref.ref[Any]] = []  # the session has attached, or there is nothing to attach
        self._looks: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    @property
    def waiting(self) -> list[Any]:
        return [optimizer for ref in self._waiting if (optimizer := ref()) is not None]

    def add(self, optimizer: Any) -> None:
        """Let a new optimizer wait for its model. Modules that were compared before are compared again."""
        self._waiting.append(weakref.ref(optimizer))
        self._looks.clear()

    def should_look(self, module: nn.Module) -> bool:
        """Whether to compare a module that is called with the waiting optimizers. Counts the comparison."""
        looks = self._looks.get(module, 0)
        self._looks[module] = min(looks + 1, _MAX_LOOKS)
        return looks < _MAX_LOOKS

    def of_model(self, model: nn.Module, is_outermost: bool) -> list[Any]:
        """The waiting optimizers that belong to `model`; see [Note: whose parameters an optimizer holds]."""
        if is_of_class(model, "DeepSpeedEngine"):
            own = (getattr(model, "basic_optimizer", None), getattr(model, "optimizer", None))
            return [one for one in self.waiting if any(one is each for each in own)] if own[0] is not None else []
        if is_outermost:
            reshard(model)
        of_model = {id(parameter) for parameter in model.parameters()}
        whole = []
        for optimizer in self.waiting:
            of_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if of_optimizer and of_optimizer <= of_model:
                whole.append(optimizer)
            elif of_optimizer & of_model:
                self._reasons.setdefault(
                    optimizer,
                    f"{type(model).__name__} was called and has only some of the parameters that "
                    f"{type(optimizer).__name__} holds; call the whole model, or attach in the script with "
                    "disthooks.prepare(model, optimizer); with Lightning, give the Trainer "
                    "disthooks.integrations.lightning's DisthooksCallback",
                )
        return whole

    def refuse(self, optimizers: Sequence[Any], reason: str) -> None:
        """Remember the reason why the session did not attach to the model of these optimizers. They go on waiting."""
        for optimizer in optimizers:
            self._reasons[optimizer] = reason

    def reason(self, optimizer: Any) -> str:
        """A text for the user: why the session has not attached to the model of `optimizer`, and the remedy."""
        return (
            self._reasons.get(optimizer)
            or reason_alone()
            or (
                "no module that holds its parameters was called with gradients on (outside of what torch.compile "
                "traces), or the optimizer was made before fully_shard, which replaces parameters; attach in the "
                "script with disthooks.prepare(model, optimizer)"
            )
        )

    def is_waiting(self, optimizer: Any) -> bool:
        return any(ref() is optimizer for ref in self._waiting)

    def is_done(self, optimizer: Any) -> bool:
        return any(ref() is optimizer for ref in self._done)

    def mark_done(self, optimizers: Sequence[Any]) -> None:
        self._done = [ref for ref in self._done if ref() is not None]
        self._done += [weakref.ref(optimizer) for optimizer in optimizers]
        self._waiting = [weakref.ref(one) for one in self.waiting if not self.is_done(one)]

    def stop_waiting(self) -> None:
        self._waiting.clear()

    def leave_alone(self, optimizer: Any, reason: str) -> bool:
        """Note that `optimizer` gets no attachment. False if the same was noted for another one of its class."""
        line = f"{type(optimizer).__name__}: {reason}"
        if line in self.left_alone:
            return False
        self.left_alone.append(line)
        return True


def calls_closure_again(optimizer: Any) -> bool:
    """Whether a step of `optimizer` calls its closure several times: gradients are final only after the last call."""
    return isinstance(optimizer, torch.optim.LBFGS)


def reshard(model: nn.Module) -> None:
    """Put FSDP2's sharded parameters back: after a forward without gradients the root still has the gathered ones."""
    for part in model.modules():
        if is_of_class(part, "FSDPModule"):
            part.reshard()  # type: ignore[operator]


def started_alone() -> str | None:
    """A warning for a process that accelerate started alone although several were configured; None otherwise.

    Accelerate sets a port at which the processes shall meet, and leaves WORLD_SIZE to mpirun. See
    [Note: ranks without hooks].
    """
    is_from_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    if not is_from_accelerate or any("WORLD_SIZE" in name or name == "PMI_SIZE" for name in os.environ):
        return None
    return (
        "WARNING: accelerate was told to start several processes and started this one alone: on CPUs it leaves the "
        "others to mpirun. This is one process's training. To start all of them, use accelerate launch --multi_gpu "
        "with ACCELERATE_USE_CPU=true, or torchrun"
    )


def engine_to_attach(model: nn.Module, has_group: bool) -> Engine:
    """The engine of a model that is called. AttachError says why hooks must not be attached, and what to do."""
    engine = detect_engine(model)
    # Lightning has run the script again for each other rank. It sets these variables, and no RANK.
    by_lightning = "NODE_RANK" in os.environ and "WORLD_SIZE" in os.environ and "RANK" not in os.environ
    modules = ("lightning", "pytorch_lightning", "lightning_fabric")
    if has_several_ranks() and by_lightning and any(name in sys.modules for name in modules):
        raise AttachError(  # See [Note: ranks without hooks]
            "Lightning started the other processes itself, without disthooks.run: they would not take part in what "
            "this one asks of them. Start all with torchrun --nproc-per-node N -m disthooks.run, or give the Trainer "
            "disthooks.integrations.lightning's DisthooksCallback"
        )
    if reason := reason_alone():
        raise AttachError(reason)
    count = max(launched_world_size(), world_size())
    if isinstance(engine, (Plain, DataParallel)) and count > 1 and not has_group:
        raise AttachError(
            f"{type(model).__name__} was called without a wrapper, and there are {count} processes: wrap it with "
            "DistributedDataParallel, FullyShardedDataParallel, fully_shard, deepspeed.initialize or "
            "Accelerator.prepare, and call what that returns; on CPUs accelerate wraps only under "
            "ACCELERATE_USE_CPU=true"
        )
    return engine
