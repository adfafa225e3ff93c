"""DeepSpeed's ZeRO: the engine steps by itself, on partitions of flat groups that have no names.

:class:`DeepSpeed` is the engine. :class:`DeepSpeedStep` runs functions before and after its step. The subclasses of
:class:`Partitions` say where each stage keeps final gradients and the weights that it updates.
"""

# [Note: private attributes of DeepSpeed]
# DeepSpeed has no public way to ask where a final gradient lies. `safe_get_full_grad` gathers one parameter at a time,
# with a collective each, and raises on one rank while the others wait under ZeRO 2 in mid accumulation. So the lists
# that its optimizers keep are read. The names of these lists are private; they are those of deepspeed 0.19.8, and
# tests/engines/test_deepspeed.py goes over every stage. If an attribute is missing, an AttachError names the version.
# DeepSpeed's optimizers are recognised by the names of their classes, so that DeepSpeed need not be imported.
#
# [Note: DeepSpeed's own step]
# Hooks on the optimizer are of no use here: torch's optimizer inside steps flat partitions without names, once for each
# group, after DeepSpeed has clipped them. `engine._take_model_step` is called once for each step, when all gradients
# are reduced and DeepSpeed has not yet measured, clipped or unscaled any of them. So it is replaced in the engine's
# `__dict__`. A wrapper that somebody else put there before is still called.
#
# [Note: an overflow stays one]
# With a loss scale DeepSpeed skips a step whose gradients are not finite, and lowers the scale. A rule that replaces
# such a gradient before (Sanitize, ClipValue) would hide it: the step would be made with wrong values, and the scale
# would never get lower. So `DeepSpeedStep` looks for an overflow of this rank's gradients before the rules run, and
# writes one NaN back afterwards. If the rules decide to skip a step, either all ranks skip it for an overflow, as
# DeepSpeed does, or all ranks skip it for the rules. So the ranks first agree whether any of them had an overflow.

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from disthooks._match import is_of_class, unwrap_engine
from disthooks._registry import register
from disthooks.engines.base import Engine, Part, Removable, Shard, Sharding
from disthooks.engines.optimizer_step import CallbackHandle, OnRepeat, joint_decision
from disthooks.engines.step import Step, StepFunctions
from disthooks.errors import AttachError

_STEP = "_take_model_step"
_WORKS = "ZeRO 0 to 3 with DeepSpeedEngine and an optimizer on the device is"


