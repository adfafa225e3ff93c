"""``changes``: what the training loop itself changed in a run, such as which parameters train; it blames nobody."""

# [Note: what a schedule explains]
# A learning rate that a schedule moves changes in many records. Only a change by a factor of 2 or more, or from or to
# 0, is told, and only if it is more than twice as large as the change in the record before it and in the one after: a
# warm-up from 0 and the end of a cosine are not.
# The last step of an epoch often has fewer micro-batches. So another number of them counts if two records have it.

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from disthooks.report.culprit import steps_said
from disthooks.report.log import Run
from disthooks.report.record import Record

_MUCH = 2.0  # see [Note: what a schedule explains]
_SETTINGS = (("learning rate", Record.loop_lr.name), ("weight decay", Record.loop_weight_decay.name))


class Change(NamedTuple):
    """What the loop changed.

    Attributes:
        first: the first step in which it can have changed: the one after the record before.
        step: the step of the record that shows it.
        kind: "began", "ended", "learning rate", "weight decay", "mode", "scale" or "micro-batches".
        what: what changed, in words; no full stop.
        names: the parameters that it concerns, as far as the log tells them; empty for all of them.
    """

    first: int
    step: int
    kind: str
    what: str
    names: Sequence[str] = ()

    @property
    def text(self) -> str:
        return f"{steps_said(self.first, self.step)}: {self.what}."


@functools.lru_cache(maxsize=2)
def changes(run: Run) -> list[Change]:
    """What the loop changed, in the order of steps. See [Note: what a schedule explains]."""
    found = [*_trained(run), *_values(run)]
    for kind, name in _SETTINGS:
        found += _settings(run, kind, name)
    return sorted(found, key=lambda change: change.step)


def _pairs(run: Run, name: str) -> Iterator[tuple[int, int]]:
    """The places of the records that have an entry, each with that of the record before it that has it."""
    return itertools.pairwise(at for at, record in enumerate(run.records) if record.get(name) is not None)


def _trained(run: Run) -> Iterator[Change]:
    told: dict[str, str] = {}  # recent steps get their records late, so a later record may tell the same
    for before, at in _pairs(run, "loop/trained"):
        record, was = run.records[at], run.records[before].loop_trained or 0
        more = (record.loop_trained or 0) - was
        named = {"began": (more, record.loop_began, record.loop_ended)}
        named["ended"] = (-more, record.loop_ended, record.loop_began)
        for kind, (gained, found, others) in named.items():
            if names := [name for name in found if told.get(name) != kind]:
                told |= dict.fromkeys(names, kind)
                count = max(len(names), gained + len(others))  # a record names at most ten
                rest = f" and {count - len(names)} more" if count > len(names) else ""
                words = f"parameter{'s' * (count > 1)} {'began to train' if kind == 'began' else 'stopped training'}"
                yield _change(run, before, at, kind, f"{count} {words}: {', '.join(names)}{rest}", names)


def _values(run: Run) -> Iterator[Change]:
    for before, at in _pairs(run, "loop/training"):
        if run.records[at].loop_training != run.records[before].loop_training:
            mode = "training" if run.records[at].loop_training else "evaluation"
            yield _change(run, before, at, "mode", f"the model is in {mode} mode from here on")
    for before, at in _pairs(run, "loop/scale"):
        now, was = run.records[at].loop_scale or 0.0, run.records[before].loop_scale or 0.0
        if now < was:
            yield _change(run, before, at, "scale", f"the loss scale went from {was:g} to {now:g}")
    counts = [(at, record.loop_micro_batches) for at, record in enumerate(run.records) if record.loop_micro_batches]
    told = counts[0][1] if counts else None
    for (before, _), (at, count), (_, after) in zip(counts, counts[1:], counts[2:], strict=False):
        if count == after != told:
            yield _change(run, before, at, "micro-batches", f"a step has {count} micro-batches, {told} before")
            told = count


def _settings(run: Run, kind: str, name: str) -> Iterator[Change]:
    """Jumps of a setting of the optimizer's parameter groups; one change for all groups of a record."""
    pairs = [(a, b) for a, b in _pairs(run, name) if len(run.records[a][name]) == len(run.records[b][name])]
    rows = [(run.records[a][name], run.records[b][name]) for a, b in pairs]
    for place, ((before, at), (was, now)) in enumerate(zip(pairs, rows, strict=True)):
        beside = [rows[i] for i in (place - 1, place + 1) if 0 <= i < len(rows) and len(rows[i][0]) == len(now)]
        moved = [
            group
            for group, (old, new) in enumerate(zip(was, now, strict=True))
            if _is_jump(old, new, [(one[group], other[group]) for one, other in beside])
        ]
        if moved:
            first, more = moved[0], len(moved) - 1
            of = "" if len(moved) == len(now) else f" of group {first}"
            rest = f", and {more} more group{'s' * (more > 1)} changed" if of and more else ""
            what = f"the {kind}{of} went from {was[first]:.3g} to {now[first]:.3g}{rest}"
            names = [each for each, group in zip(run.names["param"], run.groups, strict=False) if group in moved]
            yield _change(run, before, at, kind, what, names if of else ())


def _is_jump(old: float | None, new: float | None, beside: Sequence[tuple[float | None, float | None]]) -> bool:
    if old is None or new is None or old == new:
        return False
    small, large = sorted((abs(old), abs(new)))
    others = [abs(two - one) for one, two in beside if one is not None and two is not None]
    return large >= _MUCH * small and abs(new - old) > _MUCH * max(others, default=0.0)


def _change(run: Run, before: int, at: int, kind: str, what: str, names: Sequence[str] = ()) -> Change:
    return Change(run.steps[before] + 1, run.steps[at], kind, what, tuple(names))
