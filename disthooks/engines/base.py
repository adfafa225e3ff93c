"""The base class of engines, and the engines of a single process: a plain module and ``nn.DataParallel``.

An engine describes one way of training a model on several ranks. It knows where a gradient lives, which elements of it
this rank has, and when it is final. Rules, statistics and reports are written once, in terms of :class:`Shard` and
:class:`Engine`.

To add an engine, write a subclass of :class:`Engine` and put ``@register("engine")`` on it. These methods say:

=====================  =================================================================================================
``recognises``         whether a model is this engine's, by the names of classes (``_match.is_of_class``)
``__init__``           which ranks train together, and which of them this one is; ``AttachError`` if hooks cannot work
``shard``              which part of one parameter this rank has
``reason_unreduced``   why the gradients in memory are not those that all ranks would step with, if they are not
``before_step``        how a function is called when gradients are final, just before the optimizer uses them
``on_local``           how a hook is called with this rank's own gradients, before they are reduced
``is_first_gradient``  whether a local gradient begins a step, or is added to those of earlier micro-batches
=====================  =================================================================================================

The base class is right for a plain module, so an engine overrides only what is different. ``detect.py`` asks all
registered engines which of them recognises a model.
"""

# [Note: placements of a gradient]
# Autograd gives a DTensor parameter a gradient with placements of its own. Under sequence parallelism the gradient of a
# replicated norm weight is `Partial` (each rank has the sum over its part of the sequence), and the gradient of an
# embedding that is sharded by rows is `Replicate`. Each operator of the optimizer redistributes such a gradient when it
# reads it. `Shard.gradient` redistributes it once, before the step, and keeps the result in `.grad`: the optimizer
# computes with the same values, and a rule or a statistic sees the elements that this rank's part of the parameter has.
# All ranks of the mesh have the same placements and call `gradient` for the parameters in the same order, so their
# collectives meet.
#
# [Note: hooks on leaves]
# A local hook is a tensor hook on the parameter (`register_hook`), and not a post-accumulate hook. A tensor hook is
# called once in a backward, with this micro-batch's gradient alone, before DDP or ZeRO has reduced anything, and the
# tensor that it returns replaces the gradient. A post-accumulate hook sees the sum of all micro-batches so far, so an
# edit there would be applied again to gradients that were edited before. torch accepts a tensor hook only for a tensor
# that needs gradients, but keeps it while the parameter is frozen, and calls it after the parameter is unfrozen
# (`needing_gradients`). No hook may run a collective: if one rank did not use a parameter, its hook would not run
# there, and the other ranks would wait for it for ever.
# FSDP1 and FSDP2 never call a tensor hook of the parameters that the user sees; see fsdp1.py and fsdp2.py.
#
# [Note: the parameters must stay]
# A hook is on one tensor. If the tensor is replaced after hooks were attached, by `fully_shard`, by an engine that
# takes the model later or by `module.weight = ...`, the hooks never fire again, and torch does not report it. So
# `check` compares identities in every step: the tensor that each module has registered under a name with the one that
# was there when hooks were attached. A module may be replaced by a wrapper around the same parameters (activation
# checkpointing does that); then `check` looks up anew where the parameters are registered.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from disthooks._match import canonical_name, is_of_class, unwrap_engine
from disthooks._ranks import global_rank
from disthooks._registry import register
from disthooks._tensors import local_part, needing_gradients
from disthooks.engines.optimizer_step import OnRepeat, all_optimizers
from disthooks.engines.step import Step, StepFunctions, parameters_of
from disthooks.errors import AttachError, UsageError

#: How a parameter is distributed over the ranks; see :class:`Shard`.
Sharding = Literal["whole", "replica", "sharded", "unreduced"]

