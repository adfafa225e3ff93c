"""``NoiseScale``, the gradient noise scale: how large a batch is before more examples help little."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Engine, Shard
from disthooks.errors import UsageError
from disthooks.grads.stats.across_ranks import RankNorms
from disthooks.grads.stats.base import Found, Measure, Stat, State, check_own_data
from disthooks.grads.stats.norms import Power


@register("stat")
@dataclass(frozen=True)
class NoiseScale(Stat):
    """The simple noise scale of McCandlish et al. (2018, arXiv:1812.06162, appendix A.1): ``noise_scale``, in examples.

    It is tr(Σ) / |G|²: the variance of one example's gradient over the squared norm of the true gradient. A batch much
    smaller wastes steps, one much larger wastes examples; the paper finds the critical batch size to be about as large.
    From the squared norms of gradients of two batch sizes b < B, which are the micro-batches of single ranks and all of
    them together, unbiased estimates are

        |G|² = (B |G_B|² - b |G_b|²) / (B - b)        tr(Σ) = (|G_b|² - |G_B|²) / (1 / b - 1 / B)

    Both are averaged over logged steps, each with ``decay``, and ``noise_scale`` is the ratio of the averages; it is
    None while the average of |G|² is not positive. Logged too are the averages, ``noise_scale_trace`` and
    ``noise_scale_norm2``. Give small ``every``: one step's estimates are mostly noise. A step with a gradient that is
    not finite is left out of the averages. They are part of ``state_dict()``.

    Right where the final gradient is the mean over ranks of the sum over micro-batches, as DDP and FSDP make it; it
    does not matter whether you divided the loss by their number. Loss scales are taken out.

    Args:
        batch_size: examples (or tokens, or whatever you count in) in one micro-batch of one rank.
        decay: of the averages, from 0 (the last step alone) to below 1.
        per_parameter: also of each parameter, as ``noise_scale/param/<name>`` and so on.

    Raises:
        UsageError: when an argument is none of what it may be; when attached, if ranks share their data (tensor
            parallelism).

    >>> NoiseScale.estimates(small=5.0, large=2.0, b=1.0, B=4.0)  # |G|² = 1, trace 4: 1 + 4 / 1 and 1 + 4 / 4
    (1.0, 4.0)
    """

    batch_size: float = 1
    decay: float = 0.95

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not _number(self.batch_size) or not self.batch_size > 0:
            raise UsageError(f"NoiseScale(batch_size={self.batch_size!r}): a number of examples above 0 is needed")
        if not _number(self.decay) or not 0 <= self.decay < 1:
            raise UsageError(f"NoiseScale(decay={self.decay!r}): a number from 0 to below 1 is needed")

    def check(self, engine: Engine, shards: Sequence[Shard]) -> None:
        """Ranks must have different data."""
        check_own_data(self, engine)

    def start(self, scopes: int) -> State:
        """The averages, and the weight of what is in them."""
        zeros = torch.zeros(scopes, dtype=torch.float64)
        return {"norm2": zeros, "trace": zeros.clone(), "weight": zeros.clone(), "warned": torch.zeros(())}

    def measures(self) -> tuple[Measure, ...]:
        """The ranks' own squared norms, and the final one."""
        return RankNorms(self.per_parameter), Power(2.0)

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """The averages and their ratio; nothing while there is one batch size only."""
        state = self.start(len(found.groups) + 1 + len(found.names) * self.per_parameter) if state is None else state
        own, final = (self.scoped(found, measure) for measure in self.measures())
        ranks, batches, _, squares = own.unbind(-1)
        if not bool((batches > 1).any()):
            _warn(state)
            return {}
        small, large = squares / ranks, final[:, 0]
        norm2, trace = self.estimates(small, large, float(self.batch_size), self.batch_size * batches)
        self._average(state, norm2, trace)
        return self.named(found, _columns(state))

    @staticmethod
    def estimates(small: Any, large: Any, b: Any, B: Any) -> tuple[Any, Any]:
        """|G|² and tr(Σ) from the squared norms of gradients of batches of ``b`` and of ``B`` examples."""
        return (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)

    def _average(self, state: State, norm2: torch.Tensor, trace: torch.Tensor) -> None:
        good = norm2.isfinite() & trace.isfinite()
        for name, value in (("norm2", norm2), ("trace", trace), ("weight", torch.ones_like(norm2))):
            moved = self.decay * state[name] + (1 - self.decay) * value
            state[name].copy_(torch.where(good, moved, state[name]))


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _columns(state: State) -> dict[str, list[Any]]:
    norm2, trace = state["norm2"] / state["weight"], state["trace"] / state["weight"]
    ratio = [t / n if n > 0 else None for n, t in zip(norm2.tolist(), trace.tolist(), strict=True)]
    return {"noise_scale": ratio, "noise_scale_trace": trace.tolist(), "noise_scale_norm2": norm2.tolist()}


def _warn(state: State) -> None:
    if not state["warned"]:
        state["warned"].fill_(1)
        warnings.warn(
            "NoiseScale compares gradients of two batch sizes, and one rank with one micro-batch a step has one only: "
            "nothing is logged of it until there are several ranks, or several backward passes before a step",
            stacklevel=2,
        )
