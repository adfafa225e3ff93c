"""``events``: what jumped in a run, of which layer and rank, and in which step."""

# [Note: what jumped]
# The numbers of a healthy run vary by factors: a gradient of 2 in a run of gradients of 1 is as unusual as one of 0.002
# in a run of 0.001. So logarithms are compared, in decades. The usual value is the median of the 64 logged steps
# before, and the usual deviation is 1.48 times the median of the distances from it, which for normal numbers is the
# standard deviation; neither is moved by a spike. A number has jumped if it is further above the usual value than a
# limit, and than so many usual deviations. Both are far above what healthy trainings show; benchmarks/faults.py counts
# their false alarms. The first 12 steps are compared with nothing, because norms of a new model fall fast.
#
# [Note: the batch moves all gradients]
# A batch that is harder than others makes all gradients larger, by a factor of 5 at times, while the loss hardly moves.
# A fault in one product or one gradient moves some of them. So a gradient is compared with the gradients behind it in
# the model, which backward computes first: its distance is what is left of it without theirs.
#
# The loss of a rank is compared with that of the other ranks in the same step, for the same reason.
#
# [Note: what came first]
# Within a step causes come before effects: outputs of modules in the order in which forward called them, then the loss,
# then gradients from the last parameter to the first, then updates. The order of calls is in the log, because a model
# may register its modules in another one.

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from disthooks.report.log import Run

_WINDOW = 64  # see [Note: what jumped]
BLOCK = 4  # steps that are compared with the same usual value; the window and the warm-up are multiples of it
WARM_UP = 12
_LEAST = 0.02  # a deviation in decades counts as at least this much
_TINY = 1e-45


class Signal(NamedTuple):
    """A statistic whose jumps are looked for.

    Attributes:
        of: "param", "module", or "" for a number of the step.
        rank: the name of the rank that has it; "" if nobody knows.
        limit: how many decades above the usual value a number must be.
        deviations: how many usual deviations above it, too.
    """

    of: str
    name: str
    rank: str
    limit: float
    deviations: float


#: In the order of [Note: what came first]. Of several in one row the first that is logged is looked at: the largest
#: number of a rank tells more than that of all ranks, and the largest element more than a norm.
SIGNALS: tuple[tuple[Signal, ...], ...] = (
    (Signal("module", "activation_max", "activation_max/argmax_rank", 0.6, 6.0),),
    (
        Signal("module", "activation_rms/max_rank", "activation_rms/argmax_rank", 0.7, 8.0),
        Signal("module", "activation_rms", "", 0.7, 8.0),
    ),
    (Signal("", "loss/max_rank", "loss/argmax_rank", 0.158, 7.6),),
    (Signal("", "loss", "", 0.12, 6.0),),
    (
        Signal("param", "grad_max_abs/max_rank", "grad_max_abs/argmax_rank", 0.9, 7.0),
        Signal("param", "grad_norm/max_rank", "grad_norm/argmax_rank", 0.7, 8.0),
        Signal("param", "grad_norm", "", 0.7, 8.0),
    ),
    (Signal("param", "update_ratio", "update_norm/lead_rank", 0.6, 8.0),),
    (Signal("", "grad_norm/max_rank", "grad_norm/argmax_rank", 1.2, 10.0), Signal("", "grad_norm", "", 1.2, 10.0)),
    # The largest norm of the steps since the record before: it has a step of its own.
    (Signal("", "grad_norm/peak", "grad_norm/peak_rank", 1.0, 10.0),),
)


class Event(NamedTuple):
    """A number that jumped.

    Attributes:
        at: the place of the step among the records.
        place: the place of the parameter or module among their names; -1 for a number of the step.
        usual: the median of the steps before.
        first: the first step in which that can have begun.
        step: the step of the number.
    """

    at: int
    signal: Signal
    place: int
    value: float
    usual: float
    rank: int | None
    first: int
    step: int

    @property
    def factor(self) -> float:
        return self.value / self.usual if self.usual else math.inf


