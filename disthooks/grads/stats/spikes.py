"""``SpikeScore``: the share of steps whose loss or norm is a spike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._registry import register
from disthooks.grads.stats.base import Found, Measure, Stat, State, refuse_per_parameter


@register("stat")
@dataclass(frozen=True)
class SpikeScore(Stat):
    """The share of steps whose loss or gradient norm was a spike: above ``mean + sigmas * std`` of the steps before.

    This is the score of OLMo's stability monitor. Each step is compared, logged or not, by the rule of
    :class:`~disthooks.SkipSpike`. The log gets ``spike_score``, of the last 10,000 steps, and ``spike_score_total``, of
    all steps. Both are from 0 to 1. The counts are in ``state_dict()`` of the attachment.

    Args:
        sigmas: how many standard deviations above the mean a number must be.
        window: how many steps the history has.
        least: how many steps the history must have, before a number can be a spike.
        loss: whether the loss is compared too, where one is handed in.

    Raises:
        UsageError: when an argument is out of its range.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    >>> with gradients(model, optimizer, stats=[SpikeScore(least=2)], every=1) as watch:
    ...     for norm in (1.0, 1.1, 1.0, 50.0):
    ...         model.weight.grad = torch.tensor([[norm]])
    ...         optimizer.step()
    >>> watch.latest["spike_score"]
    0.25
    """

    sigmas: float = 6.0
    window: int = 128
    least: int = 64
    loss: bool = True

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_per_parameter(self)
        self.rule()

    def rule(self) -> Any:
        from disthooks.grads.rules.spike import CountSpikes  # rules import statistics

        return CountSpikes(self.sigmas, self.window, self.least, self.loss)

    def measures(self) -> tuple[Measure, ...]:
        return ()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        return {}  # its rule logs
