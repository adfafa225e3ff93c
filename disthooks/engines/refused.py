"""Ways of nesting engines that are not supported: an error that says what works, never hooks that do not fire."""

from __future__ import annotations

from torch import nn

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
