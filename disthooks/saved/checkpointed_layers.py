"""The layers of a model that run in an activation checkpoint, and a switch that takes the last of them out of it."""

# [Note: checkpoints that are switched off]
# A checkpointed layer is computed twice. One that runs without its checkpoint is computed once, and its saved tensors
# lie in memory until backward has read them. Its gradients are the same bits, because a checkpoint computes again what
# the layer has computed. Backward reads the last layer first: when it comes to an earlier layer, the tensors of the
# last one are free, and the earlier one can be computed again in their room. So the last layers are switched off first.
#
# A layer may only be switched if its second computation has no other effect than its saved tensors:
#
# - Each rank switches its own layers without asking the others. A collective in the layer (tensor parallel, experts, a
#   batch norm over ranks, FSDP inside) would run twice on one rank and once on another: ranks would wait for ever, or
#   one would add up what belongs to another collective.
# - A batch norm updates its running statistics in both computations, so they would depend on the budget.
#
# The first forward in training tells: what changes a buffer or starts a collective then keeps its checkpoint. An engine
# around the layer gathers its weights once for backward, with a checkpoint and without. FSDP and ZeRO-3 inside a layer
# are known by their marks as well, because weights that were fetched ahead start no collective in the layer. Messages
# between two ranks (send, recv) are not counted by NCCL, and remain unseen.
#
# Layers are switched for one forward only. Between forwards the model is as its user made it: copies, pickles and
# evaluations find no trace.

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from disthooks._handles import UncopiedHook
from disthooks._match import canonical_name, is_of_class, unwrap_engine
from disthooks._torch import collectives_so_far
from disthooks.saved.stopwatch import Moment, Stopwatch

_FLAG = "gradient_checkpointing"  # the attribute of a layer of transformers
_WRAPPER, _CALLS = "CheckpointWrapper", "checkpoint_fn"  # torch's wrapper, and its attribute that calls the layer
#: The part of a step that is one forward of a layer, for a stopwatch; and in how many forwards of each it is measured.
LAYER, _TIMED = "layer", 3
_GATHER = ("FSDPModule", "FullyShardedDataParallel")  # classes whose forward gathers weights


class CheckpointedLayers:
    """The layers of ``model`` whose checkpoints can be switched off, in the order of its modules.

    These are modules with ``gradient_checkpointing = True`` (transformers) and torch's ``CheckpointWrapper``
    (``apply_activation_checkpointing``, torchtitan, accelerate). A layer that changes a buffer or starts a collective
    in its first forward in training is none of them any more. A function that the model itself gives to
    ``torch.utils.checkpoint.checkpoint`` has no switch.

    >>> import torch
    >>> from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    >>> model = nn.Sequential(*(checkpoint_wrapper(nn.Linear(2, 2)) for _ in range(3)))
    >>> layers = CheckpointedLayers(model, [""])
    >>> len(layers), layers.known, model(torch.ones(2)).shape, layers.known
    (3, {}, torch.Size([2]), {'0': True, '1': True, '2': True})
    >>> layers.switch_off(2)
    >>> layers.switch_on()
    """

    def __init__(
        self,
        model: nn.Module | None,
        names: Iterable[str],
        known: Mapping[str, bool] = MappingProxyType({}),
        watch: Stopwatch | None = None,
    ) -> None:
        self._layers: dict[str, _Layer] = {}
        self._undo: list[Callable[[], None]] = []
        for path, module in () if model is None else unwrap_engine(model).named_modules():
            name = canonical_name(path)
            if _can_be_switched(module) and _is_in(name, names):
                self._layers[name] = _Layer(module, known.get(name), watch)

    def __len__(self) -> int:
        return len(self._candidates())

    @property
    def known(self) -> dict[str, bool]:
        """For each layer that has run in training, whether its checkpoint can be switched off."""
        return {name: layer.is_free for name, layer in self._layers.items() if layer.is_free is not None}

    def switch_off(self, count: int) -> None:
        """Let the last ``count`` layers run without their checkpoints until :meth:`switch_on`.

        A layer among them that has not run yet keeps its checkpoint in its first forward, which tells what it does.
        """
        for layer in self._candidates()[len(self) - count :]:
            if layer.is_free:
                self._undo += layer.switch_off()

    def switch_on(self) -> None:
        """Let all layers run in their checkpoints again."""
        while self._undo:
            self._undo.pop()()

    def remove(self) -> None:
        """Take off the hooks that wait for the first forward."""
        self.switch_on()
        for layer in self._layers.values():
            layer.remove()

    def _candidates(self) -> list[_Layer]:
        return [layer for layer in self._layers.values() if layer.is_free is not False]


