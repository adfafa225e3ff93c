"""The numbers of a logged step on their way to the host, and the record that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from disthooks._device import current_stream, event_on, on_accelerator
from disthooks.grads.collect import Layout
from disthooks.grads.measures.base import Measure
from disthooks.grads.plan import Steps
from disthooks.grads.stats.base import Found, Stat, State

Merged = tuple[torch.Tensor, torch.Tensor]


class Copy:
    """Tensors that are being copied to the host; from an accelerator into pinned memory, so that nothing waits.

    >>> Copy([torch.tensor([1.0])]).tensors()
    [tensor([1.])]
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        devices = {tensor.device for tensor in tensors if on_accelerator(tensor)}
        self._arrived = [event_on(current_stream(device)) for device in devices]

    def arrived(self) -> bool:
        """Whether the copies are there, so that :meth:`tensors` waits for nothing."""
        return all(event.query() for event in self._arrived)

    def tensors(self) -> list[torch.Tensor]:
        """The copies, once they have arrived."""
        for event in self._arrived:
            event.synchronize()
        return self._copies


class Pending(NamedTuple):
    """What was measured and decided in a logged step.

    Attributes:
        step: which.
        merged: the merged vectors of each round, then those measured after the update.
        names: of the numbers that rules wrote.
        copy: all of it: two vectors for each round, and the rules' numbers in one.
    """

    step: int
    names: Sequence[str]
    copy: Copy

    @staticmethod
    def of(step: int, merged: Sequence[Merged], log: Mapping[str, torch.Tensor]) -> Pending:
        """Start the copies."""
        numbers = torch.stack([value.double() for value in log.values()]) if log else torch.zeros(0)
        return Pending(step, list(log), Copy([*(vector for pair in merged for vector in pair), numbers]))

    def record(self, steps: Steps, stats: Sequence[tuple[Stat, State]], ranks: Sequence[int]) -> dict[str, Any]:
        """What goes into the log; each statistic with what it keeps from step to step."""
        *vectors, numbers = self.copy.tensors()
        record: dict[str, Any] = {"step": self.step} | dict(zip(self.names, numbers.tolist(), strict=True))
        merged = list(zip(vectors[::2], vectors[1::2], strict=True))
        layouts = [steps.rounds[0].logged, *([steps.after] if steps.after.uses else [])]
        pairs = [merged[0], *merged[len(steps.rounds) :]]
        rows: dict[Measure, torch.Tensor] = {}
        for layout, pair in zip(layouts, pairs, strict=True):
            rows |= _rows(layout, pair, {m for stat, _ in stats for m in stat.measures()})
        found = Found([shard.name for shard in steps.shards], steps.groups, rows, ranks)
        for stat, state in stats:
            record |= stat.record(found, state)
        return record


def _rows(layout: Layout, merged: Merged, wanted: set[Measure]) -> dict[Measure, torch.Tensor]:
    values = layout.unpack(merged)
    return {m: values[m].view(len(layout.sizes(m)), -1) for m in layout.uses if m in wanted}
