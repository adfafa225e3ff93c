"""Statistics of forwards: ``Activations`` of the modules' outputs, ``Loss``, and ``Times`` of the ranks.

Their numbers come from hooks on modules (forward_hooks.py), and are merged in the same two collectives as those of
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from disthooks._match import Pattern, as_patterns
from disthooks._registry import register
from disthooks.grads.collectives import NO_NUMBER, from_sortable, rank_of, to_sortable, with_rank
from disthooks.grads.stats.base import (
    MOST_RANKS,
    PHASES,
    ForwardFacts,
    ForwardNeeds,
    Found,
    Local,
    LocalFact,
    Measure,
    Merge,
    Per,
    Stat,
    State,
    of_ranks,
    on_this_rank,
    refuse_per_parameter,
)


def _forward(local: Local) -> ForwardFacts:
    assert local.forward is not None
    return local.forward


def _rms(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 1] / outputs[:, 0]).sqrt()


@dataclass(frozen=True)
class OutputSums(Measure):
    """For each module seven sums over the ranks.

    They are the sums of: elements of the outputs, squares, zeros, elements that are not finite; the root mean square on
    each rank; 1 for each rank that has any; and tensors that could not be read.
    """

    merge: ClassVar[Merge] = "sum"
    per: ClassVar[Per] = "module"

    def width(self, shard: Any) -> int:
        return 7

    def local(self, local: Local) -> torch.Tensor:
        outputs = _forward(local).outputs
        has_any = outputs[:, 0] > 0
        own = torch.where(has_any, _rms(outputs), 0.0)
        return torch.cat([outputs[:, :4], own[:, None], has_any.double()[:, None], outputs[:, 5:]], dim=1).flatten()


@dataclass(frozen=True)
class OutputExtremes(Measure):
    """For each module four keys: of the largest magnitude, of the largest root mean square, and of both ranks."""

    merge: ClassVar[Merge] = "max"
    per: ClassVar[Per] = "module"

    def width(self, shard: Any) -> int:
        return 4

    def local(self, local: Local) -> torch.Tensor:
        outputs = _forward(local).outputs
        largest, own = outputs[:, 4], _rms(outputs)
        place = local.position
        keys = [to_sortable(largest), to_sortable(own), with_rank(largest, place), with_rank(own, place)]
        return torch.where(outputs[:, :1] > 0, torch.stack(keys, dim=1), NO_NUMBER).flatten()


@register("stat")
@dataclass(frozen=True)
class Activations(Stat):
    """The outputs of modules in forward: root mean square, largest magnitude, share of zeros, elements not finite.

    For all outputs together the log gets ``activation_rms``, ``activation_max``, ``activation_zeros`` (a share from 0
    to 1) and ``activation_nonfinite`` (a count), and for each module the same as ``activation_rms/module/<name>`` and
    so on. Zeros are counted in the outputs of modules without parameters, as activation functions are. With several
    ranks the log also gets the rank with the largest root mean square, ``activation_rms/argmax_rank``, that root mean
    square, ``activation_rms/max_rank``, the mean over the ranks, ``activation_rms/mean_rank``, and the rank with the
    largest magnitude, ``activation_max/argmax_rank``. The root mean square is the norm divided by the root of the
    number of elements, so it depends neither on the size of the batch nor on how many ranks have parts of it. Forwards
    without gradients do not count. A module that torch.compile runs without Python has no numbers. Of a sparse or
    nested output the elements that it has in memory count. Outputs that cannot be read (mkldnn, some subclasses of
    Tensor) are counted as ``activation_unread``, if there are any, and a warning names each such module.

    Args:
        modules: a pattern of names of modules, or several; without it all modules that have no modules inside, except
            dropout and ``Identity``.

    Raises:
        MatchError: when attached, if a pattern matches no module.

    >>> from disthooks import gradients
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.ReLU())
    >>> _ = model[0].weight.data.fill_(-1.0)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, stats=[Activations()]) as watch:
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...     optimizer.step()
    >>> watch.latest["activation_rms/module/0"], watch.latest["activation_zeros/module/1"]
    (7.0, 1.0)
    """

    modules: Pattern | Iterable[Pattern] = ()

    alone: ClassVar[bool] = True
    why_empty: ClassVar[str] = (
        "no output was read: the loop calls no module of the model with gradients on, or their outputs are empty, or "
        "torch.compile runs them without Python"
    )

    def __post_init__(self) -> None:
        refuse_per_parameter(self)
        object.__setattr__(self, "modules", as_patterns(self.modules) if self.modules else ())

    def forward_needs(self) -> ForwardNeeds:
        return ForwardNeeds(modules=tuple(self.modules), facts=True)  # type: ignore[arg-type]

    def measures(self) -> tuple[Measure, ...]:
        return OutputSums(), OutputExtremes()

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        sums, keys = found.rows[OutputSums()], found.rows[OutputExtremes()]
        if not float(sums[:, 0].sum()):
            return {"activation_unread": float(sums[:, 6].sum())} if sums[:, 6].any() else {}
        columns = self._columns(torch.cat([sums.sum(0)[None], sums]), torch.cat([keys.amax(0)[None], keys]), found)
        is_counted = ~sums[:, 2].isnan()
        zeros, count = sums[is_counted, 2].sum(), sums[is_counted, 0].sum()
        columns["activation_zeros"][0] = float(zeros / count) if count else None
        # The mean over ranks of all outputs is not the sum over modules of the means.
        for name in [name for name in columns if name.endswith("_rank")]:
            columns[name][0] = None
        suffixes = ["", *(f"/module/{name}" for name in found.modules)]
        return {
            f"{name}{suffix}": value
            for name, column in columns.items()
            for suffix, value in zip(suffixes, column, strict=True)
            if suffix or value is not None
        }

    def _columns(self, sums: torch.Tensor, keys: torch.Tensor, found: Found) -> dict[str, list[Any]]:
        count, squares, zeros, nonfinite, own, ranks, unread = sums.unbind(-1)
        columns: dict[str, list[Any]] = {
            "activation_rms": (squares / count).sqrt().tolist(),
            "activation_max": from_sortable(keys[:, 0]).tolist(),
            "activation_zeros": [None if share.isnan() else float(share) for share in zeros / count],
            "activation_nonfinite": nonfinite.tolist(),
        }
        if unread.any():
            columns["activation_unread"] = unread.tolist()
        if len(found.ranks) > 1:
            columns["activation_rms/mean_rank"] = (own / ranks).tolist()
            columns["activation_rms/max_rank"] = from_sortable(keys[:, 1]).tolist()
            for name, column in (("activation_max", 2), ("activation_rms", 3)):
                columns[f"{name}/argmax_rank"] = [found.global_rank(p) for p in rank_of(keys[:, column]).tolist()]
        return columns


@dataclass(frozen=True)
class _OwnNumbers(Measure):
    """Numbers of the step on this rank: the loss, or the seconds of each phase.

    Attributes:
        of: which of the two.
    """

    of: Literal["loss", "times"]

    per: ClassVar[Per] = "step"

    @property
    def local_facts(self) -> frozenset[LocalFact]:  # type: ignore[override]
        return frozenset({"time"} if self.of == "times" else ())

    def width(self, shard: Any) -> int:
        return 2 * (len(PHASES) if self.of == "times" else 1)

    def numbers(self, local: Local) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers, and for each whether this rank has it."""
        facts = _forward(local)
        if self.of == "times":
            return facts.seconds, (facts.seconds.sum() > 0).expand_as(facts.seconds)
        total, count = facts.loss[:1], facts.loss[1:]
        return total / count.clamp(min=1), count > 0


