"""Ways of nesting engines that are not supported: an error that says what works, never hooks that do not fire."""

from __future__ import annotations

import torch
from torch import nn

from disthooks._torch import ddp_under_way
from disthooks.engines.base import Engine, is_a
from disthooks.errors import AttachError


def refuse_unwrapped(model: nn.Module) -> None:
    """Raise AttachError when DeepSpeed has taken the parameters of ``model`` and this is not its engine."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None:
            raise AttachError(
                f"DeepSpeed has partitioned {name!r}, and no optimizer of torch ever steps it: pass the engine that "
                "deepspeed.initialize returned, not the model inside it"
            )


def refuse_lazy(model: nn.Module) -> None:
    """Raise AttachError when a lazy module in ``model`` has not made its parameters yet."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise AttachError(
                f"{name!r} has no shape yet, because a lazy module makes its parameters in its first forward: run the "
                "model once on an example before the optimizer is made, then attach"
            )


def refuse_nested(model: nn.Module) -> None:
    """Raise AttachError when a part of ``model`` is in a wrapper of its own."""
    for name, module in model.named_modules():
        if name and is_a(module, "DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            raise AttachError(
                f"{name!r} is wrapped in {type(module).__name__} and the rest of the model is not: attach to "
                f"that module with an optimizer of its own, or wrap the whole model"
            )


def refuse_mixed(engine: Engine) -> None:
    """Raise AttachError when a part of the model is FSDP1's, and another engine has the whole, or another part."""
    kinds = {"FSDP1": "FullyShardedDataParallel", "FSDP2": "FSDPModule"}
    for name, module in engine.model.named_modules():
        for label, kind in kinds.items():
            if is_a(module, kind) and label != engine.label:
                raise AttachError(
                    f"{name or 'the model'!r} is {label}'s and the model is {engine.label}'s: what becomes of a "
                    "gradient there cannot be told; use one of them for the whole model"
                )


def this_rank() -> int:
    """This process's global rank; 0 where there is no process group.

    >>> this_rank()
    0
    """
    return torch.distributed.get_rank() if several_ranks() else 0


def several_ranks() -> bool:
    """Whether there is a process group of several ranks.

    >>> several_ranks()
    False
    """
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return ready and torch.distributed.get_world_size() > 1


def refuse_replicate(engine: Engine) -> None:
    """Raise AttachError when torch's old ``replicate`` reduces gradients of a module that looks like a plain one."""
    if not engine.alone or not several_ranks():
        return
    for name, module in engine.model.named_modules():
        if any(kind.__module__ == _REPLICATE and kind.__name__ == "DDP" for kind in type(module).__mro__):
            raise AttachError(
                f"{name or 'the model'!r} is in torch.distributed._composable.replicate, which reduces its gradients "
                "and does not say with whom: NaN would be blamed on the wrong rank, and every rank would write to the "
                "sinks; use nn.parallel.DistributedDataParallel, or fully_shard, and attach to what that returns"
            )


def refuse_reduced(engine: Engine) -> None:
    """From a forward of ``engine``'s model: raise AttachError when DDP runs it, and so reduces its gradients."""
    ddp = ddp_under_way()
    if ddp is None:
        return
    left_out = set(ddp.parameters_to_ignore)
    reduced = {id(parameter) for name, parameter in ddp.module.named_parameters() if name not in left_out}
    for shard in engine.shards:
        if id(shard.parameter) in reduced and shard.parameter.requires_grad:
            raise AttachError(
                f"DDP reduces the gradient of {shard.name!r} over ranks, and gradients() was attached to the module "
                "inside it: each rank would measure by itself, call itself the first and write to the sinks; attach "
                "after DDP took the model, to what nn.parallel.DistributedDataParallel returned"
            )


_REPLICATE = "torch.distributed._composable.replicate"
