"""Clipping by a threshold that is not a constant: by the norms of earlier steps, or by the norms of the weights.

``ClipPercentile`` and ``ClipZScore`` learn a threshold from the norms of earlier steps. ``ClipAdaptive`` takes it from
the norms of the weights. Everything that they learn stays on the device, so the host never waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.rules.base import Rule, State, Work, check_count, check_positive, number
from disthooks.grads.rules.clip import clip_to
from disthooks.grads.rules.history import History
from disthooks.grads.stats.base import Measure, onto, wide
from disthooks.grads.stats.elements import UnitSquares, pieces
from disthooks.grads.stats.norms import Power, norm_label


@register("rule")
@dataclass(frozen=True)
class ClipPercentile(Rule):
    """Clip the norm over all ranks to a percentile of the norms of the last ``window`` steps, this one included.

    This is AutoClip of Seetharaman et al., "AutoClip: Adaptive Gradient Clipping for Source Separation Networks"
    (2020). The percentile is interpolated linearly, as numpy does. The paper keeps the norms of all steps; the authors'
    later package keeps 1000 norms, and so does this rule. The gradients are then multiplied by the formula of
    :class:`~disthooks.ClipNorm`.

    A norm of 0 does not enter the history, because it says nothing about how large gradients are: a batch whose labels
    are all masked has one. A norm that is not finite does not enter it either. Such a norm makes the gradients NaN, as
    :class:`~disthooks.ClipNorm` does, so put :class:`~disthooks.SkipNonFinite` before this rule. The log gets
    ``grad_norm``, ``grad_norm_clipped``, ``clip_ratio`` and ``clip_threshold``. The history is in ``state_dict()`` of
    the attachment.

    Args:
        percentile: from 0 (the smallest norm in the history) to 100 (the largest); the paper uses 10.
        window: how many norms are kept; each takes 8 bytes.
        norm_type: the order of the norm: any number above 0 and up to 6, or ``math.inf``.

    Raises:
        UsageError: when an argument is out of its range.

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

    needs_each: ClassVar[bool] = False
    percentile: float = 10.0
    window: int = 1000
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if not number(self.percentile) or not 0 <= self.percentile <= 100:
            raise UsageError(f"ClipPercentile(percentile={self.percentile!r}): a number from 0 to 100 is needed")
        check_count(self, "window", 1)
        Power(self.norm_type)

    def measures(self) -> tuple[Measure, ...]:
        return (Power(float(self.norm_type)),)

    def logs(self) -> frozenset[str]:
        name = norm_label(self.norm_type)
        return frozenset({name, f"{name}_clipped", "clip_ratio", "clip_threshold"})

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        norms = torch.zeros(self.window, dtype=torch.float64, device=device)
        return {"norms": norms, "count": torch.zeros((), dtype=torch.int64, device=device)}

    def rewrite(self, work: Work) -> None:
        norm, state = Power(float(self.norm_type)).norm(work.values[0], dim=0), work.state
        norms, count, is_valid = state["norms"], state["count"], torch.isfinite(norm) & (norm > 0)
        History.put(norms, count, norm, is_valid)
        # Before the first norm nothing is clipped.
        threshold = torch.where(count > 0, percentile(norms, count, self.percentile), norm)
        clip_to(work, self.norm_type, norm, threshold)
        work.log["clip_threshold"] = threshold


def percentile(numbers: torch.Tensor, count: torch.Tensor, q: float) -> torch.Tensor:
    """The ``q``-th percentile of the first ``count`` of ``numbers``, by linear interpolation; NaN if there are none.

    >>> percentile(torch.tensor([4.0, 1.0, 2.0, 9.0]), torch.tensor(3), 25.0)
    tensor(1.5000)
    """
    there = count.clamp(max=len(numbers))
    places = torch.arange(len(numbers), device=numbers.device)
    # Places that are not filled yet count as infinity, so they come last.
    ranked = torch.where(places < there, numbers, math.inf).sort().values
    at = (there - 1).clamp(min=0).double() * (q / 100)
    low, high = (ranked.gather(0, place.long()[None])[0] for place in (at.floor(), at.ceil()))
    return torch.lerp(low, high, (at - at.floor()).to(numbers.dtype))