@dataclass(frozen=True)
class StepSums(_OwnNumbers):
    """For each number its sum over the ranks, and how many ranks have it."""

    merge: ClassVar[Merge] = "sum"

    def local(self, local: Local) -> torch.Tensor:
        numbers, has = self.numbers(local)
        return torch.stack([torch.where(has, numbers, 0.0), has.double()], dim=1).flatten()


@dataclass(frozen=True)
class StepExtremes(_OwnNumbers):
    """For each number two keys: of the largest one, and of the rank that has it."""

    merge: ClassVar[Merge] = "max"

    def local(self, local: Local) -> torch.Tensor:
        numbers, has = self.numbers(local)
        keys = torch.stack([to_sortable(numbers), with_rank(numbers, local.position)], dim=1)
        return torch.where(has[:, None], keys, NO_NUMBER).flatten()


@dataclass(frozen=True)
class StepOfRanks(_OwnNumbers):
    """The numbers of each rank; NaN where a rank has none."""

    merge: ClassVar[Merge] = "sum"

    def width(self, shard: Any) -> int:
        return MOST_RANKS * (len(PHASES) if self.of == "times" else 1)

    def local(self, local: Local) -> torch.Tensor:
        numbers, has = self.numbers(local)
        return on_this_rank(torch.where(has, numbers, math.nan).double(), local)


