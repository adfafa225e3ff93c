"""Rules that keep the optimizer from moving: all parameters for one step, or some parameters for many steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import NonFiniteError
from disthooks.grads.rules.base import Rule, State, Work, check_count
from disthooks.grads.stats.across_ranks import NonFiniteUnreduced
from disthooks.grads.stats.base import Measure
from disthooks.grads.stats.nonfinite import OwnNonFinite
from disthooks.grads.stats.norms import Power


@register("rule")
@dataclass(frozen=True)
class SkipNonFinite(Rule):
    """Leave a step of the optimizer out, on every rank, if any element of a gradient is not finite.

    If several ranks have the same gradient, only one of them looks at it.

    Parameters and the optimizer's state, its count of steps too, stay bit for bit as they were; there is no weight
    decay and no momentum. The gradients themselves do not change. All ranks decide alike, by the norm that
    :class:`~disthooks.ClipNorm` needs too, so both together cost one SUM. A float64 norm that overflows (elements
    above 1e154) counts as not finite.

    This works with any optimizer. Torch's fused optimizers take the decision on the device, once they have their state.
    For any other optimizer the host reads one bool in every step, and waits for the device; a warning says so once.
    The steps that a ``GradScaler`` itself leaves out never reach the rule.

    The log gets ``skipped`` (0 or 1), ``skipped_in_a_row`` and ``skipped_total``; the last two are in ``state_dict()``
    of the attachment. A step that is left out is logged in any case, with its own step, the ranks whose own gradients
    were not finite and the first parameters (:mod:`disthooks.grads.records`).

    Args:
        max_consecutive: the number of skipped steps in a row that is allowed: after one more, the next step raises on
            every rank. None for any number.

    Raises:
        UsageError: when ``max_consecutive`` is neither None nor an int of at least 0.
        NonFiniteError: from ``optimizer.step()``, one step after there were too many.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> before = model.weight.clone()
    >>> with gradients(model, optimizer, rules=[SkipNonFinite()], every=1) as watch:
    ...     model(torch.full((1, 1), float("nan"))).sum().backward()
    ...     optimizer.step()
    >>> torch.equal(model.weight, before), watch.latest["skipped"]
    (True, 1.0)
    """

    rewrites: ClassVar[bool] = False
    skips: ClassVar[bool] = True
    max_consecutive: int | None = None

    def __post_init__(self) -> None:
        if self.max_consecutive is not None:
            check_count(self, "max_consecutive", 0)

    def measures(self) -> tuple[Measure, ...]:
        # The norm sees every element that is reduced. Gradients that no engine reduces may be NaN on one rank alone, so
        # the second measure counts them. The third one tells on which ranks it began.
        return Power(2.0), NonFiniteUnreduced(), OwnNonFinite()

    def logs(self) -> frozenset[str]:
        return frozenset({"skipped", "skipped_in_a_row", "skipped_total"})

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        return {name: torch.zeros((), dtype=torch.int64, device=device) for name in ("in_a_row", "total")}

    def rewrite(self, work: Work) -> None:
        squares, unreduced, _ = work.values
        # See [Note: one decision]: merged numbers are the same bits on every rank, so all ranks skip or none does.
        bad = ~torch.isfinite(squares.sum()) | (unreduced.sum() > 0)
        in_a_row, total = work.state["in_a_row"], work.state["total"]
        in_a_row.add_(1).mul_(bad)
        total.add_(bad)
        work.skips.append(bad)
        work.log.update(skipped=bad.double(), skipped_in_a_row=in_a_row.double(), skipped_total=total.double())
        if self.max_consecutive is not None:
            work.deferred_errors.append(
                (in_a_row.double(), functools.partial(_raise_if_too_many, self.max_consecutive, work.step))
            )

    def local_error(self) -> str:
        return f"{self!r} decides about the optimizer's step, for all ranks alike; leave at='local' out"


def _raise_if_too_many(limit: int, step: int, in_a_row: float) -> None:
    if in_a_row > limit:
        raise NonFiniteError(
            f"gradients were not finite in {in_a_row:.0f} steps in a row, {step - int(in_a_row) + 1} to {step}, and "
            f"SkipNonFinite(max_consecutive={limit}) left them all out: the parameters are as they were before. "
            "The log names the parameters and the ranks where it begins, and so does last_nonfinite of what "
            "gradients() returned; check the data and the loss of these steps, lower the learning rate, or go back to "
            "an earlier checkpoint"
        )
