"""The two collectives of a round: local numbers of all measures into one SUM and one MAX, and out again."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from disthooks.grads.measures import Local, Measure

# A group is kept for as long as the default group it was made under: making one anew can meet the keys that its
# namesake left in the store, and with NCCL each holds device memory.
# Weakly: once torch.distributed has destroyed them, they must not live on here with their threads.
_groups: dict[tuple[int, ...], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def group_of(ranks: Sequence[int]) -> Any:
    """The process group of disthooks for ``ranks``, made at the first call; None for one rank alone.

    A group of its own, so that no collective of the training can be mistaken for one of ours. Every one of
    ``ranks`` must call it, the others need not.
    """
    if len(ranks) == 1:
        return None
    default, group = (ref() for ref in _groups.get(tuple(ranks), (_nothing, _nothing)))
    if group is None or default is not dist.group.WORLD:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        _groups[tuple(ranks)] = (weakref.ref(dist.group.WORLD), weakref.ref(group))
    return group


def _nothing() -> None:
    """A reference to nothing."""


def device_for(group: Any, device: torch.device) -> torch.device:
    """``device`` if the group can reduce there, else one where it can (gradients offloaded to the CPU, with NCCL)."""
    if group is None:
        return device
    kinds = [able.type for able in group._device_types]
    if device.type in kinds or not kinds:
        return device
    return torch.device(kinds[0]) if kinds[0] == "cpu" else torch.device(kinds[0], torch.cuda.current_device())


def agree(group: Any, device: torch.device, flag: bool, what: str) -> tuple[bool, bool]:
    """Whether ``flag`` is true on any rank, and whether ``what`` is the same text on all: one collective."""
    if group is None:
        return flag, True
    mark = float(zlib.crc32(what.encode()))  # of 32 bits, so exact in float64
    found = torch.tensor([float(flag), mark, -mark], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    any_flag, most, least = found.tolist()
    return bool(any_flag), most == -least


@dataclass(frozen=True)
class Layout:
    """Which measures a round takes of which parameters, and where their numbers lie in its two vectors.

    A MAX may lose a NaN, so for each of its numbers a second one says whether that was one.

    >>> from disthooks.grads.measures import Power
    >>> layout = Layout({Power(2.0): (0, 1)})
    >>> local = Local([torch.ones(4), None], [None, None], 0, 1, torch.device("cpu"))
    >>> layout.unpack(layout.pack(local))
    {Power(p=2.0): tensor([4., 0.], dtype=torch.float64)}
    """

    uses: Mapping[Measure, tuple[int, ...]]

    def pack(self, local: Local) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's numbers: what to SUM, and what to MAX; both float64, the same length on every rank."""
        sums, peaks = [local_zeros(local, 0)], [local_zeros(local, 0)]
        for measure, indices in self.uses.items():
            part = local._replace(
                grads=[local.grads[i] for i in indices],
                flags=[local.flags[i] for i in indices],
                apart=[local.apart[i] for i in indices] if local.apart else (),
            )
            values = measure.local(part)
            if measure.merge == "sum":
                sums.append(values)
            else:
                peaks += [values.nan_to_num(0.0, torch.inf), values.isnan().double()]
        return torch.cat(sums), torch.cat(peaks)

    def unpack(self, merged: tuple[torch.Tensor, torch.Tensor]) -> dict[Measure, torch.Tensor]:
        """The numbers of each measure, one for each of its parameters."""
        found, at = {}, {"sum": 0, "max": 0}
        for measure, indices in self.uses.items():
            vector, start, n = merged[measure.merge == "max"], at[measure.merge], len(indices)
            values = vector[start : start + n]
            if measure.merge == "max":
                values = values.masked_fill(vector[start + n : start + 2 * n] > 0, torch.nan)
            at[measure.merge] += n if measure.merge == "sum" else 2 * n
            found[measure] = values
        return found

    def collectives(self) -> int:
        """How many all-reduces it takes: none, one or two."""
        return len({measure.merge for measure in self.uses})


def reduce(group: Any, packed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge over the ranks, in place; an empty vector is empty on every rank and is left alone."""
    if group is not None:
        for vector, op in zip(packed, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            if vector.numel():
                dist.all_reduce(vector, op, group=group)
    return packed


def local_zeros(local: Local, count: int) -> torch.Tensor:
    """A float64 vector of zeros on the device of ``local``."""
    return torch.zeros(count, dtype=torch.float64, device=local.device)
