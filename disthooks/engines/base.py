"""Ways of nesting engines that are not supported: an error that says what works, never hooks that do not fire.

What an engine has to know, and what is the same for all of them.

A module in one process: its gradients are whole and nothing reduces them.

``nn.DataParallel``: replicas in threads of one process, whose gradients are summed into one module.

``DistributedDataParallel``: every rank ends backward with the same whole gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from disthooks._handles import UncopiedHook
from disthooks._match import canonical_name, is_of_class, unwrap_engine
from disthooks._ranks import global_rank, has_several_ranks
from disthooks._registry import register
from disthooks._torch import ddp_under_way
from disthooks.engines.optimizer_step import BeforeStep, OnRepeat, StepCallback, StepHooks, before_any_step
from disthooks.engines.shard import Part, Shard
from disthooks.errors import AttachError, UsageError


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
        if name and is_of_class(module, "DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
            raise AttachError(
                f"{name!r} is wrapped in {type(module).__name__} and the rest of the model is not: attach to "
                f"that module with an optimizer of its own, or wrap the whole model"
            )


def refuse_mixed(engine: Engine) -> None:
    """Raise AttachError when a part of the model is FSDP1's, and another engine has the whole, or another part."""
    kinds = {"FSDP1": "FullyShardedDataParallel", "FSDP2": "FSDPModule"}
    for name, module in engine.model.named_modules():
        for label, kind in kinds.items():
            if is_of_class(module, kind) and label != engine.label:
                raise AttachError(
                    f"{name or 'the model'!r} is {label}'s and the model is {engine.label}'s: what becomes of a "
                    "gradient there cannot be told; use one of them for the whole model"
                )


def refuse_replicate(engine: Engine) -> None:
    """Raise AttachError when torch's old ``replicate`` reduces gradients of a module that looks like a plain one."""
    if not engine.trains_alone or not has_several_ranks():
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


LocalHook = Callable[[int, torch.Tensor], torch.Tensor | None]


class Removable(Protocol):
    """A handle of a torch hook."""

    def remove(self) -> None:
        """Take the hook off."""