#: A function of an index into ``Engine.shards`` and a gradient; its result, unless None, replaces the gradient.
LocalHook = Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Part:
    """Which elements of a whole parameter are on this rank: a box of it, or a range of its flattened elements.

    Attributes:
        shape: the shape of the whole parameter.
        box: for each dimension where the part starts and how long it is; None if the part is a range.
        span: first and one past the last element of the flattened parameter; None if the part is a box.

    >>> Part.whole(torch.Size([2, 3])).indices(torch.device("cpu"))
    tensor([[0, 1, 2],
            [3, 4, 5]])
    >>> Part(torch.Size([2, 3]), box=((1, 1), (0, 2))).indices(torch.device("cpu"))
    tensor([[3, 4]])
    >>> Part(torch.Size([2, 3]), span=(2, 5)).indices(torch.device("cpu"))
    tensor([2, 3, 4])
    """

    shape: torch.Size
    box: tuple[tuple[int, int], ...] | None = None
    span: tuple[int, int] | None = None

    @staticmethod
    def whole(shape: torch.Size) -> Part:
        """The part that is all of a parameter."""
        return Part(shape, box=tuple((0, size) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensors that hold this part; a range has one dimension."""
        if self.box is not None:
            return tuple(size for _, size in self.box)
        assert self.span is not None
        return (self.span[1] - self.span[0],)

    def indices(self, device: torch.device) -> torch.Tensor:
        """For each element on this rank, its index in the flattened whole parameter; int64, in the local shape."""
        if self.box is None:
            assert self.span is not None
            return torch.arange(*self.span, device=device)
        indices = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (start, size) in enumerate(self.box):
            stride = math.prod(self.shape[dim + 1 :])
            along = torch.arange(start, start + size, device=device) * stride
            indices = indices.unsqueeze(-1) + along
        return indices


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of one parameter that is on this rank.

    An engine whose final gradients are not in ``parameter.grad`` has a subclass that overrides :meth:`gradient`,
    :meth:`values` and :meth:`optimizer_gradient`.

    Attributes:
        name: the parameter's name in the user's own model, without the parts that wrappers add.
        parameter: the parameter that the optimizer holds.
        is_owner: whether this rank counts its elements in a sum over ranks. Over all ranks, each element has one owner.
        sharding: "whole" if no other rank has any of the parameter, "replica" if every rank has all of it, "sharded"
            if this rank has a part, "unreduced" if every rank has all of it and nothing reduces its gradient.
        part: which elements are here; None if that cannot be told.
        replica_ranks: the global ranks that have the same elements, in order, this one among them.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> shard = Shard("weight", layer.weight, is_owner=True, sharding="whole", part=Part.whole(layer.weight.shape))
    >>> shard.gradient(), shard.values() is layer.weight
    (tensor([[1., 1.]]), True)
    """

    name: str
    parameter: nn.Parameter
    is_owner: bool
    sharding: Sharding
    part: Part | None
    replica_ranks: tuple[int, ...] = (0,)
    _plain: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_plain", not hasattr(self.parameter, "placements"))  # read in every step

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape if self.part is None else self.part.shape

    def as_full_parameter(self) -> nn.Parameter:
        """A parameter with the shape of the whole, for a user's pattern or predicate.

        It is the parameter itself. If this rank has only a part, it is a parameter on the meta device, without values.
        """
        if self.shape == self.parameter.shape:
            return self.parameter
        whole = torch.empty(self.shape, dtype=self.parameter.dtype, device="meta")
        return nn.Parameter(whole, self.parameter.requires_grad)

    def gradient(self) -> torch.Tensor | None:
        """The local part of the final gradient, sharing its memory; None while there is none.

        A DTensor's gradient is first given the placements of its parameter, on every rank of its mesh at once.
        See [Note: placements of a gradient].

        Raises:
            UsageError: when the gradient is sparse, or only one of gradient and parameter is a DTensor.
        """
        grad = self.parameter.grad
        if grad is None or (type(grad) is torch.Tensor and grad.layout is torch.strided and self._plain):
            return grad
        grad = self._as_parameter(grad)
        local = local_part(grad)
        if local.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self.name!r} is {local.layout}: rules and statistics need dense gradients; build "
                "the layer with sparse=False, or give this parameter an optimizer that is not watched"
            )
        return local

    def values(self) -> torch.Tensor:
        """The local part of the parameter, sharing its memory; the elements are those of :meth:`gradient`."""
        return local_part(self.parameter)

    def optimizer_gradient(self) -> torch.Tensor | None:
        """The gradient as the optimizer gets it: the whole tensor, or a DTensor that stands for it."""
        grad = self.parameter.grad
        return grad if grad is None else self._as_parameter(grad)

    def _as_parameter(self, grad: torch.Tensor) -> torch.Tensor:
        """Redistribute ``grad`` to the placements of its parameter and keep the result in ``.grad``."""
        mine, theirs = getattr(grad, "placements", None), getattr(self.parameter, "placements", None)
        if mine is theirs or mine == theirs:
            return grad
        redistribute: Any = getattr(grad, "redistribute", None)
        if redistribute is None or theirs is None or grad.device_mesh != self.parameter.device_mesh:  # type: ignore[attr-defined]
            raise UsageError(
                f"the gradient of {self.name!r} has placements {mine} and the parameter has {theirs}, and no "
                "redistribution leads from one to the other; before optimizer.step(), set p.grad to a tensor of "
                "the kind of its parameter, on the same device mesh"
            )
        with torch.no_grad():
            self.parameter.grad = redistribute(placements=theirs)
        return self.parameter.grad