class Scores:
    """How unusual the numbers of a statistic are. See [Note: what jumped].

    A block is four steps, which have one usual value. It is compared when it is asked for: most blocks are not, since
    nothing in them is far above the smallest number of the steps before.

    Args:
        values: the numbers, of shape (steps, columns); those that are not finite are left out, and said elsewhere.
        order: for gradients the parameters in the order in which forward came to them: then a number is compared
            without what those behind it do. See [Note: the batch moves all gradients].

    >>> list(Scores(torch.tensor([1.0, 1.1, 0.9] * 10 + [50.0])[:, None]).jumps(0.7, 8.0))
    [(30, 0, 1.0)]
    """

    def __init__(self, values: torch.Tensor, order: Sequence[int] = ()) -> None:
        logs = values.double().clamp(min=_TINY).log10_()
        self._logs = logs.masked_fill_(~logs.isfinite(), math.nan)
        self._order = list(order)
        self._usual: dict[int, torch.Tensor] = {}  # by the first step of a block
        self._distance: dict[int, torch.Tensor] = {}

    def jumps(self, limit: float, deviations: float) -> Iterator[tuple[int, int, float]]:
        """The step and the column of each number that has jumped, and its usual value."""
        lowest, highest = (
            torch.stack([(sign * part.nan_to_num(sign * math.inf)).amin(0) for part in torch.split(self._logs, BLOCK)])
            for sign in (1.0, -1.0)
        )
        for at in range(WARM_UP // BLOCK, len(lowest)):
            if not bool((-highest[at] - lowest[max(0, at - _WINDOW // BLOCK) : at].amin(0) > limit).any()):
                continue
            begin = at * BLOCK
            distance = self.distance(begin)
            columns = (distance > limit).any(0).nonzero().flatten()
            if not len(columns):
                continue
            is_jump = (distance[:, columns] > limit) & (self.deviations(begin, columns) > deviations)
            for row, place in is_jump.nonzero().tolist():
                column = int(columns[place])
                yield begin + row, column, float(10 ** self._usual[begin][column])

    def distance(self, begin: int) -> torch.Tensor:
        """How many decades the numbers of the block that begins with this step are above the usual value."""
        if begin not in self._distance:
            window, block = self._logs[max(0, begin - _WINDOW) : begin], self._logs[begin : begin + BLOCK]
            is_known = window.isfinite().sum(0) >= WARM_UP
            usual = window.nanmedian(0).values if begin else block[0]
            self._usual[begin] = torch.where(is_known, usual, math.nan)
            distance = block - self._usual[begin]
            self._distance[begin] = self._without_those_behind(distance) if self._order else distance
        return self._distance[begin]

    def last(self, steps: int) -> torch.Tensor:
        many = len(self._logs)
        begins = range(max(0, many - steps) // BLOCK * BLOCK, many, BLOCK)
        return torch.cat([self.distance(begin) for begin in begins])[-steps:]

    def deviations(self, begin: int, columns: torch.Tensor) -> torch.Tensor:
        """The distances of some columns of a block in usual deviations."""
        first = max(0, begin - _WINDOW)
        if self._order:
            window = torch.cat([self.distance(at)[:, columns] for at in range(first, begin, BLOCK)])
            block = self.distance(begin)[:, columns]
        else:
            window, block = (self._logs[a:b, columns] for a, b in ((first, begin), (begin, begin + BLOCK)))
        is_known, median = window.isfinite().sum(0) >= WARM_UP, window.nanmedian(0).values
        deviation = 1.4826 * (window - median).abs().nanmedian(0).values
        return torch.where(is_known, block - median, math.nan) / deviation.clamp(min=_LEAST)

    def _without_those_behind(self, found: torch.Tensor) -> torch.Tensor:
        distance = found[:, self._order].nan_to_num(0.0)
        many = distance.shape[1]
        total = distance.flip(1).cumsum(1).flip(1)
        # The mean of those behind; of the last one, the mean of all others.
        behind = (total - distance) / torch.arange(many - 1, -1, -1).clamp(min=1)
        behind[:, -1:] = (total[:, :1] - distance[:, -1:]) / max(many - 1, 1)
        common = torch.empty_like(behind)
        common[:, self._order] = behind.clamp(min=0.0)
        return found - common


def values_of(run: Run, of: str, name: str) -> torch.Tensor | None:
    """The numbers of a statistic: float64, of shape (steps, names); NaN where there is none; None if not logged."""
    if of:
        table = run.columns.get((of, name))
        return table.values() if table is not None and table.names else None
    column = [math.nan if value is None else value for value in run.column(name)]
    return None if all(map(math.isnan, column)) else torch.tensor(column, dtype=torch.float64)[:, None]


@functools.lru_cache(maxsize=2)
def events(run: Run) -> list[Event]:
    """What jumped, in the order of steps, and within a step causes before effects. See [Note: what came first]."""
    found: list[tuple[int, int, int, Event]] = []
    for order, signals in enumerate(SIGNALS):
        signal = next((each for each in signals if values_of(run, each.of, each.name) is not None), None)
        if signal is None:
            continue
        when = {place: at for at, place in enumerate(run.order.get(signal.of, ()))}
        for event in _of_signal(run, signal):
            at = when.get(event.place, 0)
            found.append((event.at, order, -at if signal.of == "param" else at, event))
    return [event for *_, event in sorted(found, key=lambda each: each[:3])]


def _of_signal(run: Run, signal: Signal) -> Iterator[Event]:
    values = values_of(run, signal.of, signal.name)
    assert values is not None
    is_grad = signal.of == "param" and signal.name.startswith("grad")
    others = others_of(run, "loss") if signal.name == "loss/max_rank" else None
    found = Scores(values if others is None else values / others, run.order["param"] if is_grad else ())
    peaks = run.labels(f"{signal.name}_step") if signal.name.endswith("/peak") else None
    has_ranks = bool(signal.rank) and (run.ranks or 2) > 1
    ranks = values_of(run, signal.of, signal.rank) if has_ranks else None
    for at, place, usual in found.jumps(signal.limit, signal.deviations):
        rank = math.nan if ranks is None else float(ranks[at, place])
        known = int(rank) if math.isfinite(rank) else None
        where = place if signal.of else -1
        first, step = (begun(run, values, at), run.steps[at]) if peaks is None else (peaks[at], peaks[at])
        usual = usual if others is None else float(others[at])
        yield Event(at, signal, where, float(values[at, place]), usual, known, first, step)


def begun(run: Run, values: torch.Tensor, at: int) -> int:
    """The first step in which what record ``at`` shows can have begun: the one after the last number before."""
    known = (~values[:at].isnan()).any(1).nonzero()
    return run.steps[int(known[-1])] + 1 if len(known) else run.steps[at]


def others_of(run: Run, name: str, place: int | None = None, of: str = "param") -> torch.Tensor:
    """The mean over the ranks that do not have the largest number: float64, of shape (steps, 1); NaN if not known."""
    of = "" if place is None else of
    most, mean = values_of(run, of, f"{name}/max_rank"), values_of(run, of, f"{name}/mean_rank")
    mean = values_of(run, of, name) if mean is None else mean
    if most is None or mean is None:
        return torch.full((len(run.records), 1), math.nan, dtype=torch.float64)
    at = 0 if place is None else place
    ranks = max(2, run.ranks or 2)
    others: torch.Tensor = ((mean[:, [at]] * ranks - most[:, [at]]) / (ranks - 1)).clamp(min=0.0)
    return others


def stops(values: torch.Tensor, at_most: float = 0.0) -> list[tuple[int, int]]:
    """Where a column of positive numbers becomes ``at_most`` or less and stays so: the step and the column.

    >>> stops(torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]))
    [(1, 1)]
    """
    if len(values) < 2:
        return []
    is_gone = values <= at_most
    stays = torch.cat([is_gone[:-1] & is_gone[1:], is_gone[-1:]])
    begins = stays[1:] & ~is_gone[:-1] & ~values[:-1].isnan()
    return sorted((at + 1, place) for at, place in begins.nonzero().tolist())
