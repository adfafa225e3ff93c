"""``fits``: whether a training step fits in a limit of memory, the largest batch, and the longest sequence."""

# [Note: how a size is found]
# A probe is one step on fake tensors, and takes 0.1 to 10 seconds. While the model runs the same operators, the memory
# at each moment of the step is a polynomial of the size: of the first degree in the batch, and at most of the second in
# the length of a sequence. So two or three probes give a polynomial for each moment, and the highest of them is the
# peak of any size; the peak itself is no polynomial, because another moment may become the highest. If the moments of
# two probes differ, the peaks alone are used.
#
# The prediction only chooses the next probe. Two probes prove the answer: the largest size fits, and the next size
# does not. The memory may become less at a larger size, because an allocator rounds, or because another kernel runs.
# Then a still larger size may fit again. The search does not look for it.
#
# [Note: sizes that are refused]
# A model refuses a size that is not in its table of positions, or that is not a multiple of its patches or chunks.
# After a refusal, the search takes the largest power of two that divides a size that runs, and tries the nearest
# multiple of it. If the model takes this size, the search goes on over multiples, and at the end it divides the unit by
# small primes as long as the model takes the result. If the model does not take this size, the search tries a multiple
# of the size that it began with in the same way, and otherwise the numbers in the error, because the largest size is
# often among them.

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from disthooks._tensors import format_bytes
from disthooks.errors import UsageError
from disthooks.predict.answers.advice import Advice, Tried, cheapest
from disthooks.predict.explain import explain_built
from disthooks.predict.explanation import Explanation
from disthooks.predict.fake.builder import Builder, What
from disthooks.predict.run import Situation, record_step

#: The search tries no larger size than this.
MOST = 1 << 20
#: Bytes of an explanation that have to fit into the limit.
MeasureOf = Callable[[Explanation], int]
Progress = Callable[[str], None]

_DEGREE: dict[What, int] = {"batch": 1, "seq": 2}
_CALLED: dict[What, str] = {"batch": "batch", "seq": "sequence"}


def peak(explanation: Explanation) -> int:
    """The highest peak of all steps, in bytes. :func:`fits` compares it with the limit, unless ``measure`` is given."""
    return explanation.needed_bytes


@dataclass(frozen=True)
class Probe:
    """One step at one size.

    Attributes:
        size: the size.
        nbytes: its measure in bytes; 0 if the model refused the size.
        refusal: why the model refused it; "" if it ran.
        moments: the bytes at each moment, or the measure alone.
        operators: how many operators ran.
    """

    size: int
    nbytes: int
    refusal: str = ""
    moments: tuple[int, ...] = field(default=(), repr=False)
    operators: int = 0


@dataclass(frozen=True)
class Largest:
    """The largest batch, or the longest sequence, that fits.

    Attributes:
        what: "batch" or "seq".
        size: the largest size; 0 if none fits; None if the size cannot be set.
        nbytes: the bytes that it needs; 0 if there is none.
        next_size: the next size, which was tried too; None if there is none.
        next_nbytes: the bytes that the next size needs; None if it did not run.
        end: why there is no larger size: it is above the "limit" of memory; the model "refused" it; the search goes no
            further ("most"); its time was over ("patience"); or the size cannot be set ("unset").
        text: the same in a sentence.
        probes: how many steps were run.
    """

    what: What
    size: int | None
    nbytes: int
    next_size: int | None
    next_nbytes: int | None
    end: Literal["limit", "refused", "most", "patience", "unset"]
    text: str
    probes: int

    def to_dict(self) -> dict[str, Any]:
        """As a document that JSON can hold."""
        return {
            "size": self.size,
            "nbytes": self.nbytes,
            "next_size": self.next_size,
            "next_nbytes": self.next_nbytes,
            "end": self.end,
            "text": self.text,
            "probes": self.probes,
        }


