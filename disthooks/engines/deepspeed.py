"""DeepSpeed's ZeRO: the engine steps by itself, on partitions of flat groups that have no names.

:class:`DeepSpeed` is the engine, :class:`DeepSpeedStep` what runs before and after its step, and the subclasses of
:class:`Partitions` say where each stage keeps final gradients and the weights that it updates.
"""

# [Note: what is private of DeepSpeed]
# DeepSpeed has no public way to ask where a final gradient lies. `safe_get_full_grad` gathers one parameter at a time,
# with a collective each, and raises on one rank while the others wait under ZeRO 2 in mid accumulation. So the lists
# that its optimizers keep are read: their names are private, measured with deepspeed 0.19.8, and
# tests/engines/test_gradients_deepspeed.py goes over every stage. An attribute that is missing is an AttachError that
# names the version. Its optimizers are known by the names of their classes, so that DeepSpeed need not be imported.
#
# [Note: DeepSpeed's own step]
# Hooks on the optimizer are of no use here: torch's optimizer inside steps flat partitions without names, once for each
# group, after DeepSpeed has clipped them. `engine._take_model_step` is called once for each step, when all gradients
# are reduced and DeepSpeed has not yet measured, clipped or unscaled any of them. So it is replaced in the engine's
# `__dict__`, where a wrapper that somebody else put there before is called as well.
#
# [Note: an overflow stays one]
# With a loss scale DeepSpeed skips a step whose gradients are not finite, and lowers the scale. A rule that replaces
# such a gradient before (Sanitize, ClipValue) would hide it: the step would be made with wrong values, and the scale
# would never get lower. So whether this rank's gradients overflowed is found before the rules run, and one NaN is
# written back afterwards. If the rules decided to skip, DeepSpeed must skip itself on all ranks or on none.

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from disthooks._match import is_of_class, unwrap_engine
from disthooks._registry import register
from disthooks.engines.base import Engine, Part, Removable, Shard, Sharding
from disthooks.engines.optimizer_step import BeforeStep, CallbackHandle, OnRepeat
from disthooks.engines.skip import end_step, remove_excluded
from disthooks.errors import AttachError

_STEP = "_take_model_step"
_WORKS = "ZeRO 0 to 3 with DeepSpeedEngine and an optimizer on the device is"


@register("engine")
class DeepSpeed(Engine):
    """What ``deepspeed.initialize`` returned: final gradients are there when ``engine.step()`` begins.

    This rank's part of each parameter is a range of its elements, or all of them if the stage leaves gradients whole.
    """

    label = "DeepSpeed"

    def __init__(self, model: nn.Module) -> None:
        engine: Any = model
        _check_supported(engine)
        self._engine, self._partitions, self._group = engine, _partitions_of(engine), engine.seq_data_parallel_group
        # Torch's own optimizer holds the parameters of the model; every other one holds partitions without names.
        self.can_exclude_parameters = self.has_named_state = type(self._partitions) is Partitions
        ranks = dist.get_process_group_ranks(self._group)
        super().__init__(unwrap_engine(model), ranks, dist.get_rank(self._group))

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return is_of_class(model, "DeepSpeedEngine")

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        kept, mine = self._partitions, index % len(self.ranks) == self.position
        replica: Sharding = "replica" if len(self.ranks) > 1 else "whole"
        place = kept.ranges.get(id(parameter))
        if place is None:  # the parameter is frozen, or torch's own optimizer holds it
            whole = full_shape(parameter)
            part = Part.whole(whole) if whole == parameter.shape else None
            return Shard(name, parameter, mine, replica, part, self.ranks)
        if kept.has_whole_gradients:
            return ZeroShard(name, parameter, mine, replica, place.part, self.ranks, kept, place)
        sharded: Sharding = "sharded" if len(self.ranks) > 1 else "whole"
        me = (self.ranks[self.position],)
        return ZeroShard(name, parameter, True, sharded, place.part, me, kept, place)

    def weight_shards(self) -> list[Shard]:
        found = []
        for shard in self.shards:
            # The weights that forward uses are whole on every rank up to ZeRO 2; of ZeRO 3's no rank has a copy.
            is_whole = full_shape(shard.parameter) == shard.parameter.shape
            part = Part.whole(shard.parameter.shape) if is_whole else None
            ranks = self.ranks if is_whole else shard.replica_ranks
            found.append(Shard(shard.name, shard.parameter, shard.is_owner, shard.sharding, part, ranks))
        return found

    def check(self) -> None:
        if self._engine.optimizer is not self._partitions.optimizer:
            raise AttachError("the DeepSpeed engine has another optimizer than when hooks were attached: attach again")
        _check_compiled(self._engine)
        super().check()

    def gradient_scale(self) -> float | torch.Tensor | None:
        # DeepSpeed's own loss scale is a number on the host, that of a GradScaler a tensor on the device.
        scaler = scaler_of(self._engine)
        if scaler is not None and scaler.is_enabled():
            return float(scaler._init_scale) if scaler._scale is None else scaler._scale
        found = float(getattr(self._engine.optimizer, "loss_scale", None) or 1.0)
        return None if found == 1.0 else found

    def is_first_gradient(self, index: int) -> bool:
        return False  # it is never known, because DeepSpeed accumulates gradients out of sight

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

    def optimizer_parameters(self, optimizer: Any) -> list[nn.Parameter]:
        """The parameters of the model that the engine updates; the optimizer itself holds flat partitions."""
        return self._partitions.model_parameters()

    def is_updated(self, index: int) -> bool:
        return any(self.shards[index].parameter is parameter for parameter in self._partitions.model_parameters())

    def begin_step(self, optimizer: Any, scaler: Any = None) -> None:
        """Do nothing: the engine's own step begins with what is attached, before it clips."""

    def before_step(self, optimizer: Any, run: BeforeStep, on_repeat: OnRepeat = "refuse") -> Removable:
        """Call ``run`` at the engine's step, not at micro-steps.

        If ``run`` decides to skip, the engine does what it does for a step that overflowed (it drops the gradients, the
        learning rate's schedule waits, ``was_step_applied()`` is False), except that the loss scale stays.
        """
        step = self._step()
        return step.add(step.late, run)

    def before_any_step(self, run: BeforeStep) -> Removable:
        step = self._step()
        return step.add(step.early, run)

    def after_step(self, optimizer: Any, run: Callable[[], None]) -> Removable:
        """Call ``run()`` at the end of the engine's step; final gradients are gone by then."""
        step = self._step()
        return step.add(step.after, run)

    def _step(self) -> DeepSpeedStep:
        found = self._engine.__dict__.get(_STEP)
        if isinstance(found, DeepSpeedStep):
            return found
        trained = [shard for shard in self.shards if shard.parameter.requires_grad]
        return DeepSpeedStep(self._engine, self._partitions, trained, self._group)