@register("engine")
class DeepSpeed(Engine):
    """The engine that ``deepspeed.initialize`` returned: gradients are final when ``engine.step()`` begins.

    This rank's part of each parameter is a range of its elements, or all of them if the stage leaves gradients whole.
    """

    label = "DeepSpeed"

    def __init__(self, model: nn.Module) -> None:
        engine: Any = model
        for reason, is_so in _REFUSED.items():
            if is_so(engine):
                raise AttachError(f"DeepSpeed with {reason} is not supported: {_WORKS}")
        _check_compiled(engine)
        kind = Partitions
        if engine.optimizer is not engine.basic_optimizer:
            name = type(engine.optimizer).__name__
            if name not in _KINDS:
                raise AttachError(f"DeepSpeed's {name} is not supported: {_WORKS}")
            kind = _KINDS[name]
        try:
            self._partitions = kind(engine.optimizer)
        except AttributeError as error:  # see [Note: private attributes of DeepSpeed]
            raise AttachError(
                f"this version of DeepSpeed does not keep its partitions where disthooks expects them ({error}): "
                "deepspeed 0.19.8 is known to work"
            ) from error
        self._engine, self._group = engine, engine.seq_data_parallel_group
        # Torch's own optimizer holds the parameters of the model; every other one holds partitions without names.
        self.has_named_state = type(self._partitions) is Partitions
        ranks = dist.get_process_group_ranks(self._group)
        super().__init__(unwrap_engine(model), ranks, dist.get_rank(self._group))

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return is_of_class(model, "DeepSpeedEngine")

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        partitions = self._partitions
        own = partitions.ranges.get(id(parameter))
        is_whole = own is None or partitions.has_whole_gradients
        if is_whole:  # the ranks own the parameters in turn
            is_owner, ranks = index % len(self.ranks) == self.position, self.ranks
        else:
            is_owner, ranks = True, (self.ranks[self.position],)
        sharding: Sharding = "whole" if len(self.ranks) == 1 else "replica" if is_whole else "sharded"
        if own is None:  # the parameter is frozen, or torch's own optimizer holds it
            shape = full_shape(parameter)
            part = Part.whole(shape) if shape == parameter.shape else None
            return Shard(name, parameter, is_owner, sharding, part, ranks)
        return ZeroShard(name, parameter, is_owner, sharding, own.part, ranks, partitions=partitions, own=own)

    def weight_shards(self) -> list[Shard]:
        weights = []
        for shard in self.shards:
            # Up to ZeRO 2 every rank has all of the weights that forward uses; under ZeRO 3 each rank has a part.
            is_whole = full_shape(shard.parameter) == shard.parameter.shape
            part = Part.whole(shard.parameter.shape) if is_whole else None
            ranks = self.ranks if is_whole else shard.replica_ranks
            weights.append(Shard(shard.name, shard.parameter, shard.is_owner, shard.sharding, part, ranks))
        return weights

    def check(self) -> None:
        if self._engine.optimizer is not self._partitions.optimizer:
            raise AttachError("the DeepSpeed engine has another optimizer than when hooks were attached: attach again")
        _check_compiled(self._engine)
        super().check()

    def gradient_scale(self) -> float | torch.Tensor | None:
        # DeepSpeed's own loss scale is a number on the host; that of a GradScaler is a tensor on the device.
        scaler = scaler_of(self._engine)
        if scaler is not None and scaler.is_enabled():
            return float(scaler._init_scale) if scaler._scale is None else scaler._scale
        scale = float(getattr(self._engine.optimizer, "loss_scale", None) or 1.0)
        return None if scale == 1.0 else scale

    def is_first_gradient(self, index: int) -> bool:
        return False  # this cannot be known: DeepSpeed accumulates gradients in buffers of its own

    def sync_flags(self) -> list[tuple[Any, str]]:
        return [(self._engine, "micro_steps"), (self._engine, "_is_gradient_accumulation_boundary")]

    def has_other_functions(self, step: Step) -> bool:
        return len(self._step().late) > 1

    def drop_gradients(self, had: Sequence[bool]) -> None:
        self._partitions.drop_gradients()
        self._engine.zero_grad()

    def step_of(self, optimizer: Any) -> Step:
        """The step of the torch optimizer inside the engine's; ``optimizer`` may be None.

        The engine runs the functions itself, so nothing is attached to this step.
        """
        own = (self._engine.optimizer, self._engine.basic_optimizer)
        given = optimizer
        while optimizer is not None and not any(optimizer is one for one in own):
            optimizer = getattr(optimizer, "optimizer", None)  # accelerate's wrapper
        if given is not None and optimizer is None:
            raise AttachError(
                f"this engine does not step the {type(given).__name__} ({self.label}): leave the optimizer out, or "
                "give engine.optimizer"
            )
        return Step([own[1]])

    def optimizer_parameters(self, optimizer: Any) -> list[nn.Parameter]:
        """The parameters of the model that the engine updates; the optimizer itself holds flat partitions."""
        return self._partitions.model_parameters()

    def is_updated(self, index: int) -> bool:
        return any(self.shards[index].parameter is parameter for parameter in self._partitions.model_parameters())

    def begin_step(self, step: Step, scaler: Any = None, chosen: Sequence[Any] | None = None) -> None:
        """Do nothing: the engine's own step runs the attached functions first, before it clips."""

    def before_step(self, step: Step, functions: StepFunctions, on_repeat: OnRepeat = "refuse") -> Removable:
        """Call the functions at the engine's step, not at micro-steps.

        If ``run`` decides to skip, the engine treats the step as one that overflowed (it drops the gradients, the
        learning rate's schedule waits, ``was_step_applied()`` is False), but the loss scale stays.
        """
        hooks = self._step()
        return hooks.add(hooks.late, (step, functions))

    def before_backward(self, see: Callable[[Any], None]) -> list[Removable]:
        return [_BeforeBackward(self._engine, see)]

    def before_any_step(self, run: Callable[[Any], None]) -> Removable:
        hooks = self._step()
        return hooks.add(hooks.early, run)

    def after_step(self, step: Step, run: Callable[[], None]) -> Removable:
        """Call ``run()`` at the end of the engine's step; final gradients are gone by then."""
        hooks = self._step()
        return hooks.add(hooks.after, run)

    def _step(self) -> DeepSpeedStep:
        step = self._engine.__dict__.get(_STEP)
        if isinstance(step, DeepSpeedStep):
            return step
        trained = [shard for shard in self.shards if shard.parameter.requires_grad]
        return DeepSpeedStep(self._engine, self._partitions, trained, self._group)


