"""Engines that are known and not supported: an error that says what works, never hooks that do not fire."""

from __future__ import annotations

from torch import nn

from disthooks.engines.base import is_a
from disthooks.errors import AttachError

_REMEDIES = {
    "FullyShardedDataParallel": "FSDP1 ({name}) hides parameters in flat shards, on which no gradient hook fires: use "
    "torch.distributed.fsdp.fully_shard (FSDP2), which is supported, or FSDP1's own model.clip_grad_norm_()",
    "DeepSpeedEngine": "DeepSpeed ({name}) steps on flat partitions without names: use DDP or fully_shard, which are "
    "supported, or DeepSpeed's own 'gradient_clipping' and engine.get_global_grad_norm()",
}


def refuse(model: nn.Module) -> None:
    """Raise AttachError when ``model`` is, or has in it, what no hook of ours would fire on."""
    for name, module in model.named_modules():
        for kind, remedy in _REMEDIES.items():
            if is_a(module, kind):
                raise AttachError(remedy.format(name=repr(name) if name else "the model"))


def refuse_nested(model: nn.Module) -> None:
    """Raise AttachError when a part of ``model`` is in a wrapper of its own."""
    for name, module in model.named_modules():
        if name and is_a(module, "DistributedDataParallel", "DataParallel"):
            raise AttachError(
                f"{name!r} is wrapped in {type(module).__name__} and the rest of the model is not: attach to "
                f"that module with an optimizer of its own, or wrap the whole model"
            )
