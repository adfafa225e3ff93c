"""Clipping the norm to what earlier norms were like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from disthooks.engines.shard import Shard
from disthooks.errors import UsageError
from disthooks.grads.measures.base import Measure
from disthooks.grads.measures.power import Power, norm_label
from disthooks.grads.rules.base import Rule, State, Work, number
from disthooks.grads.rules.clip import clip_to


@dataclass(frozen=True)
class ClipPercentile(Rule):
    """Clip the norm over all ranks to a percentile of the norms of the last ``window`` steps, this one included.

    AutoClip of Seetharaman et al., "AutoClip: Adaptive Gradient Clipping for Source Separation Networks" (2020); the
    percentile is interpolated linearly, as numpy's. The paper keeps the norms of all steps; its later package keeps
    1000, and so does this. The gradients are then multiplied by the formula of :class:`~disthooks.ClipNorm`.

    A norm that is not finite does not enter the history; it makes the gradients NaN as :class:`~disthooks.ClipNorm`
    does, so put :class:`~disthooks.SkipNonFinite` before it. Logged are ``grad_norm``, ``grad_norm_clipped``,
    ``clip_ratio`` and ``clip_threshold``. The history is in ``state_dict()`` of the attachment.

    Args:
        percentile: from 0 (the smallest norm so far) to 100; the paper uses 10.
        window: how many norms are kept, 8 bytes each.
        norm_type: any number above 0 and up to 16, or ``math.inf``.

    Raises:
        UsageError: when an argument is none of what it may be.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    >>> with gradients(model, optimizer, rules=[ClipPercentile(50.0)], every=1) as watch:
    ...     for norm in (1.0, 5.0, 30.0):
    ...         model.weight.grad = torch.tensor([[norm]])
    ...         optimizer.step()
    >>> watch.latest["clip_threshold"], model.weight.grad
    (5.0, tensor([[5.0000]]))
    """

    percentile: float = 10.0
    window: int = 1000
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if not number(self.percentile) or not 0 <= self.percentile <= 100:
            raise UsageError(f"ClipPercentile(percentile={self.percentile!r}): a number from 0 to 100 is needed")
        _check_count("ClipPercentile", "window", self.window)
        Power(self.norm_type)

    def measures(self) -> tuple[Measure, ...]:
        """The sum of powers of every parameter."""
        return (Power(float(self.norm_type)),)

    def logs(self) -> frozenset[str]:
        """The norm before and after, the factor and the threshold."""
        name = norm_label(self.norm_type)
        return frozenset({name, f"{name}_clipped", "clip_ratio", "clip_threshold"})

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        """No norms yet."""
        norms = torch.zeros(self.window, dtype=torch.float64, device=device)
        return {"norms": norms, "count": torch.zeros((), dtype=torch.int64, device=device)}

    def rewrite(self, work: Work) -> None:
        """Remember the norm, then clip it."""
        norm, state = Power(float(self.norm_type)).norm(work.values[0], dim=0), work.state
        norms, count, finite = state["norms"], state["count"], torch.isfinite(norm)
        here = torch.arange(self.window, device=norms.device) == count % self.window
        norms.copy_(torch.where(here & finite, norm, norms))
        count.add_(finite)
        threshold = percentile(norms, count, self.percentile)
        clip_to(work, self.norm_type, norm, threshold)
        work.log["clip_threshold"] = threshold


def percentile(numbers: torch.Tensor, count: torch.Tensor, q: float) -> torch.Tensor:
    """The ``q``-th percentile of the first ``count`` of ``numbers``, by linear interpolation; NaN if there are none.

    >>> percentile(torch.tensor([4.0, 1.0, 2.0, 9.0]), torch.tensor(3), 25.0)
    tensor(1.5000)
    """
    there = count.clamp(max=len(numbers))
    places = torch.arange(len(numbers), device=numbers.device)
    ranked = torch.where(places < there, numbers, math.inf).sort().values
    at = (there - 1).clamp(min=0).double() * (q / 100)
    low, high = (ranked.gather(0, place.long()[None])[0] for place in (at.floor(), at.ceil()))
    return torch.lerp(low, high, (at - at.floor()).to(numbers.dtype))


@dataclass(frozen=True)
class ClipZScore(Rule):
    """Clip the norm over all ranks when it is an outlier among those of the steps before it.

    ZClip of Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training" (2025), as the authors' code has
    it. The first ``warmup_steps`` norms give a mean and a variance. From then on ``z = (norm - mean) / (std + eps)``;
    where ``z > z_thresh`` the norm is clipped, by the formula of :class:`~disthooks.ClipNorm`, to

    - ``to="adaptive"``: ``mean + z_thresh * std / (z / z_thresh)``, the harder the further out (their default);
    - ``to="mean"``: ``mean``;
    - ``to="threshold"``: ``mean + z_thresh * std``, whenever the norm is above that (their mode "percentile").

    Then ``mean = alpha * mean + (1 - alpha) * x`` and ``var = alpha * var + (1 - alpha) * (x - mean)**2``, where x is
    what the norm was clipped to, and ``mean`` the new one.

    A norm that is not finite changes neither; it makes the gradients NaN as :class:`~disthooks.ClipNorm` does, so put
    :class:`~disthooks.SkipNonFinite` before it. Logged are ``grad_norm``, ``grad_norm_clipped``, ``clip_ratio`` and,
    of the steps before, ``grad_norm_mean`` and ``grad_norm_std``; ``grad_norm_z`` is 0 during warm-up. What was
    learned is in ``state_dict()`` of the attachment.

    Args:
        alpha: how much of the old mean and variance stays; at least 0 and below 1.
        z_thresh: how many standard deviations are not clipped; positive.
        warmup_steps: how many norms are collected first; only ``max_norm`` clips then.
        eps: added to the standard deviation.
        to: what an outlier is clipped to.
        max_norm: the largest norm in any case; None for no such limit. It does not enter mean and variance.
        norm_type: any number above 0 and up to 16, or ``math.inf``.

    Raises:
        UsageError: when an argument is none of what it may be.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    >>> with gradients(model, optimizer, rules=[ClipZScore(warmup_steps=2, to="mean")]):
    ...     for norm in (1.0, 3.0, 100.0):
    ...         model.weight.grad = torch.tensor([[norm]])
    ...         optimizer.step()
    >>> model.weight.grad
    tensor([[2.]])
    """

    alpha: float = 0.97
    z_thresh: float = 2.5
    warmup_steps: int = 25
    eps: float = 1e-6
    to: Literal["adaptive", "mean", "threshold"] = "adaptive"
    max_norm: float | None = None
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if not number(self.alpha) or not 0 <= self.alpha < 1:
            raise UsageError(f"ClipZScore(alpha={self.alpha!r}): a number from 0 to below 1 is needed")
        limit = () if self.max_norm is None else (("max_norm", self.max_norm),)
        for name, value in (("z_thresh", self.z_thresh), ("eps", self.eps), *limit):
            if not number(value) or value <= 0:
                raise UsageError(f"ClipZScore({name}={value!r}): a positive, finite number is needed")
        _check_count("ClipZScore", "warmup_steps", self.warmup_steps)
        if self.to not in ("adaptive", "mean", "threshold"):
            raise UsageError(f"ClipZScore(to={self.to!r}): 'adaptive', 'mean' or 'threshold'")
        Power(self.norm_type)

    def measures(self) -> tuple[Measure, ...]:
        """The sum of powers of every parameter."""
        return (Power(float(self.norm_type)),)

    def logs(self) -> frozenset[str]:
        """The norm before and after, the factor, and what is known of earlier norms."""
        name = norm_label(self.norm_type)
        return frozenset({name, "clip_ratio", *(f"{name}_{what}" for what in ("clipped", "mean", "std", "z"))})

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        """No norms yet."""
        kinds = {"mean": torch.float64, "variance": torch.float64, "count": torch.int64}
        return {name: torch.zeros((), dtype=dtype, device=device) for name, dtype in kinds.items()}

    def rewrite(self, work: Work) -> None:
        """Compare the norm with those before it, clip it, and remember what it became."""
        norm, state = Power(float(self.norm_type)).norm(work.values[0], dim=0), work.state
        mean, std, warm = state["mean"].clone(), state["variance"].sqrt(), state["count"] >= self.warmup_steps
        z = (norm - mean) / (std + self.eps)
        limit = torch.where(warm, self._limit(norm, mean, std, z), math.inf)
        self._remember(state, torch.minimum(norm, limit), warm, torch.isfinite(norm))
        clip_to(work, self.norm_type, norm, limit if self.max_norm is None else limit.clamp(max=self.max_norm))
        name = norm_label(self.norm_type)
        z = torch.where(warm, z, 0.0)
        work.log.update({f"{name}_mean": mean, f"{name}_std": std, f"{name}_z": z})

    def _limit(self, norm: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """What the norm is to be clipped to; infinity when it is none too large."""
        if self.to == "threshold":
            limit = mean + self.z_thresh * std
            return torch.where(norm > limit, limit, math.inf)
        limit = mean if self.to == "mean" else mean + self.z_thresh * std / (z / self.z_thresh)
        return torch.where(z > self.z_thresh, limit, math.inf)

    def _remember(self, state: State, norm: torch.Tensor, warm: torch.Tensor, finite: torch.Tensor) -> None:
        """During warm-up the mean and variance of all norms (Welford's), then those that move."""
        mean, variance, count = state["mean"], state["variance"], state["count"]
        share = torch.where(warm, 1 - self.alpha, 1 / (count + 1).double())
        new = mean + share * (norm - mean)
        deviation = torch.where(warm, norm - new, norm - mean) * (norm - new)
        variance.copy_(torch.where(finite, variance + share * (deviation - variance), variance))
        mean.copy_(torch.where(finite, new, mean))
        count.add_(finite)


def _check_count(rule: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{rule}({name}={value!r}): an int of at least 1 is needed")
