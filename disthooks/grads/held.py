"""What an optimizer holds, and when a step of it is one that rules can be applied to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from disthooks.engines.base import Engine
from disthooks.engines.shard import Shard
from disthooks.errors import AttachError, UsageError


def ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The identities of the parameters of all groups."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def wanted_of(engine: Engine, held: Sequence[nn.Parameter]) -> list[int]:
    """Which of the engine's shards the optimizer holds.

    Raises:
        AttachError: when it holds a parameter that is not the model's.
    """
    known, ids = {id(shard.parameter) for shard in engine.shards}, {id(parameter) for parameter in held}
    strange = [parameter for parameter in held if id(parameter) not in known]
    if strange or not held:
        raise AttachError(_strangers(strange, [s for s in engine.shards if id(s.parameter) not in ids], engine))
    return [i for i, shard in enumerate(engine.shards) if id(shard.parameter) in ids]


def _strangers(strange: Sequence[nn.Parameter], missed: Sequence[Shard], engine: Engine) -> str:
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strange[:3])
    names = ", ".join(shard.name for shard in missed[:5])
    return (
        f"{len(strange)} parameters of the optimizer (shapes {shapes}) are not in the model ({engine.label}), and the "
        f"model has {len(missed)} that the optimizer does not hold ({names}): make the optimizer from this model's "
        "parameters, after fully_shard or whatever else replaces them"
    )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError when gradients are not final at the start of this step."""
    if getattr(optimizer, "grad_scale", None) is not None:  # a fused optimizer divides by it inside its kernel
        raise UsageError(
            f"the gradients are still multiplied by the scale of a GradScaler, which {type(optimizer).__name__} takes "
            "out inside its kernel: call scaler.unscale_(optimizer) before scaler.step(optimizer)"
        )
