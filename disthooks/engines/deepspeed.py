"""DeepSpeed's ZeRO: the engine steps by itself, on partitions of flat groups that have no names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from disthooks._match import inside
from disthooks.engines.base import Engine, Removable, is_a
from disthooks.engines.partitions import Bf16, Masters, Partitions, Piece, Zero3, Zero12, shape_of
from disthooks.engines.shard import Part, Shard
from disthooks.engines.steps import Again, BeforeStep
from disthooks.engines.updates import Update, scaler_of
from disthooks.errors import AttachError

_KINDS: dict[str, type[Partitions]] = {
    "DeepSpeedZeroOptimizer": Zero12,
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
    "BF16_Optimizer": Bf16,
    "FP16_UnfusedOptimizer": Masters,
    "FP16_Optimizer": Masters,
}


class DeepSpeed(Engine):
    """Final gradients are at ``engine.step()``; this rank's part of each parameter is a range of it, or all of it."""

    label = "DeepSpeed"

    def __init__(self, model: nn.Module) -> None:
        engine: Any = model
        _check_supported(engine)
        self._engine, self._kept, self._group = engine, _partitions(engine), engine.seq_data_parallel_group
        self.can_withhold = self.keeps_named_state = type(self._kept) is Partitions
        ranks = dist.get_process_group_ranks(engine.seq_data_parallel_group)
        super().__init__(inside(model), ranks, dist.get_rank(engine.seq_data_parallel_group))

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """What ``deepspeed.initialize`` returned first."""
        return is_a(model, "DeepSpeedEngine")

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        """A range of it; all of it where the stage leaves gradients whole, and then the ranks own them in turn."""
        place = self._kept.places.get(id(parameter))
        mine = index % len(self.ranks) == self.position
        if place is None:  # frozen, or held by torch's own optimizer
            part = Part.whole(shape_of(parameter)) if shape_of(parameter) == parameter.shape else None
            return Shard(name, parameter, mine, self._layout("replica"), part, self.ranks)
        if self._kept.whole:
            return Piece(name, parameter, mine, self._layout("replica"), place.part, self.ranks, self._kept, place)
        me = (self.ranks[self.position],)
        return Piece(name, parameter, True, self._layout("sharded"), place.part, me, self._kept, place)

    def check(self) -> None:
        """Also raise AttachError when the engine's optimizer was replaced, or DeepCompile took over."""
        if self._engine.optimizer is not self._kept.optimizer:
            raise AttachError("the DeepSpeed engine has another optimizer than when hooks were attached: attach again")
        _check_compiled(self._engine)
        super().check()

    def copies(self) -> list[Shard]:
        """The weights that forward uses, whole on every rank up to ZeRO 2; of ZeRO 3's none has a copy."""
        found = []
        for shard in self.shards:
            whole = shape_of(shard.parameter) == shard.parameter.shape
            part = Part.whole(shard.parameter.shape) if whole else None
            twins = self.ranks if whole else shard.twins
            found.append(Shard(shard.name, shard.parameter, shard.owned, shard.layout, part, twins))
        return found

    def held(self, optimizer: Any) -> list[nn.Parameter]:
        """The parameters of the model that the engine updates; the optimizer itself holds flat partitions."""
        return self._kept.held()

    def stepping(self, optimizer: Any) -> Any:
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

    def updates(self, index: int) -> bool:
        """Whether DeepSpeed's optimizer holds it."""
        return any(self.shards[index].parameter is parameter for parameter in self._kept.held())

    def scale(self) -> float | torch.Tensor | None:
        """The loss scale of DeepSpeed (a number on the host), or of its ``GradScaler`` (on the device)."""
        scaler = scaler_of(self._engine)
        if scaler is not None and scaler.is_enabled():
            return float(scaler._init_scale) if scaler._scale is None else scaler._scale
        found = float(getattr(self._engine.optimizer, "loss_scale", None) or 1.0)
        return None if found == 1.0 else found

    def begin_step(self, optimizer: Any, scaler: Any = None) -> None:
        """Nothing: the engine's own step begins with it, before it clips."""

    def before_step(self, optimizer: Any, run: BeforeStep, again: Again = "refuse") -> Removable:
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

    def begins(self, index: int) -> bool:
        """Never known: gradients are accumulated out of sight."""
        return False

    def _update(self) -> Update:
        shards = [shard for shard in self.shards if shard.parameter.requires_grad]
        return Update.of(self._engine, self._kept, shards, self._group)

    def _layout(self, among_several: Any) -> Any:
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
    "pipeline stages (whose gradients are reduced and used inside train_batch())": lambda e: is_a(e, "PipelineEngine"),
    "no optimizer": lambda e: e.optimizer is None or is_a(e.optimizer, "DummyOptim", "DeepSpeedZeRoOffload"),
    "MiCS (which partitions over a part of the ranks)": lambda e: is_a(e.optimizer, "MiCS_Optimizer"),
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