@dataclass(frozen=True)
class Fits:
    """Whether a step fits, and how far it can go.

    Attributes:
        limit: the limit in bytes.
        explanation: the step as it was asked for.
        nbytes: the bytes that it needs.
        batch: the largest batch; None if it was not asked for.
        seq: the longest sequence; None if it was not asked for.
        change: the cheapest change with which the step fits; None if it fits as it is, or no known change is enough.
    """

    limit: int
    explanation: Explanation = field(repr=False)
    nbytes: int
    batch: Largest | None = None
    seq: Largest | None = None
    change: Advice | None = None

    @property
    def does_fit(self) -> bool:
        return self.nbytes <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """As a document that JSON can hold."""
        return {
            "limit": self.limit,
            "nbytes": self.nbytes,
            "does_fit": self.does_fit,
            "batch": None if self.batch is None else self.batch.to_dict(),
            "seq": None if self.seq is None else self.seq.to_dict(),
            "change": None if self.change is None else self.change.to_dict(),
        }

    def __str__(self) -> str:
        word, apart = ("fits", "are free") if self.does_fit else ("does not fit", "are missing")
        rest = format_bytes(abs(self.limit - self.nbytes))
        needs, limit = format_bytes(self.nbytes), format_bytes(self.limit)
        lines = [f"the step {word} in {limit}: it needs {needs}, and {rest} {apart}"]
        if self.explanation.situation.optimizer is None:
            lines.append("the state of an optimizer is not counted: name the optimizer, such as --optimizer adamw")
        lines += [each.text for each in (self.batch, self.seq) if each is not None]
        if self.change is not None:
            lines.append(f"cheapest change: {self.change.title}: {self.change.text}")
        elif not self.does_fit:
            lines.append("disthooks knows no single change that makes it fit")
        return "\n".join(lines)


def fits(
    builder: Builder,
    situation: Situation,
    limit: int,
    *,
    measure: MeasureOf = peak,
    sizes: Iterable[What] = ("batch", "seq"),
    most: int = MOST,
    patience: float = 120.0,
    progress: Progress | None = None,
    explanation: Explanation | None = None,
    tried: Tried | None = None,
) -> Fits:
    """Find out whether a step fits in ``limit`` bytes, and find the largest batch and the longest sequence that fit.

    The batch is searched with the sequence length of ``situation``, and the sequence with its batch. Each answer is
    proven: this size fits, and the next one does not. If the measure grows with the size, no larger size fits. See
    [Note: how a size is found] for models whose measure does not always grow.

    Raises:
        UsageError: if the step does not run as it was asked for, or the limit is not positive.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    >>> found = fits(Builder(model, (torch.empty(8, 64),)), Situation(device="cpu"), 1 << 20)
    >>> found.batch.size, found.batch.nbytes <= 1 << 20 < found.batch.next_nbytes, found.seq.end
    (293, True, 'unset')
    """
    if limit < 1:
        raise UsageError(f"the limit of memory must be positive, not {limit}")
    if explanation is None:
        explanation = explain_built(builder, situation)
    given = measure(explanation)
    if progress is not None:
        progress(f"as it is: {format_bytes(given)}")
    largest: dict[What, Largest] = {}
    for what in sizes:
        try:
            start = getattr(situation, what) or builder.size(what)
        except UsageError as error:
            largest[what] = Largest(what, None, 0, None, None, "unset", str(error), 0)
            continue
        search = _Search(builder, situation, limit, what, measure, most, progress)
        search.know(start, explanation)
        largest[what] = search.largest(start, patience)
    change = None
    if given > limit:
        change = cheapest(builder, explanation, limit, measure, progress, tried=tried)
    return Fits(limit, explanation, given, largest.get("batch"), largest.get("seq"), change)