class HandleGroup:
    """Several handles as one."""

    def __init__(self, *handles: Removable) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take all of them off."""
        for handle in self._handles:
            handle.remove()


class Engine:
    """A plain module in one process; the engines for several ranks override what is different there.

    Attributes:
        model: the user's own model, inside the engine's wrapper if it has one.
        ranks: the global ranks whose gradients belong together, in order.
        position: this rank's place among them.
        shards: every parameter of the model, in the same order on every rank.
        has_named_state: whether the optimizer's state is kept by parameter, not by partition.
        may_step_unreduced: whether ranks may step with gradients that nobody reduced, each for itself (local SGD).
        can_exclude_parameters: whether single parameters can be left out of a step (``skip.exclude_from_step``).
    """

    label: ClassVar[str] = "a plain module"
    can_exclude_parameters: bool = True
    may_step_unreduced: ClassVar[bool] = False
    has_named_state: bool = True

    #: Whether each process trains a model of its own, as far as the engine knows, though there may be several.
    trains_alone: ClassVar[bool] = False

    def __init__(self, model: nn.Module, ranks: Sequence[int] = (0,), position: int = 0) -> None:
        self.model, self.ranks, self.position = model, tuple(ranks), position
        self.shards = tuple(self._shards())
        self._places = tuple(self._registered())
        self._parts = self._modules()

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """Whether ``model`` is this engine's to handle."""
        return True

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        """What this rank has of a parameter."""
        return Shard(name, parameter, True, "whole", Part.whole(parameter.shape), self.ranks)

    def check(self) -> None:
        """Compare identities: the model must still have the parameters that were attached to.

        Raises:
            AttachError: when something replaced them since.
        """
        if any(parts.get(key) is not module for parts, key, module in self._parts):
            self._refresh()
        for parameters, key, parameter, name in self._places:
            # FSDP1 keeps the parameters that it takes and puts another meaning into them; torch marks them.
            if parameters.get(key) is not parameter or hasattr(parameter, "_fsdp_flattened"):
                raise AttachError(
                    f"{name!r} is no longer the parameter that was attached to: fully_shard, another engine or "
                    f"to() replaced it, and hooks on the old one never fire ({self.label}); attach after the "
                    "engine has taken the model, and make the optimizer after it too"
                )

    def reason_unreduced(self) -> str:
        """Why the gradients in memory are not what all ranks would step with; empty when they are.

        Asked at every step and answered alike on all ranks, from what the program did and not from which elements a
        rank has: a rank that raises alone leaves the others waiting.
        """
        return ""

    def inner_optimizer(self, optimizer: Any) -> Any:
        """The optimizer whose ``step`` makes the update.

        Raises:
            UsageError: when there is none, or none that hooks could be put on.
        """
        if optimizer is None:
            raise UsageError(f"which optimizer? {self.label} needs it: gradients(model, optimizer, ...)")
        return inner_optimizer(optimizer)

    def gradient_scale(self) -> float | torch.Tensor | None:
        """What gradients in memory are multiplied by, known without waiting; None for 1, unless the engine scales.

        Divided by it they are those of the user's loss: local ones when their hooks are called, final ones when
        rules see them. A tensor has no dimensions and is on the device.
        """
        return None

    def weight_shards(self) -> Sequence[Shard]:
        """The parameters as the model has them in memory, which several ranks may have alike."""
        return self.shards

    def has_own_batch(self) -> bool:
        """Whether each rank has a share of the batch of its own, so that ranks' own gradients can be compared."""
        return True

    def optimizer_parameters(self, optimizer: Any) -> list[nn.Parameter]:
        """The parameters that ``optimizer`` updates, as they are in ``shards``."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def is_updated(self, index: int) -> bool:
        """Whether a shard may be updated at all; False where the engine's own optimizer was not given it."""
        return True

    def before_step(self, optimizer: Any, run: BeforeStep, on_repeat: OnRepeat = "refuse") -> Removable:
        """Have ``run(optimizer, args, kwargs)`` called when gradients are final, just before the update.

        It may return a bool tensor without dimensions on the device: where that is true, the optimizer does not
        move in this step (see :mod:`disthooks.engines.skip`).

        Args:
            optimizer: the one that steps.
            run: in a step with a closure it is called when the closure is done.
            again: what is done when the closure is called again in the same step.
        """
        hooks = StepHooks.of(inner_optimizer(optimizer))
        return hooks.add(hooks.before, StepCallback(run, on_repeat))

    def begin_step(self, optimizer: Any, scaler: Any = None) -> None:
        """Run what :meth:`before_step` was given now; the step that comes next does not run it again."""
        StepHooks.of(inner_optimizer(optimizer)).now(scaler)

    def before_any_step(self, run: BeforeStep) -> Removable:
        """Have ``run`` called before any optimizer steps, and before what :meth:`before_step` runs.

        Where a closure is called several times in a step, ``run`` is called after each time.
        """
        return before_any_step(run)

    def after_step(self, optimizer: Any, run: Callable[[], None]) -> Removable:
        """Have ``run()`` called when the update has been made, once a step."""
        hooks = StepHooks.of(inner_optimizer(optimizer))
        return hooks.add(hooks.after, run)

    def on_local(self, wanted: Sequence[int], hook: LocalHook, must_fire: bool = True) -> list[Removable]:
        """Have ``hook(index, grad)`` called on this rank's own gradients before any reduction.

        It is called once in every backward that reaches the parameter; what it returns, unless None, takes the
        gradient's place. ``wanted`` are indices into ``shards``. A frozen parameter gets its hook too, which is called
        once it needs gradients. A gradient that passes unseen is an error from backward, or with ``must=False`` is not.
        """
        handles = []
        for i in wanted:
            parameter = self.shards[i].parameter
            with needing_gradients(parameter) as able:
                if able:
                    handles.append(parameter.register_hook(functools.partial(hook, i)))  # type: ignore[no-untyped-call]
        return handles

    def is_first_gradient(self, index: int) -> bool:
        """Whether the gradient that a local hook is called with is known to be the first since the last step."""
        return self.shards[index].parameter.grad is None

    def is_stable(self, parameter: nn.Parameter) -> bool:
        """Whether the model holds ``parameter`` itself at all times, so that :meth:`check` may look for it."""
        return True

    def _shards(self) -> list[Shard]:
        named = enumerate(self.model.named_parameters())
        return [self.shard(i, canonical_name(name), parameter) for i, (name, parameter) in named]

    def _modules(self) -> list[tuple[dict[str, Any], str, nn.Module]]:
        pairs = [(m._modules, key, part) for m in self.model.modules() for key, part in m._modules.items()]
        return [(of, key, part) for of, key, part in pairs if part is not None]  # some have no truth value

    def _refresh(self) -> None:
        """A module was replaced: by a wrapper around the same parameters, which is fine, or by another one."""
        now = {id(parameter) for _, _, parameter, _ in self._registered()}
        gone = [name for _, _, parameter, name in self._places if id(parameter) not in now]
        if gone:
            raise AttachError(
                f"{gone[0]!r} is no longer in the model: since hooks were attached an engine took it, or the module "
                f"that held it was replaced ({self.label}); attach after the engine has taken the model and after "
                "changing it, and make the optimizer after it too"
            )
        self._places, self._parts = tuple(self._registered()), self._modules()

    def _registered(self) -> list[tuple[dict[str, Any], str, nn.Parameter, str]]:
        places = []
        for path, module in self.model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and self.is_stable(parameter):
                    places.append((module._parameters, key, parameter, canonical_name(f"{path}.{key}".lstrip("."))))
        return places


