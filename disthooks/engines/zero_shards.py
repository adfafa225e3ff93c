"""Where each stage of DeepSpeed's ZeRO keeps final gradients and the weights that its optimizer updates.

DeepSpeed's optimizers are told by the names of their classes, so that it need not be imported. What is read of them
has no public name: measured with deepspeed 0.19.8, and ``tests/engines/test_deepspeed.py`` goes over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disthooks.engines.base import Part, Shard


@dataclass(frozen=True)
class PartitionRange:
    """Where a part lies.

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
    """A shard whose gradient and values are where a :class:`Partitions` says."""

    kept: Partitions | None = None
    place: PartitionRange | None = None

    def gradient(self) -> torch.Tensor | None:
        """The local part of the final gradient; None where this rank has no part, and before it is reduced."""
        return self.kept.gradient(self.place) if self.kept and self.place else None

    def values(self) -> torch.Tensor:
        """The local part of the weights that the optimizer updates: of the master weights, where there are some."""
        return self.kept.values(self.place) if self.kept and self.place else super().values()

    def optimizer_gradient(self) -> torch.Tensor | None:
        """The local part, of one dimension where it is a range."""
        return self.gradient()


class Partitions:
    """Stage 0 with torch's own optimizer, which holds the parameters of the model; the others say what differs.

    Attributes:
        optimizer: DeepSpeed's.
        whole: whether every rank has all of every final gradient.
    """

    whole = True

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.places = {id(parameter): place for parameter, place in self._places()}

    def optimizer_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that are updated."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        """The local part of a final gradient, sharing the memory that the update is made from."""
        raise NotImplementedError

    def values(self, place: PartitionRange) -> torch.Tensor:
        """The local part of the weights that are updated."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forget final gradients that no step is to use; the engine calls ``zero_grad`` after this."""

    def _places(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        return iter(())


class Masters(Partitions):
    """Stage 0 in bfloat16: whole gradients in ``parameter.grad``, and a whole master of each parameter."""

    def optimizer_parameters(self) -> list[nn.Parameter]:
        """Those in half precision."""
        return list(itertools.chain.from_iterable(self.optimizer.fp16_groups))

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        """Reduced in place by the engine."""
        parameter: nn.Parameter = self.optimizer.fp16_groups[place.group][place.index]
        return parameter.grad

    def values(self, place: PartitionRange) -> torch.Tensor:
        """A tensor of its own for each (unfused), or a range of a flat one (fused)."""
        if hasattr(self.optimizer, "fp32_groups"):
            one: torch.Tensor = self.optimizer.fp32_groups[place.group][place.index]
            return one.detach()
        flat: torch.Tensor = self.optimizer.fp32_groups_flat[place.group]
        return flat.detach()[place.offset :][: place.part.shape.numel()].view(place.part.shape)

    def _places(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        return _in_order(self.optimizer.fp16_groups)


class Bf16(Partitions):
    """Stage 1 in bfloat16 with gradients in float32: every rank has them whole, and updates a partition.

    All of a gradient has to be rewritten on every rank, since DeepSpeed measures all of it on each: ranks that
    found different norms would not agree on skipping a step. Values are the model's own, which are whole too.
    """

    def optimizer_parameters(self) -> list[nn.Parameter]:
        """Those in bfloat16."""
        return list(itertools.chain.from_iterable(self.optimizer.bf16_groups))

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        """A range of the flat buffer in which they are accumulated and reduced."""
        flat: torch.Tensor = self.optimizer.fp32_groups_gradients[place.group][place.index]
        return flat.view(place.part.shape)

    def values(self, place: PartitionRange) -> torch.Tensor:
        """In bfloat16."""
        parameter: nn.Parameter = self.optimizer.bf16_groups[place.group][place.index]
        return parameter.detach()

    def _places(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        return _in_order(self.optimizer.bf16_groups)


class Zero12(Partitions):
    """Stages 1 and 2: each rank has a range of all parameters of a group, one after another.

    ``parameter._hp_mapping`` would tell where, but is wrong with ``round_robin_gradients``.
    """

    whole = False

    def optimizer_parameters(self) -> list[nn.Parameter]:
        """Those that were flattened."""
        return list(itertools.chain.from_iterable(self.optimizer.bit16_groups))

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        """A member of the list that the optimizer flattens first of all."""
        grads = self.optimizer.averaged_gradients.get(place.group)
        if grads is None or not place.count:
            return None
        found: torch.Tensor = grads[place.index]
        assert found.numel() == place.count, "DeepSpeed's gradients lie otherwise than disthooks knows; please report"
        if not found.is_contiguous():  # it would be copied by the flattening
            grads[place.index] = found = found.contiguous()
        return found.view(-1)

    def values(self, place: PartitionRange) -> torch.Tensor:
        """A range of this rank's masters of the group."""
        flat: torch.Tensor = self.optimizer.single_partition_of_fp32_groups[place.group]
        return flat.detach()[place.offset : place.offset + place.count]

    def drop(self) -> None:
        """As after an overflow."""
        optimizer = self.optimizer
        optimizer.micro_step_id = -1
        optimizer._release_preflattened_grad_buffers()
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None
            optimizer.all_grad_tensors[group] = None

    def _places(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        for group, parameters in enumerate(self.optimizer.round_robin_bit16_groups):
            size = int(self.optimizer.partition_size[group])
            rank = torch.distributed.get_rank(self.optimizer.real_dp_process_group[group])
            yield from _cut(group, parameters, self._offsets(group), rank * size, size)

    def _offsets(self, group: int) -> list[int]:
        """Where in the group each parameter begins; with parameter_alignment there are gaps."""
        known = getattr(self.optimizer, "round_robin_bit16_offsets", None)
        if known is not None:
            return list(known[group])
        sizes = [parameter.numel() for parameter in self.optimizer.round_robin_bit16_groups[group]]
        return list(itertools.accumulate(sizes, initial=0))[:-1]


class Zero3(Partitions):
    """Stage 3: each rank has a range of every parameter, the last ones filled up with elements that are none."""

    whole = False

    def optimizer_parameters(self) -> list[nn.Parameter]:
        """Those that were partitioned and are trained."""
        return list(itertools.chain.from_iterable(self.optimizer.fp16_groups))

    def gradient(self, place: PartitionRange) -> torch.Tensor | None:
        """A range of the flat buffer into which they are reduced."""
        grads = self.optimizer.averaged_gradients.get(place.group)
        if grads is None or not place.count:
            return None
        found: torch.Tensor = grads[place.index]
        return found.view(-1)[: place.count]

    def values(self, place: PartitionRange) -> torch.Tensor:
        """A range of this rank's masters of the sub-group."""
        flat: torch.Tensor = self.optimizer.fp32_partitioned_groups_flat[place.group]
        return flat.detach()[place.offset : place.offset + place.count]

    def drop(self) -> None:
        """As after an overflow."""
        self.optimizer._pre_step()
        self.optimizer._partition_all_parameters()
        self.optimizer.averaged_gradients = {}

    def _places(self) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
        for group, parameters in enumerate(self.optimizer.fp16_groups):
            offset = 0
            for index, parameter in enumerate(parameters):
                known: Any = parameter
                size, numel = known.partition_numel(), known.ds_numel
                first = min(self.optimizer._get_param_partition_rank(parameter) * size, numel)
                yield (
                    parameter,
                    PartitionRange(group, index, offset, Part(known.ds_shape, span=(first, min(first + size, numel)))),
                )
                offset += size


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter, which is not its own while ZeRO-3 has it partitioned."""
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return found


def _in_order(groups: list[list[nn.Parameter]]) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
    """Whole parameters, one after another."""
    for group, parameters in enumerate(groups):
        offset = 0
        for index, parameter in enumerate(parameters):
            yield parameter, PartitionRange(group, index, offset, Part.whole(parameter.shape))
            offset += parameter.numel()


def _cut(
    group: int, parameters: list[nn.Parameter], offsets: list[int], start: int, size: int
) -> Iterator[tuple[nn.Parameter, PartitionRange]]:
    """What the range of ``size`` from ``start`` has of each parameter; a gap before one counts as a gradient."""
    index, filled = 0, start
    for parameter, offset in zip(parameters, offsets, strict=True):
        first = min(max(start - offset, 0), parameter.numel())
        last = max(min(start + size - offset, parameter.numel()), first)
        if last > first:
            index += offset + first > filled
            filled = offset + last
        yield (
            parameter,
            PartitionRange(group, index, max(offset + first - start, 0), Part(parameter.shape, span=(first, last))),
        )
        index += last > first