class DeepSpeedStep:
    """Stands in for ``engine._take_model_step``; see [Note: DeepSpeed's own step].

    Attributes:
        early, late: functions that run before the update, those of ``early`` first; ``late`` has the step of each.
        after: functions that run after it.
    """

    def __init__(self, engine: Any, partitions: Partitions, shards: Sequence[Shard], group: Any) -> None:
        self.early: list[Callable[[Any], None]] = []
        self.late: list[tuple[Step, StepFunctions]] = []
        self.after: list[Callable[[], None]] = []
        self._engine, self._partitions, self._shards, self._group = engine, partitions, shards, group
        self._replaced = engine.__dict__.get(_STEP)
        self._true = getattr(engine, _STEP)
        engine.__dict__[_STEP] = self

    def add(self, to: list[Any], run: Any) -> CallbackHandle:
        to.append(run)
        return CallbackHandle(self, to, run)

    def leave(self) -> None:
        """Put the engine's own method back, unless a function is left, or somebody else has wrapped this since."""
        if not (self.early or self.late or self.after) and self._engine.__dict__.get(_STEP) is self:
            _restore(self._engine, _STEP, self._replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``early`` and ``late``, make or skip the step, and run ``after``."""
        if not (self.early or self.late or self.after):
            return self._true(*args, **kwargs)
        with self._skipping() if self._should_skip() else contextlib.nullcontext():
            result = self._true(*args, **kwargs)
        for run in list(self.after):
            run()
        return result

    def _should_skip(self) -> bool:
        """Run ``early`` and ``late``; whether they decided to skip a step that DeepSpeed itself would make.

        See [Note: an overflow stays one].
        """
        has_loss_scale = scaler_of(self._engine) is not None or bool(self._engine.fp16_enabled())
        overflow: torch.Tensor | None = None
        if has_loss_scale:
            with torch.no_grad():
                overflows = [~torch.isfinite(grad).all() for grad in self._grads()]
            overflow = torch.stack(overflows).any() if overflows else None
        for run in list(self.early):
            run(self._engine.basic_optimizer)
        decisions = [functions.run(step) for step, functions in list(self.late)]
        for step, functions in list(self.late):
            step.skipped = joint_decision(decisions)
            functions.made()
        if overflow is not None and (first := next(self._grads(), None)) is not None:
            with torch.no_grad():  # nothing waits for the device
                first.view(-1)[:1].masked_fill_(overflow, torch.nan)
        skips = any(bool(decision) for decision in decisions if decision is not None)
        if not skips or not has_loss_scale:
            return skips
        # All ranks decided to skip, so all of them run this collective.
        anywhere = torch.zeros((), device=self._shards[0].parameter.device)
        if overflow is not None:
            anywhere = overflow.to(torch.float32)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._group)
        return not bool(anywhere)

    def _grads(self) -> Iterator[torch.Tensor]:
        grads = (shard.gradient() for shard in self._shards)
        return (grad for grad in grads if grad is not None and grad.numel())

    @contextlib.contextmanager
    def _skipping(self) -> Iterator[None]:
        """Inside, the optimizer's step only drops gradients and reports an overflow to the engine."""
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


class _BeforeBackward:
    """Stands in for ``engine.backward``, which the loop calls with the loss."""

    def __init__(self, engine: Any, see: Callable[[Any], Any]) -> None:
        self._engine, self._see = engine, see
        self._replaced, self._true = engine.__dict__.get("backward"), engine.backward
        engine.__dict__["backward"] = self

    def __call__(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._see(loss)
        return self._true(loss, *args, **kwargs)

    def remove(self) -> None:
        if self._engine.__dict__.get("backward") is self:
            _restore(self._engine, "backward", self._replaced)
        self._see = id  # somebody else has wrapped this since


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
        group: the number of DeepSpeed's group of parameters.
        index: the index of the part's gradient in the group's list of gradients.
        offset: the index of the part's first element in this rank's weights of the group.
        part: which elements of the parameter those are.
    """

    group: int
    index: int
    offset: int
    part: Part

    @property
    def count(self) -> int:
        assert self.part.span is not None
        return self.part.span[1] - self.part.span[0]


@dataclass(frozen=True, eq=False)
class ZeroShard(Shard):
    """A shard whose gradient and values lie where ``partitions`` says; a range of elements has one dimension.

    Attributes:
        partitions: the gradients and weights of all parameters.
        own: where those of this parameter are.
    """

    partitions: Partitions = field(kw_only=True)
    own: PartitionRange = field(kw_only=True)

    def gradient(self) -> torch.Tensor | None:
        return self.partitions.gradient(self.own)

    def values(self) -> torch.Tensor:
        return self.partitions.values(self.own)

    def optimizer_gradient(self) -> torch.Tensor | None:
        return self.partitions.gradient(self.own)


class Partitions:
    """Where DeepSpeed keeps final gradients and the weights that it updates; each stage has a subclass.

    This class is that of stage 0 with torch's own optimizer, which holds the parameters of the model.

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
        self.ranges = {id(parameter): own for parameter, own in self._find_ranges()}

    def model_parameters(self) -> list[nn.Parameter]:
        if not self.groups:
            return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return list(itertools.chain.from_iterable(getattr(self.optimizer, self.groups)))

    def gradient(self, own: PartitionRange) -> torch.Tensor | None:
        """The local part of a final gradient, in the memory that the update is made from; None before it is there."""
        raise NotImplementedError

    def values(self, own: PartitionRange) -> torch.Tensor:
        """The local part of the weights that the update changes: of the master weights, if there are any."""
        raise NotImplementedError

    def drop_gradients(self) -> None:
        """Drop final gradients that no step will use, as after an overflow; the engine calls ``zero_grad`` next."""

    def _find_ranges(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        # The ranges are whole parameters, one after another.
        for group, parameters in enumerate(getattr(self.optimizer, self.groups) if self.groups else ()):
            offset = 0
            for index, parameter in enumerate(parameters):
                yield parameter, PartitionRange(group, index, offset, Part.whole(parameter.shape))
                offset += parameter.numel()


class MasterWeights(Partitions):
    """Stage 0 in bfloat16: whole gradients in ``parameter.grad``, and a whole master copy of each parameter."""

    groups = "fp16_groups"

    def gradient(self, own: PartitionRange) -> torch.Tensor | None:
        parameter: nn.Parameter = self.optimizer.fp16_groups[own.group][own.index]
        return parameter.grad  # the engine has reduced it in place

    def values(self, own: PartitionRange) -> torch.Tensor:
        if hasattr(self.optimizer, "fp32_groups"):  # the unfused optimizer has a tensor for each parameter
            one: torch.Tensor = self.optimizer.fp32_groups[own.group][own.index]
            return one.detach()
        flat: torch.Tensor = self.optimizer.fp32_groups_flat[own.group]
        return flat.detach()[own.offset :][: own.part.shape.numel()].view(own.part.shape)


class Bf16Gradients(Partitions):
    """Stage 1 in bfloat16 with gradients in float32: every rank has them whole, and updates a partition.

    A rule must rewrite all of a gradient on every rank, because each rank of DeepSpeed measures all of it: ranks that
    found different norms would not agree on skipping a step. Values are the model's own in bfloat16, which are whole.
    """

    groups = "bf16_groups"

    def gradient(self, own: PartitionRange) -> torch.Tensor | None:
        flat: torch.Tensor = self.optimizer.fp32_groups_gradients[own.group][own.index]
        return flat.view(own.part.shape)

    def values(self, own: PartitionRange) -> torch.Tensor:
        parameter: nn.Parameter = self.optimizer.bf16_groups[own.group][own.index]
        return parameter.detach()


class ShardedMasterWeights(Partitions):
    """Stages 1 to 3: each rank has a range of elements, and a flat master copy of their weights.

    Attributes:
        masters: the name of the optimizer's attribute that has the flat master copy of each group.
    """

    has_whole_gradients = False
    masters: ClassVar[str]

    def values(self, own: PartitionRange) -> torch.Tensor:
        flat: torch.Tensor = getattr(self.optimizer, self.masters)[own.group]
        return flat.detach()[own.offset : own.offset + own.count]


class Zero12(ShardedMasterWeights):
    """Stages 1 and 2: each rank has a range of all parameters of a group, one after another.

    ``parameter._hp_mapping`` would tell where, but is wrong with ``round_robin_gradients``.
    """

    groups = "bit16_groups"
    masters = "single_partition_of_fp32_groups"

    def gradient(self, own: PartitionRange) -> torch.Tensor | None:
        # The optimizer's step begins by flattening this list of gradients.
        grads = self.optimizer.averaged_gradients.get(own.group)
        if grads is None or not own.count:
            return None
        grad: torch.Tensor = grads[own.index]
        assert grad.numel() == own.count, "DeepSpeed's gradient has another size than disthooks expects; please report"
        if not grad.is_contiguous():  # view(-1) fails, and an edit of a copy that is not in the list would be lost
            grads[own.index] = grad = grad.contiguous()
        return grad.view(-1)

    def drop_gradients(self) -> None:
        optimizer = self.optimizer
        optimizer.micro_step_id = -1
        optimizer._release_preflattened_grad_buffers()
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None
            optimizer.all_grad_tensors[group] = None

    def _find_ranges(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        known = getattr(self.optimizer, "round_robin_bit16_offsets", None)
        for group, parameters in enumerate(self.optimizer.round_robin_bit16_groups):
            size = int(self.optimizer.partition_size[group])
            rank = dist.get_rank(self.optimizer.real_dp_process_group[group])
            if known is None:
                offsets = list(itertools.accumulate((each.numel() for each in parameters), initial=0))[:-1]
            else:  # with `parameter_alignment` there are gaps between the parameters
                offsets = list(known[group])
            yield from cut_partition(group, parameters, offsets, rank * size, size)


class Zero3(ShardedMasterWeights):
    """Stage 3: each rank has a range of every parameter; the last ranges are padded."""

    groups = "fp16_groups"
    masters = "fp32_partitioned_groups_flat"

    def gradient(self, own: PartitionRange) -> torch.Tensor | None:
        grads = self.optimizer.averaged_gradients.get(own.group)
        if grads is None or not own.count:
            return None
        grad: torch.Tensor = grads[own.index]
        return grad.view(-1)[: own.count]

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
    """The shape of the whole parameter; while ZeRO 3 has it partitioned, ``parameter.shape`` is another."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def cut_partition(
    group: int, parameters: list[nn.Parameter], offsets: list[int], start: int, size: int
) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
    """For each parameter of a group, its part in the range of ``size`` elements from ``start``; it may be empty."""
    # DeepSpeed's list of gradients also has an entry for each gap between parameters, and `index` counts it. `filled`
    # is where the last part ended.
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


# -- configurations that are not supported


def _check_compiled(engine: Any) -> None:
    if getattr(engine, "is_deepcompile_active", lambda: False)():
        raise AttachError("DeepCompile reduces gradients inside the compiled graph, and hooks never run: turn it off")


_REFUSED: dict[str, Callable[[Any], bool]] = {
    "pipeline stages (whose gradients are reduced and used inside train_batch())": lambda e: is_of_class(
        e, "PipelineEngine"
    ),
    "no optimizer": lambda e: e.optimizer is None or is_of_class(e.optimizer, "DummyOptim", "DeepSpeedZeRoOffload"),
    "MiCS (which partitions over a part of the ranks)": lambda e: is_of_class(e.optimizer, "MiCS_Optimizer"),
    "zero_hpz_partition_size above 1 (secondary partitions)": lambda e: (
        getattr(e.optimizer, "zero_hpz_partition_size", 1) > 1
    ),
    "an optimizer offloaded to CPU or NVMe (it measures gradients while they are copied, before any rule)": lambda e: (
        any(getattr(e.optimizer, name, False) for name in ("cpu_offload", "offload_optimizer", "zenflow"))
    ),
    "experts in parallel (MoE)": lambda e: bool(e.has_moe_layers),
    "model parallelism (mpu, AutoTP)": lambda e: e.mpu is not None or getattr(e, "autotp_size", lambda: 0)() > 1,
    "Muon (which makes its update while gradients are reduced)": lambda e: "Muon" in type(e.basic_optimizer).__name__,
    "an optimizer that reduces gradients itself (1-bit Adam and its like)": lambda e: not e.enable_backward_allreduce,
    # deepspeed 0.19.8 divides by the loss scale here and never multiplied by it; earlier ones did
    "fp16 at stage 0 (whose gradients are not of the loss scale that it divides them by)": lambda e: (
        e.fp16_enabled() and e.zero_optimization_stage() == 0
    ),
}
