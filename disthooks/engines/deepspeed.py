"""The step of a DeepSpeed engine, with functions run before and after it.

DeepSpeed's ZeRO: the engine steps by itself, on partitions of flat groups that have no names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from disthooks._match import is_of_class, unwrap_engine
from disthooks._registry import register
from disthooks.engines.base import Engine, Part, Removable, Shard
from disthooks.engines.optimizer_step import BeforeStep, CallbackHandle, OnRepeat
from disthooks.engines.skip import end_step, remove_excluded
from disthooks.engines.zero_shards import Bf16, Masters, Partitions, Zero3, Zero12, ZeroShard, shape_of
from disthooks.errors import AttachError

_NAME = "_take_model_step"


class DeepSpeedStep:
    """Stands in for ``engine._take_model_step``, which ``engine.step()`` calls once for each step of the optimizer.

    All gradients are reduced by then, and DeepSpeed has not measured, clipped or unscaled any of them.

    Attributes:
        early, late: what is to run before the update, in this order.
        after: what is to run after it.
    """

    def __init__(self, engine: Any, kept: Partitions, shards: Sequence[Shard], group: Any) -> None:
        self.early: list[BeforeStep] = []
        self.late: list[BeforeStep] = []
        self.after: list[Callable[[], None]] = []
        self._engine, self._kept, self._group = engine, kept, group
        self._shards = shards
        self._own = engine.__dict__.get(_NAME)
        self._true = getattr(engine, _NAME)
        engine.__dict__[_NAME] = self

    @classmethod
    def of(cls, engine: Any, kept: Partitions, shards: Sequence[Shard], group: Any) -> DeepSpeedStep:
        """The one that is in place on ``engine``, or a new one."""
        found = engine.__dict__.get(_NAME)
        return found if isinstance(found, cls) else cls(engine, kept, shards, group)

    def add(self, to: list[Any], run: Any) -> CallbackHandle:
        """Put ``run`` at the end of one of the lists; gives what takes it off."""
        to.append(run)
        return CallbackHandle(self, to, run)

    def leave(self) -> None:
        """Put back what was there, unless something is still to run, or somebody else has wrapped this."""
        if not (self.early or self.late or self.after) and self._engine.__dict__.get(_NAME) is self:
            if self._own is None:
                del self._engine.__dict__[_NAME]
            else:
                self._engine.__dict__[_NAME] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Everything before, the step, everything after."""
        if not (self.early or self.late or self.after):
            return self._true(*args, **kwargs)
        with self._still() if self._before() else self._resting():
            result = self._true(*args, **kwargs)
        for run in list(self.after):
            run()
        return result

    def _before(self) -> bool:
        """Whether the step is to be skipped, and not by DeepSpeed itself."""
        overflow = self._overflow()
        decisions = [run(self._engine.basic_optimizer, (), {}) for run in [*self.early, *self.late]]
        self._keep(overflow)
        skip = any(bool(decision) for decision in decisions if decision is not None)
        return skip and not self._anywhere(overflow)

    @torch.no_grad()
    def _overflow(self) -> torch.Tensor | None:
        """With a loss scale: whether any of this rank's gradients overflowed, before a rule could hide it."""
        if scaler_of(self._engine) is None and not self._engine.fp16_enabled():
            return None
        found = [~torch.isfinite(grad).all() for grad in self._grads()]
        return torch.stack(found).any() if found else None

    @torch.no_grad()
    def _keep(self, overflow: torch.Tensor | None) -> None:
        """An overflow stays one, so that DeepSpeed skips the step and lowers its loss scale; nothing is waited for."""
        first = next(self._grads(), None)
        if overflow is not None and first is not None:
            first.view(-1)[:1].masked_fill_(overflow, torch.nan)

    def _anywhere(self, overflow: torch.Tensor | None) -> bool:
        """Whether any rank has had an overflow; asked only where every rank decided to skip."""
        if scaler_of(self._engine) is None and not self._engine.fp16_enabled():
            return False
        device = self._shards[0].parameter.device
        found = torch.zeros((), device=device) if overflow is None else overflow.to(torch.float32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def _grads(self) -> Iterator[torch.Tensor]:
        for shard in self._shards:
            grad = shard.gradient()
            if grad is not None and grad.numel():
                yield grad

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """The optimizer's step does nothing but forget gradients; the engine takes it for one that overflowed."""
        optimizer = self._engine.optimizer
        knows = hasattr(optimizer, "overflow")
        before = optimizer.__dict__.get("step")

        def step(closure: Any = None) -> None:
            self._kept.drop()
            optimizer.overflow = True

        optimizer.__dict__["step"] = step
        try:
            yield
        finally:
            _restore(optimizer, "step", before)
            if not knows:
                optimizer.__dict__.pop("overflow", None)

    @contextlib.contextmanager
    def _resting(self) -> Iterator[None]:
        """Torch's own optimizer does not see what is withheld; when that is back, the engine zeroes its gradients."""
        if type(self._kept) is not Partitions:
            yield
            return
        optimizer = self._engine.basic_optimizer
        remove_excluded(optimizer)
        try:
            yield
        finally:
            end_step(optimizer)
            self._engine.zero_grad()


def scaler_of(engine: Any) -> Any:
    """The ``GradScaler`` that an engine under DeepSpeed's ``torch_autocast`` has, or None."""
    own = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return own if own is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def _restore(optimizer: Any, name: str, before: Any) -> None:
    if before is None:
        optimizer.__dict__.pop(name, None)
    else:
        optimizer.__dict__[name] = before


_KINDS: dict[str, type[Partitions]] = {
    "DeepSpeedZeroOptimizer": Zero12,
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
    "BF16_Optimizer": Bf16,
    "FP16_UnfusedOptimizer": Masters,
    "FP16_Optimizer": Masters,
}


@register("engine")
class DeepSpeed(Engine):
    """Final gradients are at ``engine.step()``; this rank's part of each parameter is a range of it, or all of it."""

    label = "DeepSpeed"

    def __init__(self, model: nn.Module) -> None:
        engine: Any = model
        _check_supported(engine)
        self._engine, self._kept, self._group = engine, _partitions(engine), engine.seq_data_parallel_group
        self.can_exclude_parameters = self.has_named_state = type(self._kept) is Partitions
        ranks = dist.get_process_group_ranks(engine.seq_data_parallel_group)
        super().__init__(unwrap_engine(model), ranks, dist.get_rank(engine.seq_data_parallel_group))

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """What ``deepspeed.initialize`` returned first."""
        return is_of_class(model, "DeepSpeedEngine")

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        """A range of it; all of it where the stage leaves gradients whole, and then the ranks own them in turn."""
        place = self._kept.places.get(id(parameter))
        mine = index % len(self.ranks) == self.position
        if place is None:  # frozen, or held by torch's own optimizer
            part = Part.whole(shape_of(parameter)) if shape_of(parameter) == parameter.shape else None
            return Shard(name, parameter, mine, self._sharding("replica"), part, self.ranks)
        if self._kept.whole:
            return ZeroShard(
                name, parameter, mine, self._sharding("replica"), place.part, self.ranks, self._kept, place
            )
        me = (self.ranks[self.position],)
        return ZeroShard(name, parameter, True, self._sharding("sharded"), place.part, me, self._kept, place)

    def check(self) -> None:
        """Also raise AttachError when the engine's optimizer was replaced, or DeepCompile took over."""
        if self._engine.optimizer is not self._kept.optimizer:
            raise AttachError("the DeepSpeed engine has another optimizer than when hooks were attached: attach again")
        _check_compiled(self._engine)
        super().check()

    def weight_shards(self) -> list[Shard]:
        """The weights that forward uses, whole on every rank up to ZeRO 2; of ZeRO 3's none has a copy."""
        found = []
        for shard in self.shards:
            whole = shape_of(shard.parameter) == shard.parameter.shape
            part = Part.whole(shard.parameter.shape) if whole else None
            replica_ranks = self.ranks if whole else shard.replica_ranks
            found.append(Shard(shard.name, shard.parameter, shard.is_owner, shard.sharding, part, replica_ranks))
        return found

    def optimizer_parameters(self, optimizer: Any) -> list[nn.Parameter]:
        """The parameters of the model that the engine updates; the optimizer itself holds flat partitions."""
        return self._kept.optimizer_parameters()

    def inner_optimizer(self, optimizer: Any) -> Any:
        """The torch optimizer inside the engine's; none need be given."""
        own = (self._engine.optimizer, self._engine.basic_optimizer)
        given = optimizer
        while optimizer is not None and not any(optimizer is one for one in own):
            optimizer = getattr(optimizer, "optimizer", None)  # accelerate's wrapper
        if given is not None and optimizer is None:
            raise AttachError(
                f"the {type(given).__name__} is not what this engine steps ({self.label}): leave the optimizer out, or "
                "give engine.optimizer"
            )
        return own[1]

    def is_updated(self, index: int) -> bool:
        """Whether DeepSpeed's optimizer holds it."""
        return any(self.shards[index].parameter is parameter for parameter in self._kept.optimizer_parameters())

    def gradient_scale(self) -> float | torch.Tensor | None:
        """The loss scale of DeepSpeed (a number on the host), or of its ``GradScaler`` (on the device)."""
        scaler = scaler_of(self._engine)
        if scaler is not None and scaler.is_enabled():
            return float(scaler._init_scale) if scaler._scale is None else scaler._scale
        found = float(getattr(self._engine.optimizer, "loss_scale", None) or 1.0)
        return None if found == 1.0 else found

    def begin_step(self, optimizer: Any, scaler: Any = None) -> None:
        """Nothing: the engine's own step begins with it, before it clips."""

    def before_step(self, optimizer: Any, run: BeforeStep, on_repeat: OnRepeat = "refuse") -> Removable:
        """At the engine's step, not at micro-steps. Where ``run`` decides so, DeepSpeed's optimizer makes no step.

        The engine then does what it does for a step that overflowed (gradients are dropped, the learning rate's
        schedule waits, ``was_step_applied()`` is False), but for the loss scale, which stays.
        """
        update = self._update()
        return update.add(update.late, run)

    def before_any_step(self, run: BeforeStep) -> Removable:
        """At the engine's step, before what :meth:`before_step` runs."""
        update = self._update()
        return update.add(update.early, run)

    def after_step(self, optimizer: Any, run: Callable[[], None]) -> Removable:
        """At the end of the engine's step; final gradients are gone by then."""
        update = self._update()
        return update.add(update.after, run)

    def is_first_gradient(self, index: int) -> bool:
        """Never known: gradients are accumulated out of sight."""
        return False

    def _update(self) -> DeepSpeedStep:
        shards = [shard for shard in self.shards if shard.parameter.requires_grad]
        return DeepSpeedStep.of(self._engine, self._kept, shards, self._group)

    def _sharding(self, among_several: Any) -> Any:
        return among_several if len(self.ranks) > 1 else "whole"


def _partitions(engine: Any) -> Partitions:
    kind = type(engine.optimizer).__name__
    if engine.optimizer is engine.basic_optimizer:
        return Partitions(engine.optimizer)
    if kind not in _KINDS:
        raise AttachError(f"DeepSpeed's {kind} is not supported: {_WORKS}")
    try:
        return _KINDS[kind](engine.optimizer)
    except AttributeError as error:
        raise AttachError(
            f"this version of DeepSpeed keeps its partitions otherwise ({error}): deepspeed 0.19.8 is known to work"
        ) from error


_WORKS = "ZeRO 0 to 3 with DeepSpeedEngine and an optimizer on the device is"


def _check_supported(engine: Any) -> None:
    for reason, is_so in _REFUSED.items():
        if is_so(engine):
            raise AttachError(f"DeepSpeed with {reason} is not supported: {_WORKS}")
    _check_compiled(engine)


def _check_compiled(engine: Any) -> None:
    if getattr(engine, "is_deepcompile_active", lambda: False)():
        raise AttachError("DeepCompile reduces gradients inside the compiled graph, where hooks see none: turn it off")


def _offloads(engine: Any) -> bool:
    return any(getattr(engine.optimizer, name, False) for name in ("cpu_offload", "offload_optimizer", "zenflow"))


_REFUSED: dict[str, Callable[[Any], bool]] = {
    "pipeline stages (whose gradients are reduced and used inside train_batch())": lambda e: is_of_class(
        e, "PipelineEngine"
    ),
    "no optimizer": lambda e: e.optimizer is None or is_of_class(e.optimizer, "DummyOptim", "DeepSpeedZeRoOffload"),
    "MiCS (which partitions over a part of the ranks)": lambda e: is_of_class(e.optimizer, "MiCS_Optimizer"),
    "zero_hpz_partition_size above 1 (secondary partitions)": lambda e: (
        getattr(e.optimizer, "zero_hpz_partition_size", 1) > 1
    ),
    "an optimizer offloaded to CPU or NVMe (it measures gradients while they are copied, before any rule)": _offloads,
    "experts in parallel (MoE)": lambda e: bool(e.has_moe_layers),
    "model parallelism (mpu, AutoTP)": lambda e: e.mpu is not None or getattr(e, "autotp_size", lambda: 0)() > 1,
    "Muon (which makes its update while gradients are reduced)": lambda e: "Muon" in type(e.basic_optimizer).__name__,
    "an optimizer that reduces gradients itself (1-bit Adam and its like)": lambda e: not e.enable_backward_allreduce,
    # deepspeed 0.19.8 divides by the loss scale here and never multiplied by it; earlier ones did
    "fp16 at stage 0 (whose gradients are not of the loss scale that it divides them by)": lambda e: (
        e.fp16_enabled() and e.zero_optimization_stage() == 0
    ),
}
