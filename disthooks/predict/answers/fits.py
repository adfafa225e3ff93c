"""``fits``: whether a training step fits in a limit of memory, the largest batch, and the longest sequence."""

# [Note: how a size is found]
# A probe is one step on fake tensors, and takes 0.1 to 10 seconds. The size is doubled while it fits, or halved until
# it does; two sizes that fit give a straight line, and the next is the one at which the line reaches the limit. Between
# the largest that fits and the least that does not, a line through the two says the next size, and every third one is
# the middle.
#
# A model refuses a size that is not in its table of positions, or that is not a multiple of its patches or chunks. So
# sizes are multiples of a unit: at first of the odd part of the size that was asked for, or of 64 for a long sequence;
# after a refusal of the least of its even multiples that does not divide the refused size. If there is none, the
# refused size is too large.
#
# The memory may become less at a larger size, because an allocator rounds, or because another kernel runs. Then a still
# larger size may fit again; the search does not look for it.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from disthooks._tensors import format_bytes
from disthooks.errors import UsageError
from disthooks.predict.answers.advice import Advice, Tried, cheapest
from disthooks.predict.explain import explain_built
from disthooks.predict.explanation import Explanation
from disthooks.predict.fake.builder import Builder, What
from disthooks.predict.run import Situation, record_step

#: The search tries no larger size than this.
MOST = 1 << 20
Progress = Callable[[str], None]

_LONG = 64  # a long sequence is searched in multiples of this: nobody trains with 2,763 tokens
_FARTHER = 16  # the search tries no size that is so many times the largest that is known to fit
_CALLED: dict[What, str] = {"batch": "batch", "seq": "sequence"}


@dataclass(frozen=True)
class Probe:
    """One step at one size; ``nbytes`` is the highest peak of its steps, 0 if the model refused the size."""

    size: int
    nbytes: int
    refusal: str = ""