@contextlib.contextmanager
def needing_gradients(parameter: torch.Tensor) -> Iterator[bool]:
    """Have ``parameter`` need gradients inside, since torch takes no hook for one that does not; whether it can.

    A hook stays where it is when the parameter is frozen again, and it is called when a gradient comes.

    >>> weight = nn.Parameter(torch.ones(1), requires_grad=False)
    >>> with needing_gradients(weight) as able:
    ...     handle = weight.register_hook(lambda grad: 2 * grad)
    >>> weight.requires_grad, able
    (False, True)
    >>> weight.requires_grad_(True).sum().backward()
    >>> weight.grad
    tensor([2.])
    """
    able = parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())
    if parameter.requires_grad or not able or parameter.is_inference():
        yield parameter.requires_grad
        return
    parameter.requires_grad_(True)
    try:
        yield True
    finally:
        parameter.requires_grad_(False)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer whose ``step`` makes the update: ``optimizer``, or the one inside a wrapper around it.

    Raises:
        AttachError: when there is none that torch's hooks could be put on.
    """
    # accelerate's AcceleratedOptimizer inherits the method, and not what it needs: that is made in __init__.
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
    """A module that no engine has taken; among several processes each has one that it trains by itself."""

    trains_alone = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, (global_rank(),))


@register("engine")
class DataParallel(Engine):
    """The module inside: backward of the broadcast sums the replicas' gradients before any hook sees them."""

    label = "DataParallel"
    trains_alone = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(unwrap_engine(model), (global_rank(),))

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """An ``nn.DataParallel``."""
        return is_of_class(model, "DataParallel")