class Removable(Protocol):
    def remove(self) -> None:
        """Take the hook off."""


class HandleGroup:
    """Several handles as one."""

    def __init__(self, *handles: Removable) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Engine:
    """How a model is trained on its ranks: where gradients live, which part is here, and when they are final.

    The base class is right for a plain module; the module's docstring says what an engine overrides.

    Attributes:
        label: the engine's name in messages.
        model: the user's own model, inside the engine's wrapper if it has one.
        ranks: the global ranks whose gradients belong together, in order.
        position: this rank's index in ``ranks``.
        shards: every parameter of the model, in the same order on every rank.
        trains_alone: whether each process trains a model of its own, as far as the engine knows, though there may be
            several processes.
        may_step_unreduced: whether ranks may step with gradients that nobody reduced, each for itself (local SGD).
        reduces_late: whether a gradient is reduced after the hooks of its parameter have run, so that no optimizer can
            step in such a hook.
        has_other_parts: whether there are other models, or other ranks with models of their own.
        copied: the names of parameters that several ranks have alike, as the user has said.
        has_named_state: whether the optimizer keeps its state by parameter, not by partition.
        first_sum_differs: whether the first step sums the gradients of more than two ranks in another order than later
            ones.
    """

    label: ClassVar[str] = "a plain module"
    trains_alone: ClassVar[bool] = False
    may_step_unreduced: ClassVar[bool] = False
    reduces_late: ClassVar[bool] = False
    first_sum_differs: ClassVar[bool] = False
    has_other_parts: bool = False
    copied: frozenset[str] = frozenset()
    has_named_state: bool = True

    def __init__(self, model: nn.Module, ranks: Sequence[int] = (0,), position: int = 0) -> None:
        self.model, self.ranks, self.position = model, tuple(ranks), position
        self.shards = tuple(self._shards())
        self._registered_parameters = tuple(self._find_parameters())
        self._registered_modules = self._find_modules()

    # -- the model

    @property
    def models(self) -> Sequence[nn.Module]:
        """The user's own models; more than one only if several were joined."""
        return [self.model]

    @property
    def prefixes(self) -> Sequence[str]:
        """For each of :attr:`models` what the names of its parameters and modules begin with."""
        return [""]

    def union(self, names: Sequence[str]) -> list[str]:
        """The names that any rank gives, in the same order on every rank."""
        return list(names)

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """Whether ``model`` is this engine's to handle."""
        return True

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        """The part of a parameter that is on this rank.

        Args:
            index: the parameter's index in ``shards``. Ranks that have the same elements own them in turn, by index,
                so that each of them measures a part of the model.
            name: the parameter's name in the user's model.
            parameter: the parameter that the model has under that name.
        """
        return Shard(name, parameter, True, "whole", Part.whole(parameter.shape), self.ranks)

    def weight_shards(self) -> Sequence[Shard]:
        """The parameters as forward uses them. ``check_replicas`` compares those that several ranks have alike."""
        return self.shards

    def has_own_batch(self) -> bool:
        """Whether each rank computes with its own part of the batch, so that ranks' gradients can be compared."""
        return True

    def is_stable(self, parameter: nn.Parameter) -> bool:
        """Whether the model holds ``parameter`` itself at all times, so that :meth:`check` may look for it."""
        return True

    def check(self) -> None:
        """Check that the model still has the parameters that have the hooks; see [Note: the parameters must stay].

        Raises:
            AttachError: when something replaced one of them.
        """
        if any(parts.get(key) is not module for parts, key, module in self._registered_modules):
            self._refresh()
        for parameters, key, parameter, name in self._registered_parameters:
            # FSDP1 keeps the parameters that it takes and gives them another meaning; torch marks them.
            if parameters.get(key) is not parameter or hasattr(parameter, "_fsdp_flattened"):
                raise AttachError(
                    f"{name!r} is no longer the parameter that was attached to: fully_shard, another engine or "
                    f"to() replaced it, and hooks on the old one never fire ({self.label}); attach after the "
                    "engine has taken the model, and make the optimizer after it too"
                )

    # -- gradients

    def reason_unreduced(self) -> str:
        """Why the gradients in memory are not those that all ranks would step with; empty if they are.

        This is called in every step, and all ranks must return the same: the answer must follow from the program's
        calls and not from which elements a rank has. If one rank alone raises, the others wait for it in the next
        collective.
        """
        return ""

    def gradient_scale(self) -> float | torch.Tensor | None:
        """The factor in the gradients in memory, known without waiting for the device; None if there is none.

        A gradient divided by the factor is the gradient of the user's loss. This holds for local gradients when their
        hooks are called and for final gradients when rules see them. If the factor is a tensor, it has no dimensions
        and is on the device.
        """
        return None

    def keeps_gradients(self) -> str:
        """What keeps gradients of a step, so that those of a skipped one spoil later ones; "" for nothing."""
        return ""

    def is_first_gradient(self, index: int) -> bool:
        """Whether the gradient that a local hook is called with is known to be the first since the last step."""
        return self.shards[index].parameter.grad is None

    def on_local(self, wanted: Sequence[int], hook: LocalHook, must_fire: bool = True) -> list[Removable]:
        """Call ``hook(index, grad)`` with this rank's own gradients, before any reduction.

        The hook is called once in every backward that reaches the parameter; see [Note: hooks on leaves]. A frozen
        parameter gets its hook too, which is called once the parameter needs gradients.
        """
        handles = []
        for i in wanted:
            parameter = self.shards[i].parameter
            with needing_gradients(parameter) as able:
                if able:
                    handles.append(parameter.register_hook(functools.partial(hook, i)))  # type: ignore[no-untyped-call]
        return handles

    # -- a second run of a step (grads/rerun.py)

    def sync_flags(self) -> list[tuple[Any, str]]:
        """The attributes, with their owners, that say whether the next backward reduces the gradients."""
        return []

    def has_other_functions(self, step: Step) -> bool:
        """Whether another attachment has functions for an optimizer of ``step``."""
        return step.has_other_functions

    @torch.no_grad()
    def drop_gradients(self, had: Sequence[bool]) -> None:
        """Make gradients as they were before the first backward of a step: 0 where ``had`` is true, None elsewhere."""
        for shard, was_there in zip(self.shards, had, strict=True):
            if shard.parameter.grad is not None and was_there:
                shard.parameter.grad.zero_()
            else:
                shard.parameter.grad = None

    # -- the optimizer and its step

    def step_of(self, optimizer: Any) -> Step:
        """The step of what the user gave, an optimizer or a list: of the optimizers inside of their wrappers.

        Raises:
            UsageError: when there is none, or none that hooks could be put on.
        """
        if optimizer is None:
            raise UsageError(f"which optimizer? {self.label} needs it: gradients(model, optimizer, ...)")
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        return Step([*map(inner_optimizer, given)])

    def optimizer_parameters(self, optimizer: Any) -> list[nn.Parameter]:
        """The parameters that an optimizer or a step updates, as they are in ``shards``."""
        return parameters_of(optimizer)

    def is_updated(self, index: int) -> bool:
        """Whether a shard may be updated at all; False if the engine's own optimizer was not given its parameter."""
        return True

    def before_step(self, step: Step, functions: StepFunctions, on_repeat: OnRepeat = "refuse") -> Removable:
        """Call ``functions.run(step)`` when gradients are final, just before the update; then ``functions.made()``.

        ``run`` may return a bool tensor without dimensions on the device: if it is true, the optimizer leaves its
        parameters and its state as they are in this step (:mod:`disthooks.engines.skip`).
        """
        return HandleGroup(step.attach(functions, on_repeat), *self.watch_backward(step.see_backward))

    def watch_backward(self, see: Callable[[], None]) -> list[Removable]:
        """Put on the hooks that :meth:`reason_unreduced` needs.

        Call ``see`` in each backward, if it may add to gradients on which no hook of this rank is called; see
        [Note: the gradients that a step was begun with] in new_gradients.py.
        """
        return []

    def begin_step(self, step: Step, scaler: Any = None, chosen: Sequence[Any] | None = None) -> None:
        """Run the functions of :meth:`before_step` now; the step that comes next does not run them again."""
        step.begin_early(scaler, chosen)

    def before_backward(self, see: Callable[[Any], None]) -> list[Removable]:
        """Call ``see(loss)`` when the loop calls a backward of the engine's own, which most engines do not have."""
        return []

    def before_any_step(self, run: Callable[[Any], None]) -> Removable:
        """Call ``run(optimizer)`` before any optimizer steps, and before the functions of :meth:`before_step`.

        If a step calls its closure several times, ``run`` is called after each time.
        """
        return all_optimizers.add(run)

    def after_step(self, step: Step, run: Callable[[], None]) -> Removable:
        """Call ``run()`` after each step's update."""
        return step.attach_after(run)

    # -- where parameters are registered

    def _shards(self) -> list[Shard]:
        named = enumerate(self.model.named_parameters())
        return [self.shard(i, canonical_name(name), parameter) for i, (name, parameter) in named]

    def _find_parameters(self) -> list[tuple[dict[str, Any], str, nn.Parameter, str]]:
        """For each stable parameter: the dict that has it, its key there, the parameter and its name."""
        parameters = []
        for path, module in self.model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and self.is_stable(parameter):
                    parameters.append((module._parameters, key, parameter, canonical_name(f"{path}.{key}".lstrip("."))))
        return parameters

    def _find_modules(self) -> list[tuple[dict[str, Any], str, nn.Module]]:
        pairs = [(m._modules, key, part) for m in self.model.modules() for key, part in m._modules.items()]
        # Compared with None, because an empty container is false.
        return [(of, key, part) for of, key, part in pairs if part is not None]

    def _refresh(self) -> None:
        """Look parameters up anew, because a module was replaced; raise if a parameter is gone with it."""
        now = {id(parameter) for _, _, parameter, _ in self._find_parameters()}
        gone = [name for _, _, parameter, name in self._registered_parameters if id(parameter) not in now]
        if gone:
            raise AttachError(
                f"{gone[0]!r} is no longer in the model: since hooks were attached an engine took it, or the module "
                f"that held it was replaced ({self.label}); attach after the engine has taken the model and after "
                "changing it, and make the optimizer after it too"
            )
        self._registered_parameters, self._registered_modules = tuple(self._find_parameters()), self._find_modules()


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer whose ``step`` makes the update: ``optimizer``, or the one inside wrappers around it.

    Raises:
        AttachError: when there is none that torch's hooks could be put on.
    """
    # accelerate's AcceleratedOptimizer inherits torch's methods but does not call the __init__ that makes the dict of
    # hooks. So this looks for the dict in the object, and not for the method that adds a hook.
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", {}):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise AttachError(
                f"{type(optimizer).__name__} has no register_step_pre_hook and no .optimizer that has one: pass the "
                "torch.optim.Optimizer whose step() makes the update"
            )
        optimizer = inner
    return optimizer


@register("engine")
class Plain(Engine):
    """A module without an engine. If several processes have one each, each process trains its own."""

    trains_alone = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, (global_rank(),))


@register("engine")
class DataParallel(Engine):
    """``nn.DataParallel``: replicas in threads of one process; their gradients are summed into the module inside.

    The backward of the broadcast sums the replicas' gradients before any hook of the module's parameters sees them.
    """

    label = "DataParallel"
    trains_alone = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(unwrap_engine(model), (global_rank(),))

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return is_of_class(model, "DataParallel")