@dataclass(frozen=True)
class Largest:
    """The largest batch, or the longest sequence, that fits.

    Attributes:
        size: the largest size; 0 if none fits; None if the size cannot be set.
        next_size: the next size, which was tried too; None if there is none.
        next_nbytes: the bytes that the next size needs; None if it did not run.
        end: why there is no larger size: it is above the "limit" of memory; the model "refused" it; the search goes no
            further ("most"); its time was over ("patience"); or the size cannot be set ("unset").
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

    ``batch`` and ``seq`` are None if they were not asked for; ``change`` is the cheapest one with which the step fits,
    None if it fits as it is, or no known change is enough.
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
        return {
            "limit": self.limit,
            "nbytes": self.nbytes,
            "does_fit": self.does_fit,
            "batch": None if self.batch is None else self.batch.to_dict(),
            "seq": None if self.seq is None else self.seq.to_dict(),
            "change": None if self.change is None else self.change.to_dict(),
        }

    def of_change(self) -> list[str]:
        """The cheapest change with which the step fits; nothing if it fits as it is."""
        if self.change is not None:
            lines = (self.change.yaml or self.change.code).splitlines()
            return [f"cheapest change: {self.change.title}: {self.change.text}", *(f"    {line}" for line in lines)]
        return [] if self.does_fit else ["disthooks knows no single change that makes it fit"]


def verdict(explanation: Explanation, limit: int) -> list[str]:
    """Whether the step fits in ``limit`` bytes, in words."""
    needed = explanation.needed_bytes
    word, apart = ("fits", "are free") if needed <= limit else ("does not fit", "are missing")
    rest = format_bytes(abs(limit - needed))
    lines = [f"the step {word} in {format_bytes(limit)}: it needs {format_bytes(needed)}, and {rest} {apart}"]
    device = explanation.situation.hardware
    if device is not None and limit > device.usable_bytes:
        has, context = format_bytes(device.memory_bytes), format_bytes(device.context_bytes)
        left = format_bytes(device.usable_bytes)
        lines.append(f"{device.name} has {has}, and its context takes about {context}: {left} are there for a step")
    if explanation.situation.optimizer is None:
        lines.append("the state of an optimizer is not counted: name the optimizer, such as --optimizer adamw")
    return lines


def fits(
    builder: Builder,
    situation: Situation,
    limit: int,
    *,
    sizes: Iterable[What] = ("batch", "seq"),
    patience: float = 120.0,
    progress: Progress | None = None,
    explanation: Explanation | None = None,
    tried: Tried | None = None,
    found: Progress | None = None,
) -> Fits:
    """Find out whether a step fits in ``limit`` bytes, and find the largest batch and the longest sequence that fit.

    The batch is searched with the sequence length of ``situation``, and the sequence with its batch. Each answer is
    proven: this size fits, and the next one that the search takes does not. See [Note: how a size is found].
    ``found`` is called with each of these two answers as soon as it is there.
    """
    if limit < 1:
        raise UsageError(f"the limit of memory must be positive, not {limit}")
    if explanation is None:
        explanation = explain_built(builder, situation)
    given = explanation.needed_bytes
    detail, say = progress or (lambda text: None), found or (lambda text: None)
    detail(f"as it is: {format_bytes(given)}")
    largest: dict[What, Largest] = {}
    change = cheapest(builder, explanation, limit, progress, tried=tried) if given > limit else None
    for what in sizes:
        try:
            start = getattr(situation, what) or builder.size(what)
        except UsageError as error:
            largest[what] = Largest(what, None, 0, None, None, "unset", str(error), 0)
            say(str(error))
            continue
        search = _Search(builder, situation, limit, what, detail)
        search.know(start, explanation)
        largest[what] = search.largest(start, patience)
        say(largest[what].text)
    return Fits(limit, explanation, given, largest.get("batch"), largest.get("seq"), change)


class _Search:
    """Looks for the largest size of one kind. See [Note: how a size is found]."""

    def __init__(self, builder: Builder, situation: Situation, limit: int, what: What, say: Progress) -> None:
        self._builder, self._situation, self._limit, self._what = builder, situation, limit, what
        self._most, self._say = MOST, say
        self._probes: dict[int, Probe] = {}
        self._low, self._high, self._unit, self._start = 0, MOST + 1, 1, 1  # low fits, and high does not

    def know(self, size: int, explanation: Explanation) -> Probe:
        probe = self._probes[size] = Probe(size, explanation.needed_bytes)
        return probe

    def at(self, size: int) -> Probe:
        found = self._probes.get(size)
        if found is not None:
            return found
        try:
            wanted: dict[str, Any] = {self._what: size}
            situation = replace(self._situation, **wanted)
            found = self.know(size, Explanation(self._builder.name, situation, record_step(self._builder, situation)))
        except UsageError as error:
            found = self._probes[size] = Probe(size, 0, str(error))
        said = found.refusal or f"{format_bytes(found.nbytes)}, {'fits' if self.does_fit(found) else 'too much'}"
        self._say(f"{_CALLED[self._what]} {size}: {said}")
        return found

    def does_fit(self, probe: Probe) -> bool:
        return not probe.refusal and probe.nbytes <= self._limit

    def largest(self, start: int, patience: float) -> Largest:
        end, self._start, self._unit = time.monotonic() + patience, start, start // (start & -start)
        if self._what == "seq" and start % _LONG == 0 and start >= 16 * _LONG:
            self._unit = _LONG
        self._most = max(self._most, start)
        self._high = self._most + 1
        size: int | None = start
        while size is not None:
            self._settle(self.at(size))
            size = self._next(size)
            if time.monotonic() >= end:
                break
        return self._found(is_unfinished=size is not None)

    def _settle(self, probe: Probe) -> None:
        size = probe.size
        if self.does_fit(probe):
            self._low = max(self._low, size)
            return
        while probe.refusal and self._unit < self._start and size % self._unit == 0:
            self._unit *= 2
        if size % self._unit == 0:
            self._high = min(self._high, size)

    def _next(self, size: int) -> int | None:
        """The next size between the largest that fits and the least that does not; None if there is none."""
        low, high, unit = self._low, self._high, self._unit
        first, last = (low // unit + 1) * unit, (high - 1) // unit * unit
        if first > last:
            return None
        is_open = high > self._most
        middle = 2 * low if is_open else (low + high) // 2 if low else size // 2
        at_limit = self._at_limit(is_open) if is_open or len(self._probes) % 3 else None
        if at_limit is not None:
            middle = min(at_limit, _FARTHER * low) if is_open else at_limit
        return max(first, min(last, middle // unit * unit))

    def _at_limit(self, is_open: bool) -> int | None:
        """Where a straight line through two probes reaches the limit; None if they give no line that grows."""
        fitting = sorted(each for each, probe in self._probes.items() if self.does_fit(probe))
        ends = fitting[-2:] if is_open else [self._low, self._high]
        ran = [self._probes[each] for each in ends if each in self._probes and not self._probes[each].refusal]
        if len(ran) < 2 or ran[1].nbytes <= ran[0].nbytes:
            return None
        below, above = ran
        return below.size + (self._limit - below.nbytes) * (above.size - below.size) // (above.nbytes - below.nbytes)

    def _found(self, is_unfinished: bool) -> Largest:
        what, low, called = self._what, self._low, _CALLED[self._what]
        best, ran = self._probes.get(low), [each for each in self._probes.values() if not each.refusal]
        above = self._probes.get(self._high)
        nbytes = best.nbytes if best is not None and low else 0
        next_nbytes = None if above is None or above.refusal else above.nbytes
        next_size = None if above is None else above.size
        if low:
            least = "at least " if is_unfinished or above is None else ""
            largest = "longest" if what == "seq" else "largest"
            text = f"the {largest} {called} is {least}{low}, with {format_bytes(nbytes)}"
        else:
            tried = " that was tried" if is_unfinished else ""
            text = f"no {called}{tried} fits" + (
                "" if is_unfinished or above is None or above.refusal else f", not even {above.size}"
            )
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
            text += f"{'; ' if low else ': '}{above.size} needs {format_bytes(above.nbytes)}, {over} too much"
        if self._unit > 1:
            text += f" (multiples of {self._unit} were tried)"
        return Largest(what, low, nbytes, next_size, next_nbytes, end, text, len(self._probes))
