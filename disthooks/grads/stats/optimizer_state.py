"""``OptimizerState``: the norms of the moments that an optimizer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Engine, Shard
from disthooks.errors import UsageError
from disthooks.grads.stats.base import Found, Local, Measure, Merge, Stat, State
from disthooks.grads.stats.norms import squares


@dataclass(frozen=True)
class StateSquares(Measure):
    """For each key the sum of the squares of a parameter's state after the update, and 1 if there is such a state."""

    keys: tuple[str, ...]

    merge: ClassVar[Merge] = "sum"
    after: ClassVar[bool] = True
    needs_states: ClassVar[bool] = True

    def width(self, shard: Shard | None) -> int:
        return 2 * len(self.keys)

    def local(self, local: Local) -> torch.Tensor:
        columns = []
        for key in self.keys:
            parts = [
                shard.of_state(state[key]) if shard.is_owner and isinstance(state.get(key), torch.Tensor) else None
                for shard, state in zip(local.shards, local.states, strict=True)
            ]
            columns.append(squares(parts, local.device))
            has = torch.tensor([part is not None for part in parts], dtype=torch.float64)
            columns.append(has.to(local.device, non_blocking=True))
        return torch.stack(columns, dim=1).flatten()


@register("stat")
@dataclass(frozen=True)
class OptimizerState(Stat):
    """The 2-norms of the moments that the optimizer keeps, after its update: ``optimizer/<key>``.

    Adam's ``exp_avg`` is the mean of gradients by which it steps, and ``exp_avg_sq`` that of their squares: where the
    first grows and the second does not, a large update follows. Keys that the optimizer does not have are not logged.
    A logged step takes one more all-reduce, the same that :class:`Updates` takes.

    Args:
        keys: the keys of a parameter's state that are measured, such as "momentum_buffer".
        per_parameter: log the norm of each parameter too, as ``optimizer/<key>/param/<name>``.

    Raises:
        UsageError: when attached, if the optimizer keeps its state in partitions without names (ZeRO 1 to 3).

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> with gradients(model, optimizer, stats=[OptimizerState()], every=1) as watch:
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...     optimizer.step()
    >>> watch.latest["optimizer/momentum_buffer"]
    5.0
    """

    keys: Sequence[str] = ("exp_avg", "exp_avg_sq", "momentum_buffer")

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.keys, str) or not self.keys or not all(isinstance(key, str) for key in self.keys):
            raise UsageError(f"OptimizerState(keys={self.keys!r}): give a list of the keys of the optimizer's state")
        object.__setattr__(self, "keys", tuple(self.keys))

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        if not engine.has_named_state:
            raise UsageError(
                f"OptimizerState: the optimizer of {engine.label} keeps its state in partitions without names: leave "
                "this statistic out, or use ZeRO 0, DDP or FSDP"
            )

    def measures(self) -> tuple[Measure, ...]:
        return (StateSquares(tuple(self.keys)),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"optimizer/{key}": values[0][:, 2 * i].sqrt() for i, key in enumerate(self.keys)}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        has = found.rows[self.measures()[0]].sum(0)[1::2].tolist()
        columns = self.numbers([self.scoped(found, self.measures()[0])])
        there = {name: column.tolist() for (name, column), any_has in zip(columns.items(), has, strict=True) if any_has}
        return self.named(found, there)