class _Layer:
    """A checkpointed layer. It does not keep its module alive, because hooks of the model hold this object.

    Attributes:
        is_free: whether it did nothing in training that a second computation would do again; None before it has run.
    """

    def __init__(self, module: nn.Module, is_free: bool | None, watch: Stopwatch | None) -> None:
        self._module, self.is_free, self._watch = weakref.ref(module), is_free, watch
        self._before: tuple[list[torch.Tensor], list[int], int | None] | None = None
        self._begin_moment: Moment | None = None
        self._forwards = 0
        self._handles = []
        if is_free is None or (is_free and watch is not None):
            self._handles.append(module.register_forward_pre_hook(UncopiedHook(self._begin)))
            self._handles.append(module.register_forward_hook(UncopiedHook(self._end)))

    def switch_off(self) -> list[Callable[[], None]]:
        """Take the layer out of its checkpoint. Returns what undoes it, at most one function."""
        module = self._module()
        if module is None:
            return []
        name, off = (_CALLS, _call) if is_of_class(module, _WRAPPER) else (_FLAG, False)
        before = getattr(module, name)
        setattr(module, name, off)
        return [lambda: setattr(module, name, before)]

    def remove(self) -> None:
        """Take off the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, module: nn.Module, *_: Any) -> None:
        self._before = _state(module) if module.training and torch.is_grad_enabled() else None
        # The first forward of a process takes longer than others.
        self._begin_moment = None if self._watch is None or not self._forwards else self._watch.now()

    def _end(self, module: nn.Module, *_: Any) -> None:
        if self._watch is not None and self._begin_moment is not None:
            self._watch.add(LAYER, 1, self._begin_moment, self._watch.now())
        if self._before is None:
            return
        self._forwards += 1
        if self.is_free is None:
            (buffers, versions, count), (now, later, counted) = self._before, _state(module)
            is_same = len(buffers) == len(now) and all(one is other for one, other in zip(buffers, now, strict=True))
            self.is_free = is_same and versions == later and count is not None and count == counted
        self._before = None
        if self._watch is None or self._forwards > _TIMED or not self.is_free:
            self.remove()


def _state(module: nn.Module) -> tuple[list[torch.Tensor], list[int], int | None]:
    """The buffers of ``module``, how many times each was changed, and how many collectives this process has started."""
    buffers = list(module.buffers())
    return buffers, [buffer._version for buffer in buffers], collectives_so_far()


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands in the place of a checkpoint."""
    return function(*args, **kwargs)


def _can_be_switched(module: nn.Module) -> bool:
    """Whether ``module`` is an innermost checkpointed module, not compiled, with no part of an engine inside."""
    inside = (each for each in module.modules() if each is not module)
    is_one = _is_checkpointed(module) and module._compiled_call_impl is None
    return is_one and not any(_is_checkpointed(each) or _gathers(each) for each in inside)


def _is_in(name: str, names: Iterable[str]) -> bool:
    """Whether the module of this name is one of ``names``, or a part of one."""
    return any(not each or f"{name}.".startswith(f"{each}.") for each in names)


def _is_checkpointed(module: nn.Module) -> bool:
    return is_of_class(module, _WRAPPER) or getattr(module, _FLAG, False) is True


def _gathers(module: nn.Module) -> bool:
    """Whether ``module`` gathers its weights in forward: ZeRO-3 marks each parameter that it has partitioned."""
    parameters = module.parameters(recurse=False)
    return is_of_class(module, *_GATHER) or any(hasattr(parameter, "ds_id") for parameter in parameters)
