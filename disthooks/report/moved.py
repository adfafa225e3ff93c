"""``events``: what jumped in a run, of which layer and rank, and in which step."""

# [Note: what jumped]
# The numbers of a healthy run vary by factors: a gradient of 2 in a run of gradients of 1 is as unusual as one of 0.002
# in a run of 0.001. So logarithms are compared, in decades. The usual value is the median of the 64 logged steps
# before, and the usual deviation is 1.48 times the median of the distances from it, which for normal numbers is the
# standard deviation; neither is moved by a spike. A zero counts as no number, and so does an update without a gradient.
# A loss that has both signs has no ratio to what is usual, so it is compared as it is. A number has jumped if
#
# - it is further above the usual value than a limit, and than so many usual deviations;
# - it is twice as far above it as every number of those steps that did not jump itself, those of the warm-up aside;
# - less than one step in 100,000 of independent normal numbers has such a one. The limit is that of Student's t, for
#   as many numbers as are looked at in a step. A deviation by medians has the precision of one by squares of 0.37
#   times as many numbers.
#
# The first 12 steps are compared with nothing, because norms of a new model fall fast. benchmarks/healthy.py and
# benchmarks/faults.py count the false alarms.
#
# [Note: the batch moves all gradients]
# A batch that is harder than others makes all gradients larger, by a factor of 5 at times, while the loss hardly moves.
# A fault in one product or one gradient moves some of them. So a gradient is compared with the gradients behind it in
# the model, which backward computes first: its distance is what is left of it without theirs.
#
# The loss of a rank is compared with that of the other ranks in the same step, for the same reason; it must be above
# what is usual for the largest loss, too, because another loss may be small by chance.
#
# [Note: what came first]
# Within a step causes come before effects: outputs of modules in the order in which forward called them, then the loss,
# then gradients from the last parameter to the first, then updates. The order of calls is in the log, because a model
# may register its modules in another one.

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from disthooks.report.log import Run

_WINDOW = 64  # see [Note: what jumped]
BLOCK = 4  # steps that are compared with the same usual value; the window and the warm-up are multiples of it
WARM_UP = 12
_LEAST = 0.02, 1 / 12  # a deviation counts as at least so many decades, and as this share of the limit
_FALSE = 1e-5  # sentences in a step of independent numbers
_PRECISION = 0.37
_STAYS = 16, 2  # logged steps before a number became zero and after it, of which it is said that it stays so
_OWN = 4.0  # usual deviations that the loss of a rank must be above those of the largest loss


_QUANTITY = {"activation_max": "largest magnitude", "activation_rms": "root mean square"}


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
        least: the smallest number of these steps; NaN if ``usual`` is that of other ranks.
        most: the largest number of these steps that did not jump itself; NaN if ``usual`` is that of other ranks.
        has_ratio: whether all numbers of these steps are there and positive.
        first: the first step in which that can have begun.
        step: the step of the number.
    """

    at: int
    signal: Signal
    place: int
    value: float
    usual: float
    least: float
    most: float
    has_ratio: bool
    rank: int | None
    first: int
    step: int

    @property
    def factor(self) -> float:
        """How many times the usual value, where both are positive."""
        return self.value / self.usual if self.usual > 0 else math.inf

    @property
    def jumped_to(self) -> str:
        """What it became. Of a number that was zero or absent at times, or below 0, the largest before is said."""
        if self.has_ratio:
            return f"{times(self.factor)} its usual {_QUANTITY.get(self.signal.name.partition('/')[0], 'size')}"
        return f"{self.value:.4g}, where it was at most {self.most:.4g}"


class Jump(NamedTuple):
    at: int
    place: int
    usual: float
    least: float
    most: float
    has_ratio: bool


class Scores:
    """How unusual the numbers of a statistic are. See [Note: what jumped].

    A block is four steps, which have one usual value. It is compared when it is asked for: most blocks are not, since
    nothing in them is far above the smallest number of the steps before.

    Args:
        values: the numbers, of shape (steps, columns); those that are not finite are left out, and said elsewhere.
        order: for gradients the parameters in the order in which forward came to them: then a number is compared
            without what those behind it do. See [Note: the batch moves all gradients].
        many: how many numbers of a step are looked at in all.
        has_signs: whether the numbers have no ratio to what is usual; so it is if one of them is below 0.

    >>> list(Scores(torch.tensor([1.0, 1.25, 0.75] * 10 + [50.0])[:, None]).jumps(0.7, 8.0))
    [Jump(at=30, place=0, usual=1.0, least=0.75, most=1.25, has_ratio=True)]
    """

    def __init__(self, values: torch.Tensor, order: Sequence[int] = (), many: int = 1, has_signs: bool = False) -> None:
        self.has_signs = has_signs or bool((values < 0).any())
        self._logs = values.double() if self.has_signs else values.double().log10()
        self._logs = self._logs.masked_fill(~self._logs.isfinite() | (values == 0), math.nan)
        self._order, self._least = list(order), _LEAST[0]
        self._has_jumped = torch.zeros_like(self._logs, dtype=torch.bool)
        self._z = statistics.NormalDist().inv_cdf(1 - _FALSE / many)
        self._usual: dict[int, torch.Tensor] = {}  # by the first step of a block
        self._distance: dict[int, torch.Tensor] = {}

    def jumps(self, limit: float, deviations: float) -> Iterator[Jump]:
        """Each number that has jumped."""
        limit = 0.0 if self.has_signs else limit
        self._least = max(self._least, _LEAST[1] * limit)
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
            window, least = self._window(begin, columns), self._by_chance(begin, columns).clamp(min=deviations)
            is_jump = (distance[:, columns] > limit) & (self.deviations(begin, columns) > least)
            has_jumped = self._has_jumped[max(0, begin - _WINDOW) : begin, columns]
            window[has_jumped] = math.nan
            window[: max(0, WARM_UP - max(0, begin - _WINDOW))] = math.nan
            is_jump &= distance[:, columns] > 2 * window.nan_to_num(-math.inf).amax(0)
            self._has_jumped[begin : begin + BLOCK, columns] = is_jump
            for row, place in is_jump.nonzero().tolist():
                before = self._logs[max(0, begin - _WINDOW) : begin, columns[place]]
                known = before[~has_jumped[:, place] & ~before.isnan()]
                levels = (self._usual[begin][columns[place]], known.min(), known.max())
                usual, low, high = map(self._number, levels)
                has_ratio = not self.has_signs and not before.isnan().any()
                yield Jump(begin + row, int(columns[place]), usual, low, high, has_ratio)

    def _number(self, level: torch.Tensor) -> float:
        return float(level) if self.has_signs else float(10**level)

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
        block, window = self.distance(begin)[:, columns], self._window(begin, columns)
        is_known, median = window.isfinite().sum(0) >= WARM_UP, window.nanmedian(0).values
        deviation = 1.4826 * (window - median).abs().nanmedian(0).values
        least = 0.05 * self._usual[begin][columns].abs() if self.has_signs else torch.tensor(self._least)
        return torch.where(is_known, block - median, math.nan) / deviation.clamp(min=least)

    def _window(self, begin: int, columns: torch.Tensor) -> torch.Tensor:
        """The distances of the steps that a block is compared with.

        A gradient that was zero in many of them has too few without what those behind it did, so they are with it.
        """
        first = max(0, begin - _WINDOW)
        whole = self._logs[first:begin, columns] - self._usual[begin][columns]
        if not self._order:
            return whole
        found = torch.cat([self.distance(at)[:, columns] for at in range(first, begin, BLOCK)])
        is_few = (found.isfinite().sum(0) < WARM_UP) & (begin >= 2 * WARM_UP)
        return torch.where(is_few, whole, found)

    def _by_chance(self, begin: int, columns: torch.Tensor) -> torch.Tensor:
        """How many usual deviations a number may be above the others by chance: an approximation of Student's t."""
        known = self._logs[max(0, begin - _WINDOW) : begin, columns].isfinite().sum(0)
        free = (_PRECISION * known).clamp(min=3.0)
        return (free * torch.expm1((free - 1.5) / (free - 1.0) ** 2 * self._z**2)).sqrt()

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
    logged = [[each for each in row if values_of(run, each.of, each.name) is not None][:1] for row in SIGNALS]
    many = sum(len(run.names[signal.of]) if signal.of else 1 for row in logged for signal in row)
    for order, signal in ((order, signal) for order, row in enumerate(logged) for signal in row):
        when = {place: at for at, place in enumerate(run.order.get(signal.of, ()))}
        for event in _of_signal(run, signal, many):
            at = when.get(event.place, 0)
            found.append((event.at, order, -at if signal.of == "param" else at, event))
    return [event for *_, event in sorted(found, key=lambda each: each[:3])]


