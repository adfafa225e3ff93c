"""``AdaGC``: clip each gradient by the moving average of its own clipped norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.rules.base import Rule, State, Work, check_count, check_positive, number
from disthooks.grads.rules.clip import factor_to, log_clipped, scale_each
from disthooks.grads.stats.base import Measure
from disthooks.grads.stats.norms import Power


@register("rule")
@dataclass(frozen=True)
class AdaGC(Rule):
    """Clip the gradient of each parameter by the moving average of its own clipped norms.

    This is Wang et al., "AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping" (2025). With ``g``
    the norm of one parameter's gradient, and ``average`` that of its clipped norms so far:

    - in the first ``warmup_steps`` steps all gradients are clipped together, as :class:`ClipNorm` does with
      ``max_norm``, and ``average = min(average, clipped g)``;
    - from then on the gradient is multiplied by ``min(1, ratio * average / g)``, and
      ``average = beta * average + (1 - beta) * clipped g``.

    A parameter that has no gradient in a step, as an expert that gets no token, keeps its average, and its first norm
    begins it. A norm that is not finite does not change it. Such a norm makes the gradient NaN, as
    :class:`~disthooks.ClipNorm` does, so put :class:`~disthooks.SkipNonFinite` before this rule.

    The log gets ``grad_norm``, ``grad_norm_clipped``, ``clip_ratio`` (the smallest factor) and ``parameters_clipped``
    (the share of the parameters). The averages are in ``state_dict()`` of the attachment, by the names of parameters.

    Args:
        ratio: the largest ratio of a norm to its average, lambda_rel in the paper; above 0.
        beta: the share of the old average that stays in the new one; at least 0 and below 1.
        warmup_steps: how many steps are clipped by ``max_norm``.
        max_norm: the largest norm of all gradients together in these steps, lambda_abs in the paper; positive.

    Raises:
        UsageError: when an argument is out of its range.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    >>> with gradients(model, optimizer, rules=[AdaGC(ratio=2.0, warmup_steps=1, max_norm=1.0)]):
    ...     for norm in (0.5, 0.9, 30.0):
    ...         model.weight.grad = torch.tensor([[norm]])
    ...         optimizer.step()
    >>> model.weight.grad  # 2 * (0.98 * 0.5 + 0.02 * 0.9)
    tensor([[1.0160]])
    """

    by_parameter: ClassVar[frozenset[str]] = frozenset({"average"})
    ratio: float = 1.05
    beta: float = 0.98
    warmup_steps: int = 100
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        if not number(self.beta) or not 0 <= self.beta < 1:
            raise UsageError(f"AdaGC(beta={self.beta!r}): a number from 0 to below 1 is needed")
        check_positive(self, "ratio")
        check_positive(self, "max_norm")
        check_count(self, "warmup_steps", 1)

    def measures(self) -> tuple[Measure, ...]:
        return (Power(2.0),)

    def logs(self) -> frozenset[str]:
        return frozenset({"grad_norm", "grad_norm_clipped", "clip_ratio", "parameters_clipped"})

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        average = torch.full((len(shards),), torch.inf, dtype=torch.float64, device=device)
        return {"average": average, "count": torch.zeros((), dtype=torch.int64, device=device)}

    def rewrite(self, work: Work) -> None:
        power, average = Power(2.0), work.state["average"]
        each, whole = power.each(work.values[0]), power.norm(work.values[0], dim=0)
        is_warm = work.state["count"] >= self.warmup_steps
        work.state["count"].add_(1)
        factors = torch.where(is_warm, factor_to(self.ratio * average, each), factor_to(self.max_norm, whole))
        scale_each(work, factors)
        clipped = each * factors
        new = torch.where(is_warm, torch.lerp(clipped, average, self.beta), torch.minimum(average, clipped))
        new = torch.where(average.isinf(), clipped, new)  # the first norm of this parameter
        average.copy_(torch.where(each.isfinite() & (each > 0), new, average))
        log_clipped(work, 2.0, whole, clipped.square().sum().sqrt(), factors.amin())
        has_gradient = each > 0
        work.log["parameters_clipped"] = (factors < 1).double().sum() / has_gradient.sum().clamp(min=1)