class DeepSpeedStep:
    """Stands in for ``engine._take_model_step``; see [Note: DeepSpeed's own step].

    Attributes:
        early, late: what runs before the update, in this order.
        after: what runs after it.
    """

    def __init__(self, engine: Any, partitions: Partitions, shards: Sequence[Shard], group: Any) -> None:
        self.early: list[BeforeStep] = []
        self.late: list[BeforeStep] = []
        self.after: list[Callable[[], None]] = []
        self._engine, self._partitions, self._shards, self._group = engine, partitions, shards, group
        self._replaced = engine.__dict__.get(_STEP)
        self._true = getattr(engine, _STEP)
        engine.__dict__[_STEP] = self

    def add(self, to: list[Any], run: Any) -> CallbackHandle:
        """Put ``run`` at the end of one of the lists; the handle takes it off."""
        to.append(run)
        return CallbackHandle(self, to, run)

    def leave(self) -> None:
        """Put back what was there, unless something is left to run, or somebody else has wrapped this since."""
        if not (self.early or self.late or self.after) and self._engine.__dict__.get(_STEP) is self:
            _restore(self._engine, _STEP, self._replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run everything before, make or skip the step, run everything after."""
        if not (self.early or self.late or self.after):
            return self._true(*args, **kwargs)
        with self._skipping() if self._should_skip() else self._excluding():
            result = self._true(*args, **kwargs)
        for run in list(self.after):
            run()
        return result

    def _should_skip(self) -> bool:
        """Run what is attached; whether it decided to skip a step that DeepSpeed itself would make."""
        overflow = self._overflow()
        decisions = [run(self._engine.basic_optimizer, (), {}) for run in [*self.early, *self.late]]
        if overflow is not None and (first := next(self._grads(), None)) is not None:
            with torch.no_grad():  # see [Note: an overflow stays one]; nothing waits for the device
                first.view(-1)[:1].masked_fill_(overflow, torch.nan)
        skips = any(bool(decision) for decision in decisions if decision is not None)
        return skips and not self._overflowed_anywhere(overflow)

    def _has_loss_scale(self) -> bool:
        return scaler_of(self._engine) is not None or bool(self._engine.fp16_enabled())

    @torch.no_grad()
    def _overflow(self) -> torch.Tensor | None:
        """With a loss scale: whether any of this rank's gradients overflowed, before a rule can hide it."""
        found = [~torch.isfinite(grad).all() for grad in self._grads()] if self._has_loss_scale() else []
        return torch.stack(found).any() if found else None

    def _overflowed_anywhere(self, overflow: torch.Tensor | None) -> bool:
        """Whether any rank has had an overflow; a collective, which every rank runs if all decided to skip."""
        if not self._has_loss_scale():
            return False
        device = self._shards[0].parameter.device
        found = torch.zeros((), device=device) if overflow is None else overflow.to(torch.float32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def _grads(self) -> Iterator[torch.Tensor]:
        grads = (shard.gradient() for shard in self._shards)
        return (grad for grad in grads if grad is not None and grad.numel())

    @contextlib.contextmanager
    def _skipping(self) -> Iterator[None]:
        """Inside, the optimizer's step only drops gradients, and the engine takes it for one that overflowed."""
        optimizer = self._engine.optimizer
        has_overflow = hasattr(optimizer, "overflow")
        replaced = optimizer.__dict__.get("step")

        def step(closure: Any = None) -> None:
            self._partitions.drop_gradients()
            optimizer.overflow = True

        optimizer.__dict__["step"] = step
        try:
            yield
        finally:
            _restore(optimizer, "step", replaced)
            if not has_overflow:
                optimizer.__dict__.pop("overflow", None)

    @contextlib.contextmanager
    def _excluding(self) -> Iterator[None]:
        """Inside, torch's own optimizer does not have excluded parameters, whose gradients the engine zeroes after."""
        if type(self._partitions) is not Partitions:
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


def _restore(owner: Any, name: str, replaced: Any) -> None:
    if replaced is None:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = replaced


# -- where gradients and weights lie


@dataclass(frozen=True)
class PartitionRange:
    """Where this rank's part of a parameter lies in DeepSpeed's groups.

    Attributes:
        group: number of DeepSpeed's group of parameters.
        index: in the group's list of gradients.
        offset: of the part's first element in what this rank has of the group's weights.
        part: which elements of the parameter those are.
    """

    group: int
    index: int
    offset: int
    part: Part

    @property
    def count(self) -> int:
        """How many elements are here."""
        assert self.part.span is not None
        return self.part.span[1] - self.part.span[0]


@dataclass(frozen=True, eq=False)
class ZeroShard(Shard):
    """A shard whose gradient and values lie where ``partitions`` says; a range of elements has one dimension."""

    partitions: Partitions | None = None
    place: PartitionRange | None = None

    def gradient(self) -> torch.Tensor | None:
        return self.partitions.gradient(self.place) if self.partitions and self.place else None

    def values(self) -> torch.Tensor:
        return self.partitions.values(self.place) if self.partitions and self.place else super().values()

    def optimizer_gradient(self) -> torch.Tensor | None:
        return self.gradient()


class Partitions:
    """Stage 0 with torch's own optimizer, which holds the parameters of the model; the subclasses say what differs.

    Attributes:
        optimizer: DeepSpeed's.
        groups: the name of the optimizer's attribute that has the lists of the model's parameters.
        has_whole_gradients: whether every rank has all of every final gradient.
        ranges: where each parameter lies, by its id.
    """

    groups = ""
    has_whole_gradients = True

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.ranges = {id(parameter): place for parameter, place in self._find_ranges()}

    def model_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that are updated."""
        if not self.groups:
            return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return list(itertools.chain.from_iterable(getattr(self.optimizer, self.groups)))

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        """The local part of a final gradient, in the memory that the update is made from; None before it is there."""
        raise NotImplementedError

    def values(self, place: PartitionRange) -> torch.Tensor:
        """The local part of the weights that are updated: of the master weights, if there are some."""
        raise NotImplementedError

    def drop_gradients(self) -> None:
        """Forget final gradients that no step is to use, as after an overflow; the engine calls ``zero_grad`` next."""

    def _find_ranges(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        """Whole parameters, one after another."""
        for group, parameters in enumerate(getattr(self.optimizer, self.groups) if self.groups else ()):
            offset = 0
            for index, parameter in enumerate(parameters):
                yield parameter, PartitionRange(group, index, offset, Part.whole(parameter.shape))
                offset += parameter.numel()


class MasterWeights(Partitions):
    """Stage 0 in bfloat16: whole gradients in ``parameter.grad``, and a whole master of each parameter."""

    groups = "fp16_groups"

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        parameter: nn.Parameter = self.optimizer.fp16_groups[place.group][place.index]
        return parameter.grad  # the engine has reduced it in place

    def values(self, place: PartitionRange) -> torch.Tensor:
        if hasattr(self.optimizer, "fp32_groups"):  # the unfused optimizer has a tensor for each parameter
            one: torch.Tensor = self.optimizer.fp32_groups[place.group][place.index]
            return one.detach()
        flat: torch.Tensor = self.optimizer.fp32_groups_flat[place.group]
        return flat.detach()[place.offset :][: place.part.shape.numel()].view(place.part.shape)


class Bf16Gradients(Partitions):
    """Stage 1 in bfloat16 with gradients in float32: every rank has them whole, and updates a partition.

    All of a gradient has to be rewritten on every rank, because DeepSpeed measures all of it on each: ranks that found
    different norms would not agree on skipping a step. Values are the model's own in bfloat16, which are whole too.
    """

    groups = "bf16_groups"

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        flat: torch.Tensor = self.optimizer.fp32_groups_gradients[place.group][place.index]
        return flat.view(place.part.shape)

    def values(self, place: PartitionRange) -> torch.Tensor:
        parameter: nn.Parameter = self.optimizer.bf16_groups[place.group][place.index]
        return parameter.detach()


class Zero12(Partitions):
    """Stages 1 and 2: each rank has a range of all parameters of a group, one after another.

    ``parameter._hp_mapping`` would tell where, but is wrong with ``round_robin_gradients``.
    """

    groups = "bit16_groups"
    has_whole_gradients = False

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        """An element of the list that the optimizer flattens first of all."""
        grads = self.optimizer.averaged_gradients.get(place.group)
        if grads is None or not place.count:
            return None
        found: torch.Tensor = grads[place.index]
        assert found.numel() == place.count, "DeepSpeed's gradients lie otherwise than disthooks knows; please report"
        if not found.is_contiguous():  # the flattening would copy it, and an edit of this one would be lost
            grads[place.index] = found = found.contiguous()
        return found.view(-1)

    def values(self, place: PartitionRange) -> torch.Tensor:
        flat: torch.Tensor = self.optimizer.single_partition_of_fp32_groups[place.group]
        return flat.detach()[place.offset : place.offset + place.count]

    def drop_gradients(self) -> None:
        optimizer = self.optimizer
        optimizer.micro_step_id = -1
        optimizer._release_preflattened_grad_buffers()
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None
            optimizer.all_grad_tensors[group] = None

    def _find_ranges(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        for group, parameters in enumerate(self.optimizer.round_robin_bit16_groups):
            size = int(self.optimizer.partition_size[group])
            rank = dist.get_rank(self.optimizer.real_dp_process_group[group])
            yield from cut_partition(group, parameters, self._offsets(group), rank * size, size)

    def _offsets(self, group: int) -> list[int]:
        """Where in the group each parameter begins; with ``parameter_alignment`` there are gaps."""
        known = getattr(self.optimizer, "round_robin_bit16_offsets", None)
        if known is not None:
            return list(known[group])
        sizes = [parameter.numel() for parameter in self.optimizer.round_robin_bit16_groups[group]]
        return list(itertools.accumulate(sizes, initial=0))[:-1]


class Zero3(Partitions):
    """Stage 3: each rank has a range of every parameter; the last ranges are padded."""

    groups = "fp16_groups"
    has_whole_gradients = False

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        grads = self.optimizer.averaged_gradients.get(place.group)
        if grads is None or not place.count:
            return None
        found: torch.Tensor = grads[place.index]
        return found.view(-1)[: place.count]

    def values(self, place: PartitionRange) -> torch.Tensor:
        flat: torch.Tensor = self.optimizer.fp32_partitioned_groups_flat[place.group]
        return flat.detach()[place.offset : place.offset + place.count]

    def drop_gradients(self) -> None:
        self.optimizer._pre_step()
        self.optimizer._partition_all_parameters()
        self.optimizer.averaged_gradients = {}

    def _find_ranges(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        for group, parameters in enumerate(self.optimizer.fp16_groups):
            offset = 0
            for index, parameter in enumerate(parameters):
                known: Any = parameter
                size, numel = known.partition_numel(), known.ds_numel
                first = min(self.optimizer._get_param_partition_rank(parameter) * size, numel)
                part = Part(known.ds_shape, span=(first, min(first + size, numel)))
                yield parameter, PartitionRange(group, index, offset, part)
                offset += size


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter; while ZeRO 3 has it partitioned, its own shape is another."""
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return found


def cut_partition(
    group: int, parameters: list[nn.Parameter], offsets: list[int], start: int, size: int
) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
    """What the range of ``size`` elements from ``start`` has of each parameter of a group.

    DeepSpeed's list of gradients has an entry for a gap before a parameter, too.
    """
    index, filled = 0, start
    for parameter, offset in zip(parameters, offsets, strict=True):
        first = min(max(start - offset, 0), parameter.numel())
        last = max(min(start + size - offset, parameter.numel()), first)
        if last > first:
            index += offset + first > filled
            filled = offset + last
        part = Part(parameter.shape, span=(first, last))
        yield parameter, PartitionRange(group, index, max(offset + first - start, 0), part)
        index += last > first


_KINDS: dict[str, type[Partitions]] = {
    "DeepSpeedZeroOptimizer": Zero12,
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
    "BF16_Optimizer": Bf16Gradients,
    "FP16_UnfusedOptimizer": MasterWeights,
    "FP16_Optimizer": MasterWeights,
}


def _partitions_of(engine: Any) -> Partitions:
    # See [Note: what is private of DeepSpeed].
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


# -- what is not supported


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
