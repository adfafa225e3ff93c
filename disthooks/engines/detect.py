"""Detection of the engine that has taken a model.

A model is refused if hooks would not fire on it, and the error says what works.
"""

# [Note: engines are asked in turn]
# Each engine that `@register("engine")` has decorated is asked whether it recognises a model, and the first that does
# is the model's engine. `DataParallel` comes first, because it needs no torch.distributed; then the library's engines
# in the order of their names; then those of other packages; and `Plain`, which recognises any module. Several may
# recognise a model that is wrapped twice, such as DDP around FSDP1: `refuse_nested` and `refuse_mixed` refuse those
# afterwards. The modules of engines are imported when the first model is looked at, and not before, because FSDP2's
# imports torch.distributed.tensor, which takes seconds.

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from disthooks._match import is_of_class, unwrap_to_engine
from disthooks._ranks import has_several_ranks
from disthooks._registry import other_kinds, own_kinds
from disthooks._torch import ddp_under_way
from disthooks.engines.base import DataParallel, Engine, Plain
from disthooks.errors import AttachError


def detect_engine(model: nn.Module) -> Engine:
    """The engine of ``model``, with its shards.

    The model stays as it is, except that parameters that FSDP2 holds gathered are sharded again. Detection looks at
    every module and parameter, so code that attaches detects the engine once and passes it down.

    Raises:
        UsageError: when ``model`` is no module.
        AttachError: for an engine on which hooks would not fire; the message says what works.

    >>> detect_engine(nn.DataParallel(nn.Linear(2, 2))).label
    'DataParallel'
    >>> [shard.name for shard in detect_engine(nn.Linear(2, 2)).shards]
    ['weight', 'bias']
    """
    model = unwrap_to_engine(model)
    refuse_lazy(model)
    engine = next(kind for kind in engine_kinds() if kind.recognises(model))(model)
    refuse_nested(engine.model)
    refuse_mixed(engine)
    if not is_of_class(model, "DeepSpeedEngine"):
        refuse_unwrapped(model)
    if not engine.shards:
        raise AttachError(f"{type(model).__name__} has no parameters")
    return engine


def engine_kinds() -> Iterator[type[Engine]]:
    """Every engine, in the order in which they are asked; see [Note: engines are asked in turn]."""
    yield DataParallel
    if torch.distributed.is_available():
        yield from (cast("type[Engine]", kind.made) for kind in own_kinds("engine") if kind.made is not Plain)
    yield from (cast("type[Engine]", kind.made) for kind in other_kinds("engine"))
    yield Plain


def refuse_unwrapped(model: nn.Module) -> None:
    """Raise AttachError when DeepSpeed has taken the parameters of ``model``, which is not a DeepSpeed engine."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None:
            raise AttachError(
                f"DeepSpeed has partitioned {name!r}, and no optimizer of torch ever steps it: pass the engine that "
                "deepspeed.initialize returned, not the model inside it"
            )


def refuse_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise AttachError(
                f"{name!r} has no shape yet, because a lazy module makes its parameters in its first forward: run the "
                "model once on an example before the optimizer is made, then attach"
            )


def refuse_nested(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name and is_of_class(module, "DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            raise AttachError(
                f"{name!r} is wrapped in {type(module).__name__} and the rest of the model is not: attach to "
                f"that module with an optimizer of its own, or wrap the whole model"
            )


def refuse_mixed(engine: Engine) -> None:
    """Raise AttachError when FSDP1 or FSDP2 has a part of the model, and another engine has the model."""
    kinds = {"FSDP1": "FullyShardedDataParallel", "FSDP2": "FSDPModule"}
    for name, module in engine.model.named_modules():
        for label, kind in kinds.items():
            if is_of_class(module, kind) and label != engine.label:
                raise AttachError(
                    f"{label} has {name or 'the model'!r} and the engine of the model is {engine.label}, so disthooks "
                    "cannot tell when a gradient is final; use one of them for the whole model"
                )


_REPLICATE = "torch.distributed._composable.replicate"


def refuse_replicate(engine: Engine) -> None:
    """Raise AttachError when torch's old ``replicate`` reduces gradients of a module that looks like a plain one."""
    if not engine.trains_alone or not has_several_ranks():
        return
    for name, module in engine.model.named_modules():
        if any(kind.__module__ == _REPLICATE and kind.__name__ == "DDP" for kind in type(module).__mro__):
            raise AttachError(
                f"{name or 'the model'!r} is in torch.distributed._composable.replicate, which reduces its gradients "
                "over ranks that disthooks cannot find out: NaN would be blamed on the wrong rank, and every rank "
                "would write to the sinks; use nn.parallel.DistributedDataParallel or fully_shard, and attach to the "
                "model that it returns"
            )


def refuse_reduced(engine: Engine) -> None:
    """Raise AttachError when this is called in a forward of DDP, which then reduces the gradients of ``engine``."""
    ddp = ddp_under_way()
    if ddp is None:
        return
    left_out = set(ddp.parameters_to_ignore)
    reduced = {id(parameter) for name, parameter in ddp.module.named_parameters() if name not in left_out}
    for shard in engine.shards:
        if id(shard.parameter) in reduced and shard.parameter.requires_grad:
            raise AttachError(
                f"DDP reduces the gradient of {shard.name!r} over ranks, and gradients() was attached to the module "
                "inside it: each rank would measure its own gradients and write to the sinks as if it were the only "
                "one; attach after DDP took the model, to what nn.parallel.DistributedDataParallel returned"
            )