@register("engine")
class Ddp(Engine):
    """The ranks take turns at owning parameters, so each measures its part and none measures all."""

    label = "DDP"
    may_step_unreduced = True

    def __init__(self, model: nn.Module) -> None:
        wrapper: Any = model
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        self._ignored = frozenset(map(canonical_name, wrapper.parameters_to_ignore))
        self._wrapper = wrapper
        # How many parameters DDP found in need of gradients when it was made: it reduces those, and no others later.
        self._reduced: int = wrapper._get_ddp_logging_data().get("num_parameter_tensors", 0)
        self._prepares = True  # the last forward, for a backward that reduces
        self._reduces = True  # the last backward
        super().__init__(unwrap_engine(model), ranks, dist.get_rank(wrapper.process_group))
        self._frozen = [shard for shard in self.shards if not shard.parameter.requires_grad]
        self._must_be_reduced()

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """A ``DistributedDataParallel``."""
        return is_of_class(model, "DistributedDataParallel")

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        """Whole on every rank; the ranks own them in turn."""
        if name in self._ignored:
            raise AttachError(
                f"DDP was told to ignore {name!r}: its gradients stay different on every rank, so there is no final "
                "one to measure; let DDP have it"
            )
        if hasattr(parameter, "device_mesh"):
            raise AttachError(
                f"{name!r} is a DTensor inside DDP, and how often each of its elements is there cannot be told; use "
                "fully_shard with a two-dimensional mesh in place of DDP"
            )
        mine = index % len(self.ranks) == self.position
        return Shard(name, parameter, mine, "replica", Part.whole(parameter.shape), self.ranks)

    def before_step(self, optimizer: Any, run: BeforeStep, on_repeat: OnRepeat = "refuse") -> Removable:
        """Also notice which backward DDP reduces."""
        begins = self._wrapper.register_forward_pre_hook(UncopiedHook(self._begin_forward))
        ends = self._wrapper.register_forward_hook(UncopiedHook(self._end_forward))
        return HandleGroup(super().before_step(optimizer, run, on_repeat), HandleGroup(begins, ends))

    def reason_unreduced(self) -> str:
        """After a forward and backward inside ``no_sync()``, as local SGD steps: each rank has its own gradients."""
        if self._reduces:
            return ""
        return (
            f"the last backward was of a forward inside DDP's no_sync(), so each of the ranks {list(self.ranks)} has "
            "gradients of its own, which nobody reduced, and there is none that rules could act on alike. Run the last "
            "micro-batch of a step outside of no_sync(); for local SGD, where ranks step by themselves, give no rules, "
            "or remove() the attachment"
        )

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        # DDP asks the same in its forward, and prepares its reducer or does not.
        self._prepares = bool(self._wrapper.require_backward_grad_sync)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        # The backward counts, not the forward: a rank may compute a metric inside no_sync(), without a backward.
        if not torch.is_grad_enabled():
            return
        found = [tensor for tensor in _find_tensors(output) if tensor.requires_grad]  # type: ignore[no-untyped-call]
        if not found:  # in an object that DDP does not look into either
            self._reduces = self._prepares
        for tensor in found:
            tensor.register_hook(functools.partial(self._begin_backward, self._prepares))

    def _begin_backward(self, reduces: bool, grad: torch.Tensor) -> None:
        self._reduces = reduces

    def check(self) -> None:
        """Also raise AttachError where DDP does not reduce a gradient, and under ``join()``.

        Under ``join()`` a rank that has no inputs left takes no step, and is waited for.
        """
        if self._wrapper._join_config.enable:
            raise AttachError(
                "DDP's join() lets a rank stop early, and the others would wait for its part of the gradients' "
                "statistics: give every rank the same number of steps, or remove() the attachment before join()"
            )
        super().check()
        if any(shard.parameter.requires_grad for shard in self._frozen):
            self._must_be_reduced()

    def _must_be_reduced(self) -> None:
        """Raise where more parameters need gradients than did when DDP took the model."""
        needing = sum(shard.parameter.requires_grad for shard in self.shards)
        if not 0 < self._reduced < needing:
            return
        thawed = [shard.name for shard in self._frozen if shard.parameter.requires_grad]
        which = f"{thawed[0]!r} was" if thawed else f"{needing - self._reduced} of the parameters were"
        raise AttachError(
            f"{which} frozen when DDP took the model, and DDP never reduces a gradient that comes later: every rank "
            "would train another model. Unfreeze before DDP takes the model (and freeze after it what is to rest), or "
            "make DDP anew and attach to that"
        )