class _Search:
    """Looks for the largest size of one kind. See [Note: how a size is found] and [Note: sizes that are refused]."""

    def __init__(
        self,
        builder: Builder,
        situation: Situation,
        limit: int,
        what: What,
        measure: MeasureOf,
        most: int,
        progress: Progress | None,
    ) -> None:
        self._builder, self._situation, self._limit, self._what = builder, situation, limit, what
        self._measure, self._most, self._progress = measure, most, progress
        self._probes: dict[int, Probe] = {}
        self._low, self._high, self._unit = 0, most + 1, 1  # low fits; high does not; both are multiples of the unit
        self._was_refused, self._start = False, 1

    def know(self, size: int, explanation: Explanation) -> Probe:
        nbytes = self._measure(explanation)
        moments: tuple[int, ...] = (nbytes,)
        if self._measure is peak:
            moments = (*(each.total for each in explanation.timeline.samples), explanation.first_bytes)
        step = explanation.with_plan or explanation.step
        probe = Probe(size, nbytes, "", moments, len(step.record.operators))
        self._probes[size] = probe
        return probe

    def at(self, size: int) -> Probe:
        """The step at ``size``; it runs once."""
        found = self._probes.get(size)
        if found is not None:
            return found
        try:
            wanted: dict[str, Any] = {self._what: size}
            found = self.know(size, self._explained(replace(self._situation, **wanted)))
        except UsageError as error:
            found = self._probes[size] = Probe(size, 0, str(error))
        if self._progress is not None:
            said = found.refusal or f"{format_bytes(found.nbytes)}, {'fits' if self.does_fit(found) else 'too much'}"
            self._progress(f"{_CALLED[self._what]} {size}: {said}")
        return found

    def _explained(self, situation: Situation) -> Explanation:
        """The step; only as it is with the plan, unless a measure of the user's may ask for more than the peak."""
        if self._measure is peak:
            return Explanation(self._builder.name, situation, record_step(self._builder, situation))
        return explain_built(self._builder, situation, None)

    def does_fit(self, probe: Probe) -> bool:
        """Whether the step ran and its bytes are within the limit."""
        return not probe.refusal and probe.nbytes <= self._limit

    def largest(self, start: int, patience: float) -> Largest:
        end = time.monotonic() + patience
        self._start = start
        self._most = max(self._most, start)
        self._high = self._most + 1
        self._settle(self.at(start))
        sizes = self._sizes()
        for size in sizes:
            if time.monotonic() >= end:
                break
            self._settle(self.at(size))
        return self._found(self._high - self._low > self._unit)

    def _settle(self, probe: Probe) -> None:
        if self.does_fit(probe):
            self._low = max(self._low, probe.size)
        else:
            self._high = min(self._high, probe.size)

    def _sizes(self) -> Iterator[int]:
        """The sizes to be tried, until there is none between the largest that fits and the least that does not."""
        widths: list[int] = []
        while self._high - self._low > self._unit:
            refused = self._probes.get(self._high)
            if refused is not None and refused.refusal and not self._was_refused:
                self._was_refused = True
                yield from self._multiple(refused.size)
                continue
            is_open = self._high > self._most
            widths = [] if is_open else [*widths, self._high - self._low]
            is_slow = len(self._probes) > 5 if is_open else len(widths) > 2 and 2 * widths[-1] > widths[-3]
            yield self._next(is_open, is_slow)
        for part in (2, 3, 5, 7) if self._low else ():
            while self._unit % part == 0:
                before, smaller = self._high, self._unit // part
                while (size := self._low + smaller) < self._high:
                    yield size
                    if self._probes[size].refusal:
                        break
                if size in self._probes and self._probes[size].refusal:
                    self._high = before
                    break
                self._unit = smaller

    def _multiple(self, refused: int) -> Iterator[int]:
        """Find whether the model takes multiples only, after it refused a size."""
        for unit in dict.fromkeys((self._low & -self._low, self._start)):
            if self._unit == 1 and unit > 1 and self._low % unit == 0 and refused % unit:
                yield from self._multiple_of(unit, refused)

    def _multiple_of(self, unit: int, refused: int) -> Iterator[int]:
        size = max(refused // unit * unit, self._low + unit)
        if size > self._most:
            return
        before = self._high
        if size < before:
            yield size
        elif self.at(size).refusal:
            return
        if not self._probes[size].refusal:
            # The refused size says nothing of multiples.
            self._unit = unit
            tried = [each for each in self._probes.values() if each.size % unit == 0 and not self.does_fit(each)]
            self._high = min([each.size for each in tried], default=-(-(self._most + 1) // unit) * unit)
            if self.does_fit(self._probes[size]):
                self._low = max(self._low, size)

    def _next(self, is_open: bool, is_slow: bool) -> int:
        """The next size between the largest that fits and the least that does not."""
        low, high, unit = self._low, self._high, self._unit
        first, last = low + unit, high - unit
        refusal = "" if is_open else self._probes[high].refusal if high in self._probes else ""
        if refusal:
            named = [int(each) // unit * unit for each in re.findall(r"\d+", refusal)]
            hints = [each for each in named if first <= each <= last and each not in self._probes]
            if hints or low in named:
                return max(hints) if hints else first
        elif is_open or not is_slow:
            last = min(last, self._farthest()) if is_open else last
            guess = self._predicted(low, last) // unit * unit
            if is_open and is_slow:
                guess = max(guess, 2 * low)
            return max(first, min(guess, max(first, last)))
        return max(first, (low + high) // 2 // unit * unit)

    def _farthest(self) -> int:
        """The largest size that may be tried next, while no size is known that does not fit.

        The time of a probe may grow with the size, if operators run once for each token. So the size is only doubled,
        unless two probes ran as many operators.
        """
        ran = [each for each in self._probes.values() if not each.refusal]
        is_steady = len(ran) > 1 and len({each.operators for each in ran}) == 1
        return self._most if is_steady else min(self._most, 2 * self._low)

    def _predicted(self, low: int, high: int) -> int:
        """The largest size in this range of which the known probes say that it fits; half of ``high`` without any."""
        points = self._points()
        if len(points) < 2:
            return high if low else (high + 1) // 2
        sizes = [each.size for each in points]
        table = torch.tensor([each.moments for each in points], dtype=torch.float64)

        def total(size: int) -> float:
            weights = []
            for this in sizes:
                weight = 1.0
                for other in sizes:
                    if other != this:
                        weight *= (size - other) / (this - other)
                weights.append(weight)
            return float((torch.tensor(weights, dtype=torch.float64) @ table).max())

        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if total(middle) <= self._limit + 0.5 else (low, middle - 1)
        return low

    def _points(self) -> list[Probe]:
        """The probes whose polynomials predict: those that are nearest to the limit and have the same moments."""
        ran = [each for each in self._probes.values() if not each.refusal]
        ran.sort(key=lambda each: abs(each.nbytes - self._limit))
        number = _DEGREE[self._what] + 1
        same = [each for each in ran if len(each.moments) == len(ran[0].moments)]
        if len(same) > 1:
            return same[:number]
        return [replace(each, moments=(each.nbytes,)) for each in ran[:number]]

    def _found(self, is_unfinished: bool) -> Largest:
        what, low, called = self._what, self._low, _CALLED[self._what]
        best, ran = self._probes.get(low), [each for each in self._probes.values() if not each.refusal]
        above = self._probes.get(low + self._unit)
        nbytes = best.nbytes if best is not None and low else 0
        next_nbytes = None if above is None or above.refusal else above.nbytes
        next_size = None if above is None else above.size
        if low:
            least = "at least " if is_unfinished or above is None else ""
            largest = "longest" if what == "seq" else "largest"
            text = f"the {largest} {called} is {least}{low}, with {_exact(nbytes, next_nbytes)}"
        else:
            tried = " that was tried" if is_unfinished else ""
            text = f"no {called}{tried} fits" + ("" if above is None or above.refusal else ", not even 1")
        if is_unfinished:
            end: Literal["limit", "refused", "most", "patience", "unset"] = "patience"
            text += f"; the time of the search was over, so a {'larger' if low else 'smaller'} one may fit"
        elif above is None:
            end = "most"
            if len(ran) > 1 and len({each.nbytes for each in ran}) == 1:
                text = f"the {called} does not change the memory: {format_bytes(nbytes)} at {low}"
            else:
                text += ", and the search tries no larger one"
        elif above.refusal:
            end = "refused"
            text += f"; the model refuses {above.size}: {above.refusal}"
        else:
            end = "limit"
            over = format_bytes(above.nbytes - self._limit)
            text += f"{'; ' if low else ': '}{above.size} needs {_exact(above.nbytes, nbytes)}, {over} too much"
        if self._unit > 1:
            text += f" (the model takes only multiples of {self._unit})"
        return Largest(what, low, nbytes, next_size, next_nbytes, end, text, len(self._probes))


def _exact(nbytes: int, other: int | None) -> str:
    is_same = other is not None and nbytes != other and format_bytes(nbytes) == format_bytes(other)
    return f"{nbytes:,} bytes" if is_same else format_bytes(nbytes)