def _of_signal(run: Run, signal: Signal, many: int) -> Iterator[Event]:
    values = values_of(run, signal.of, signal.name)
    assert values is not None
    is_grad = signal.of == "param" and signal.name.startswith("grad")
    grads = values_of(run, "param", "grad_norm") if signal.name.startswith("update") else None
    if grads is not None:
        values = values.masked_fill(~(grads > 0), math.nan)
    own, others = Scores(values), others_of(run, "loss") if signal.name == "loss/max_rank" else None
    if others is None:
        found = Scores(values, run.order["param"] if is_grad else (), many)
    else:  # a loss that may be below 0 has no ratio to another
        found = Scores(values - others if own.has_signs else values / others, (), many, own.has_signs)
    peaks = run.labels(f"{signal.name}_step") if signal.name.endswith("/peak") else None
    has_ranks = bool(signal.rank) and (run.ranks or 2) > 1
    ranks = values_of(run, signal.of, signal.rank) if has_ranks else None
    for at, place, usual, least, most, has_ratio in found.jumps(signal.limit, signal.deviations):
        if others is not None and not own.deviations(at - at % BLOCK, torch.tensor([place]))[at % BLOCK] > _OWN:
            continue
        rank = math.nan if ranks is None else float(ranks[at, place])
        known = int(rank) if math.isfinite(rank) else None
        where = place if signal.of else -1
        first, step = (begun(run, values, at), run.steps[at]) if peaks is None else (peaks[at], peaks[at])
        usual, least, most = (usual, least, most) if others is None else (float(others[at]), math.nan, math.nan)
        yield Event(at, signal, where, float(values[at, place]), usual, least, most, has_ratio, known, first, step)


def times(factor: float) -> str:
    return f"{factor:.0e} times" if factor >= 1e7 else f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"


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
    others: torch.Tensor = (mean[:, [at]] * ranks - most[:, [at]]) / (ranks - 1)
    return others if name == "loss" else others.clamp(min=0.0)


def stops(values: torch.Tensor) -> list[tuple[int, int]]:
    """Where a column of positive numbers becomes 0 and stays so to the end: the step and the column.

    It must have been positive in 16 steps before, and never 0. A number that is missing is none.

    >>> stops(torch.tensor([[1.0, 1.0]] * 16 + [[1.0, 0.0]] * 2))
    [(16, 1)]
    """
    found = []
    for place, column in enumerate(values.T):
        known = (~column.isnan()).nonzero().flatten()
        zeros = (column[known] <= 0.0).nonzero().flatten().tolist()
        many = len(known) - len(zeros)
        if many >= _STAYS[0] and len(zeros) >= _STAYS[1] and zeros[0] == many:
            found.append((int(known[many]), place))
    return sorted(found)
