"""The layers of a model that run in an activation checkpoint, and a switch that takes the last of them out of it."""

# [Note: checkpoints that are switched off]
# A checkpointed layer is computed twice. One that runs without its checkpoint is computed once, and its saved tensors
# lie in memory until backward has read them. Its gradients are the same bits, because a checkpoint computes again what
# the layer has computed. Backward reads the last layer first: when it comes to an earlier layer, the tensors of the
# last one are free, and the earlier one can be computed again in their room. So the last layers are switched off first.
#
# A layer with a part of an engine inside it keeps its checkpoint: when FSDP or ZeRO-3 computes such a layer again, it
# gathers weights, and the ranks have to do that in the same order. Each rank switches its own layers without asking the
# others, so what is switched must not change a collective. An engine that wraps the layer from outside gathers its
# weights once for backward, with a checkpoint and without.

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from disthooks._match import canonical_name, is_of_class, unwrap_engine

_FLAG = "gradient_checkpointing"  # the attribute of a layer of transformers
_WRAPPER, _CALLS = "CheckpointWrapper", "checkpoint_fn"  # torch's wrapper, and its attribute that calls the layer
_GATHER = ("FSDPModule", "FullyShardedDataParallel")  # classes whose forward gathers weights


class CheckpointedLayers:
    """The layers of ``model`` whose checkpoints can be switched off, in the order of its modules.

    These are modules with ``gradient_checkpointing = True`` (transformers) and torch's ``CheckpointWrapper``
    (``apply_activation_checkpointing``, torchtitan, accelerate). A function that the model itself gives to
    ``torch.utils.checkpoint.checkpoint`` has no switch.

    Args:
        model: may be wrapped by an engine; None for no layers.
        names: of the modules whose saved tensors are hooked. Other layers keep their checkpoints.

    >>> from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    >>> layers = CheckpointedLayers(nn.Sequential(*(checkpoint_wrapper(nn.Linear(2, 2)) for _ in range(3))), [""])
    >>> layers.switch_off(2)
    >>> len(layers), layers.off
    (3, 2)
    """

    def __init__(self, model: nn.Module | None, names: Iterable[str]) -> None:
        found = () if model is None else _layers(unwrap_engine(model))
        # Weak: hooks of the model hold this object, and a model in a cycle would keep its memory.
        self._layers = [weakref.ref(layer) for name, layer in found if _is_in(name, names)]
        self._before: list[Any] = []  # the attribute of each layer that is switched off, from the last layer on

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def off(self) -> int:
        """How many layers, from the last one on, run without their checkpoint."""
        return len(self._before)

    def switch_off(self, count: int) -> None:
        """Let the last ``count`` layers run without their checkpoint in the next forward, and all others with it."""
        while self.off > count:
            _set(self._layers[-self.off](), self._before.pop())
        while self.off < count:
            self._before.append(_set(self._layers[-1 - self.off]()))


def _set(layer: nn.Module | None, value: Any = None) -> Any:
    """Set the attribute of ``layer`` to ``value``, or switch its checkpoint off. Returns what it was."""
    if layer is None:
        return None
    name, off = (_CALLS, _call) if is_of_class(layer, _WRAPPER) else (_FLAG, False)
    before = getattr(layer, name)
    setattr(layer, name, off if value is None else value)
    return before


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands in the place of a checkpoint."""
    return function(*args, **kwargs)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The innermost checkpointed modules that contain no part of an engine, with their names."""
    for name, module in model.named_modules():
        inside = (each for each in module.modules() if each is not module)
        if _is_checkpointed(module) and not any(_is_checkpointed(each) or _gathers(each) for each in inside):
            yield canonical_name(name), module


def _is_in(name: str, names: Iterable[str]) -> bool:
    """Whether the module of this name is one of ``names``, or a part of one."""
    return any(not each or f"{name}.".startswith(f"{each}.") for each in names)


def _is_checkpointed(module: nn.Module) -> bool:
    return is_of_class(module, _WRAPPER) or getattr(module, _FLAG, False) is True


def _gathers(module: nn.Module) -> bool:
    """Whether ``module`` gathers its weights in forward: ZeRO-3 marks each parameter that it has partitioned."""
    parameters = module.parameters(recurse=False)
    return is_of_class(module, *_GATHER) or any(hasattr(parameter, "ds_id") for parameter in parameters)
