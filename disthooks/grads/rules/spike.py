"""``SkipSpike``: leave a step out if its loss or the norm of its gradients is far above those of the steps before."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.rules.base import Rule, State, Work, check_count, check_positive
from disthooks.grads.rules.history import History
from disthooks.grads.stats.base import ForwardNeeds, Measure
from disthooks.grads.stats.forward import StepSums
from disthooks.grads.stats.norms import Power


@register("rule")
@dataclass(frozen=True)
class SkipSpike(Rule):
    """Leave a step of the optimizer out, on every rank, if its loss or the norm of its gradients is a spike.

    A number is a spike if it is above ``mean + sigmas * std`` of those of the last ``window`` steps, or not finite. The
    rule is that of OLMo's trainers (OLMo Team, "2 OLMo 2 Furious", 2024), with one difference: a spike enters the
    history as the limit that it exceeds, so one spike does not hide the next, and a loss that stays higher is no spike
    for long. ``std`` is the standard deviation divided by n - 1. In the first ``least`` steps nothing is a spike,
    except a number that is not finite.

    The loss is the mean over the ranks that have one, so all ranks decide alike whichever rank has the spike. Hand it
    in on each rank that has it, after forward: ``watch.note_loss(loss)``. The loss of a model that returns an object
    with ``.loss`` is taken by itself, and so is that of Lightning's callback. A step that is left out changes nothing,
    as with :class:`SkipNonFinite`, and is in the log in any case.

    The log gets ``spike`` (0 or 1), ``spikes_in_a_row``, ``spikes_total``, ``loss``, ``loss_limit``, ``grad_norm`` and
    ``grad_norm_limit``. The history is in ``state_dict()`` of the attachment.

    Args:
        sigmas: how many standard deviations above the mean a number must be; positive.
        window: how many steps the history has; an int of at least 2.
        least: how many steps the history must have, before a number can be a spike; an int of at least 2.
        loss: whether the loss is compared.
        norm: whether the norm of the gradients is compared.
        max_consecutive: the number of skipped steps in a row that is allowed: after one more, the next step raises on
            every rank. None for any number.

    Raises:
        UsageError: when an argument is out of its range; from ``optimizer.step()``, one step after a step in which no
            rank had a loss, and one step after there were too many spikes in a row.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> skipped = []
    >>> with gradients(model, optimizer, rules=[SkipSpike(least=4)], every=1) as watch:
    ...     for loss in (2.0, 2.1, 1.9, 2.0, 9.0):
    ...         watch.note_loss(loss)
    ...         model.weight.grad = torch.ones(1, 1)
    ...         optimizer.step()
    ...         watch.flush()
    ...         skipped.append(watch.latest["spike"])
    >>> skipped
    [0.0, 0.0, 0.0, 0.0, 1.0]
    """

    rewrites: ClassVar[bool] = False
    skips: ClassVar[bool] = True
    needs_each: ClassVar[bool] = False
    sigmas: float = 6.0
    window: int = 128
    least: int = 64
    loss: bool = True
    norm: bool = True
    max_consecutive: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "sigmas")
        check_count(self, "window", 2)
        check_count(self, "least", 2)
        if self.least > self.window:
            raise UsageError(f"SkipSpike: least={self.least} is above window={self.window}: no step could be a spike")
        for name in ("loss", "norm"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"SkipSpike({name}={getattr(self, name)!r}): True or False")
        if not self.loss and not self.norm:
            raise UsageError("SkipSpike(loss=False, norm=False) would compare nothing: give one of them")
        if self.max_consecutive is not None:
            check_count(self, "max_consecutive", 0)

    def forward_needs(self) -> ForwardNeeds:
        return ForwardNeeds(loss="always" if self.loss else False)

    def measures(self) -> tuple[Measure, ...]:
        return (Power(2.0), *([StepSums("loss")] if self.loss else []))

    def logs(self) -> frozenset[str]:
        limits = {f"{name}_limit" for name in self._compared()}
        return frozenset({"spike", "spikes_in_a_row", "spikes_total", *self._compared(), *limits})

    def _compared(self) -> list[str]:
        return ["grad_norm"] * self.norm + ["loss"] * self.loss

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        counts = {name: torch.zeros((), dtype=torch.int64, device=device) for name in ("in_a_row", "total")}
        history = History(self.window, self.least, self.sigmas)
        for name in self._compared():
            counts |= history.start(name, (), device)
        return counts

    def rewrite(self, work: Work) -> None:
        norm = Power(2.0).norm(work.values[0], dim=0)
        # A norm of 0 is no spike, and says nothing about how large gradients are.
        numbers = {"grad_norm": (norm, norm != 0)} if self.norm else {}
        if self.loss:
            total, ranks = work.values[1]
            numbers["loss"] = total / ranks, ranks > 0
            work.deferred_errors.append((ranks, _raise_if_no_loss))
        spike, history = torch.zeros_like(norm, dtype=torch.bool), History(self.window, self.least, self.sigmas)
        for name, (number, is_there) in numbers.items():
            limit = history.limit(work.state, name)
            spike = spike | (is_there & ~(number.isfinite() & (number <= limit)))
            # A spike enters as the limit that it exceeds.
            history.push(work.state, name, torch.minimum(number, limit), is_there & number.isfinite())
            work.log.update({name: number, f"{name}_limit": limit})
        in_a_row, total_spikes = work.state["in_a_row"], work.state["total"]
        in_a_row.add_(1).mul_(spike)
        total_spikes.add_(spike)
        counts = {"spike": spike, "spikes_in_a_row": in_a_row, "spikes_total": total_spikes}
        work.log.update({name: value.double() for name, value in counts.items()})
        work.skips.append(spike)
        work.events.append((spike, dict(work.log)))
        if self.max_consecutive is not None:
            check = functools.partial(_raise_if_too_many, self.max_consecutive, work.step)
            work.deferred_errors.append((work.log["spikes_in_a_row"], check))

    def local_error(self) -> str:
        return f"{self!r} decides about the optimizer's step, for all ranks alike; leave at='local' out"


def _raise_if_no_loss(ranks: float) -> None:
    if not ranks:
        raise UsageError(
            "SkipSpike compares the loss of each step, and no rank had one: call disthooks.note_loss(loss) after "
            "forward on each rank that has a loss, or give SkipSpike(loss=False) to compare the norm alone"
        )


def _raise_if_too_many(limit: int, step: int, in_a_row: float) -> None:
    if in_a_row > limit:
        raise UsageError(
            f"the loss or the norm was a spike in {in_a_row:.0f} steps in a row, {step - int(in_a_row) + 1} to "
            f"{step}, and SkipSpike(max_consecutive={limit}) left them all out: the parameters are as they were "
            "before. Look at the batches of these steps, lower the learning rate, or go back to an earlier checkpoint"
        )