@register("rule")
@dataclass(frozen=True)
class ClipZScore(Rule):
    """Clip the norm over all ranks when it is an outlier among those of the steps before it.

    This is ZClip of Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training" (2025), as in the authors'
    code. The first ``warmup_steps`` norms give a mean and a variance. From then on ``z = (norm - mean) / (std + eps)``.
    If ``z > z_thresh``, the norm is clipped by the formula of :class:`~disthooks.ClipNorm`. It is clipped to

    - ``to="adaptive"``: ``mean + z_thresh * std / (z / z_thresh)``, which is lower the larger ``z`` is (their default);
    - ``to="mean"``: ``mean``;
    - ``to="threshold"``: ``mean + z_thresh * std``, whenever the norm is above that (their mode "percentile").

    Then ``mean = alpha * mean + (1 - alpha) * x`` and ``var = alpha * var + (1 - alpha) * (x - mean)**2``, where ``x``
    is the norm after clipping, and ``mean`` in the second formula is the new mean.

    A norm of 0, which says nothing about how large gradients are, does not change mean and variance, and is none of the
    ``warmup_steps``; nor does a norm that is not finite. Such a norm makes the gradients NaN, as
    :class:`~disthooks.ClipNorm` does, so put :class:`~disthooks.SkipNonFinite` before this rule. The log gets
    ``grad_norm``, ``grad_norm_clipped``, ``clip_ratio``, and ``grad_norm_z``, which is 0 during warm-up; and
    ``grad_norm_mean`` and ``grad_norm_std`` of the steps before this one. Mean and variance are in ``state_dict()`` of
    the attachment.

    Args:
        alpha: the share of the old mean and variance that stays in the new ones; at least 0 and below 1.
        z_thresh: norms up to this many standard deviations above the mean are not clipped; positive.
        warmup_steps: how many norms are collected first; only ``max_norm`` clips during these steps. An int of at least
            1.
        eps: added to the standard deviation; positive.
        to: the norm that an outlier is clipped to.
        max_norm: the largest norm in any case; None for no such limit. It does not enter mean and variance.
        norm_type: the order of the norm: any number above 0 and up to 6, or ``math.inf``.

    Raises:
        UsageError: when an argument is out of its range.

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

    needs_each: ClassVar[bool] = False
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
        for name in ("z_thresh", "eps", *([] if self.max_norm is None else ["max_norm"])):
            check_positive(self, name)
        check_count(self, "warmup_steps", 1)
        if self.to not in ("adaptive", "mean", "threshold"):
            raise UsageError(f"ClipZScore(to={self.to!r}): 'adaptive', 'mean' or 'threshold'")
        Power(self.norm_type)

    def measures(self) -> tuple[Measure, ...]:
        return (Power(float(self.norm_type)),)

    def logs(self) -> frozenset[str]:
        name = norm_label(self.norm_type)
        return frozenset({name, "clip_ratio", *(f"{name}_{what}" for what in ("clipped", "mean", "std", "z"))})

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        kinds = {"mean": torch.float64, "variance": torch.float64, "count": torch.int64}
        return {name: torch.zeros((), dtype=dtype, device=device) for name, dtype in kinds.items()}

    def rewrite(self, work: Work) -> None:
        norm, state = Power(float(self.norm_type)).norm(work.values[0], dim=0), work.state
        mean, variance, count = state["mean"], state["variance"], state["count"]
        # Copies, because the state changes below, and the log gets the values before this step.
        mean_before, std_before = mean.clone(), variance.sqrt()
        is_warm, is_valid = count >= self.warmup_steps, torch.isfinite(norm) & (norm > 0)

        # The limit is infinite during warm-up, and for a norm that is no outlier.
        z = (norm - mean_before) / (std_before + self.eps)
        if self.to == "threshold":
            limit = mean_before + self.z_thresh * std_before
            is_outlier = norm > limit
        else:
            adaptive = mean_before + self.z_thresh * std_before / (z / self.z_thresh)
            limit = mean_before if self.to == "mean" else adaptive
            is_outlier = z > self.z_thresh
        limit = torch.where(is_warm & is_outlier, limit, math.inf)

        # The norm after clipping enters mean and variance. During warm-up they are those of all norms, by Welford's
        # formula. After it they are moving averages.
        clipped = torch.minimum(norm, limit)
        share = torch.where(is_warm, 1 - self.alpha, 1 / (count + 1).double())
        new = mean + share * (clipped - mean)
        deviation = torch.where(is_warm, clipped - new, clipped - mean) * (clipped - new)
        variance.copy_(torch.where(is_valid, variance + share * (deviation - variance), variance))
        mean.copy_(torch.where(is_valid, new, mean))
        count.add_(is_valid)

        clip_to(work, self.norm_type, norm, limit if self.max_norm is None else limit.clamp(max=self.max_norm))
        name = norm_label(self.norm_type)
        z = torch.where(is_warm, z, 0.0)
        work.log.update({f"{name}_mean": mean_before, f"{name}_std": std_before, f"{name}_z": z})


@register("rule")
@dataclass(frozen=True)
class ClipAdaptive(Rule):
    """Scale the gradient of each output unit down, so that its norm is at most ``clipping`` times its weights' norm.

    This is adaptive gradient clipping (AGC) of Brock et al., "High-Performance Large-Scale Image Recognition Without
    Normalization" (2021, eq. 3): if ``norm(G_i) / max(norm(W_i), eps) > clipping``, G_i is multiplied by
    ``clipping * max(norm(W_i), eps) / norm(G_i)``. Units are those of timm's ``unitwise_norm``: each row along
    dimension 0 of a weight with two or more dimensions, or the whole of a parameter with fewer. The paper leaves the
    last linear layer out: ``only(lambda name, p: not name.startswith("head."), ClipAdaptive())``.

    A unit with a NaN in its gradient or weights becomes NaN as a whole; other units do not change. If the norm of a
    unit's gradient is infinite, its finite elements become 0 and its infinite elements become NaN. Put
    :class:`~disthooks.SkipNonFinite` before this rule. The log gets ``units_clipped`` (the share of units) and
    ``unit_clip_ratio`` (the smallest factor).

    Each rank gives 16 bytes to the SUM for every unit: 1.6 MB for a vocabulary of 100,000 rows. The bytes grow with the
    rows, not with the elements.

    Args:
        clipping: the largest ratio of the norm of a gradient to the norm of its weights; positive.
        eps: weights with a smaller norm count as having this norm, so that weights of 0 can be trained; positive.

    Raises:
        UsageError: when an argument is not positive and finite, or the engine cannot tell which elements of a
            parameter a rank has.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(2, 2, bias=False)
    >>> _ = torch.nn.init.constant_(model.weight, 3.0)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model.weight.grad = torch.tensor([[3.0, 4.0], [0.01, 0.01]])
    >>> with gradients(model, optimizer, rules=[ClipAdaptive(0.01)]):
    ...     optimizer.step()
    >>> model.weight.grad  # row 0 to 0.01 * norm([3, 3])
    tensor([[0.0255, 0.0339],
            [0.0100, 0.0100]])
    """

    clipping: float = 0.01
    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_positive(self, "clipping")
        check_positive(self, "eps")

    def measures(self) -> tuple[Measure, ...]:
        return UnitSquares("gradient"), UnitSquares("parameter")

    def logs(self) -> frozenset[str]:
        return frozenset({"units_clipped", "unit_clip_ratio"})

    def check(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.part is None:
                raise UsageError(
                    f"ClipAdaptive: the engine does not tell which elements of {shard.name!r} are on this rank, so its "
                    "units are not known; use ClipNorm(by='parameter')"
                )

    def rewrite(self, work: Work) -> None:
        norms, weights = (squares.sqrt() for squares in work.values)
        limits = self.clipping * weights.clamp(min=self.eps)
        below = norms < limits
        factors = torch.where(below, 1.0, limits / norms.clamp(min=1e-6))  # 1e-6 as in timm
        if factors.numel():  # a minimum of no numbers would be an error
            work.log.update(units_clipped=(~below).double().mean(), unit_clip_ratio=factors.amin())
        measure = UnitSquares("gradient")
        split = torch.split(factors, [measure.width(shard) for shard in work.shards])
        for shard, grad, own in zip(work.shards, work.grads, split, strict=True):
            if grad is not None and shard.part is not None:
                own = onto(own, grad.device, wide(grad.dtype))
                for first, piece in pieces(grad, shard.part):  # views, so the gradient is changed in place
                    piece.mul_(own[first : first + len(piece)].view(-1, *[1] * (piece.ndim - 1)))

    def local_error(self) -> str:
        return (
            f"{self!r} compares whole units of the final gradient with their weights, and no rank has all of them "
            "before the reduction; leave at='local' out, or use ClipNorm(by='parameter')"
        )