class _OfStep(Stat):
    """Numbers of the step: the mean over the ranks, the largest, whose it is, and that of each rank."""

    alone: ClassVar[bool] = True
    about: ClassVar[Literal["loss", "times"]]
    names: ClassVar[Sequence[str]]

    def __post_init__(self) -> None:
        refuse_per_parameter(self)

    def measures(self) -> tuple[Measure, ...]:
        return StepSums(self.about), StepExtremes(self.about), StepOfRanks(self.about)

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        sums, keys, each = (found.rows[measure].view(len(self.names), -1) for measure in self.measures())
        recorded: dict[str, Any] = {}
        rows = zip(self.names, sums.tolist(), keys, each.tolist(), strict=True)
        for name, (total, ranks), (largest, rank), numbers in rows:
            if ranks:
                recorded[name] = total / ranks
            if ranks and len(found.ranks) > 1:
                recorded[f"{name}/max_rank"] = float(from_sortable(largest))
                recorded[f"{name}/argmax_rank"] = found.global_rank(int(rank_of(rank)))
                recorded |= of_ranks(name, numbers, found.ranks)
        return recorded


@register("stat")
@dataclass(frozen=True)
class Loss(_OfStep):
    """The loss: ``loss`` is the mean over ranks of the mean of each rank's micro-batches.

    With several ranks the log also gets the largest mean of a rank, ``loss/max_rank``, and whose it is,
    ``loss/argmax_rank``; with at most 16 ranks the mean of each, ``loss/of_ranks``. The loss is the ``loss`` of what
    the model returns, if it has one, as models of transformers do. Otherwise hand it in after each forward, on every
    rank: ``watch.note_loss(loss)``. It may be a tensor on the device: nothing waits for it.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, stats=[Loss()]) as watch:
    ...     watch.note_loss(torch.tensor(0.5))
    ...     optimizer.step()
    >>> watch.latest["loss"]
    0.5
    """

    about: ClassVar[Literal["loss", "times"]] = "loss"
    why_empty: ClassVar[str] = (
        "no rank had a loss: call disthooks.note_loss(loss) after each forward, on every rank, or let the model "
        "return an object with .loss"
    )
    names: ClassVar[Sequence[str]] = ("loss",)

    def forward_needs(self) -> ForwardNeeds:
        return ForwardNeeds(loss=True)


@register("stat")
@dataclass(frozen=True)
class Times(_OfStep):
    """The seconds that a rank takes while it waits for no other rank, in the three phases of a step.

    ``input_seconds`` is from the end of a step to the next forward, ``forward_seconds`` is from there to the end of
    forward, and ``backward_seconds`` is from there to the last gradient before its reduction. Each is the mean over the
    ranks; with several ranks the log also gets the most seconds of a rank, ``input_seconds/max_rank``, and whose they
    are, ``input_seconds/argmax_rank``; with at most 16 ranks those of each, ``input_seconds/of_ranks``. The clock is
    the host's: on an accelerator forward and backward are the times in which work is queued.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, stats=[Times()]) as watch:
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     optimizer.step()
    >>> watch.latest["forward_seconds"] > 0
    True
    """

    about: ClassVar[Literal["loss", "times"]] = "times"
    names: ClassVar[Sequence[str]] = tuple(f"{phase}_seconds" for phase in PHASES)

    def forward_needs(self) -> ForwardNeeds:
        return ForwardNeeds(times=True)
