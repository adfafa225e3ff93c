"""``summary``: the figures of a run in plain values, for ``--json`` and for the tables in the terminal."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Sequence
from typing import Any

from disthooks.report.log import Run, number
from disthooks.report.loop import changes
from disthooks.report.sentences import nonfinite_entries, value_of, verdict
from disthooks.report.timeline import timeline

_NOT_FIGURES = ("run", "restart", "optimizer")


def summary(run: Run) -> dict[str, Any]:
    """The figures of one run in plain values; docs/cli.md has the keys."""
    from disthooks.grads.sinks.base import meaning

    figures: dict[str, dict[str, Any]] = {"number": {}, "count": {}, "total": {}, "label": {}}
    for name in dict.fromkeys(name for record in run.records for name in record if name not in _NOT_FIGURES):
        kind = meaning(name)
        if kind in figures:
            # The peak of a record is that of an earlier step, if steps are not logged.
            of = [record.get(f"{name}_step", record.step) for record in run.records]
            found = _figures(kind, [value_of(record, name) for record in run.records], of)
            if found:
                figures[kind][name] = found
    told = timeline(run)
    return {
        "run": run.name,
        "optimizer": run.optimizer,
        "about": run.about,
        "restarts": run.restarts,
        "began": run.began,
        "ended": run.ended,
        "steps": len(run.records),
        "first_step": run.steps[0],
        "last_step": run.steps[-1],
        "again": run.again,
        "repeated": run.written - len(run.records),
        "numbers": figures["number"],
        "counts": figures["count"],
        "totals": figures["total"],
        "labels": figures["label"],
        "single": sum(table.names for table in run.columns.values()),
        "nonfinite": nonfinite_entries(run),
        "culprits": [culprit.document() for culprit in told.culprits],
        "looked_at": told.looked_at,
        "unseen": told.unseen,
        "changes": [change._asdict() for change in changes(run)],
        "verdict": verdict(run, told),
    }


def _figures(kind: str, column: Sequence[Any], steps: Sequence[int]) -> dict[str, Any]:
    """The figures of one name over all steps; empty if the column has no number."""
    if kind == "label":  # the number of a rank: how often each rank was named, the most frequent first
        named = collections.Counter(value for value in column if value is not None)
        return {str(value): times for value, times in named.most_common()}
    found = [(given, step) for value, step in zip(column, steps, strict=True) if (given := number(value)) is not None]
    values = [given for given, _ in found]
    if not values:
        return {}
    if kind == "count":
        return {"sum": sum(values), "steps": sum(value != 0 for value in values), "of": len(values)}
    if kind == "total":  # each record has the sum up to its step
        return {"last": values[-1]}
    finite = [pair for pair in found if math.isfinite(pair[0])]
    return {
        "first": values[0],
        "median": statistics.median([value for value, _ in finite] or [math.nan]),
        "last": values[-1],
        "max": max((value for value, _ in finite), default=math.nan),
        "max_step": max(finite, key=lambda pair: pair[0], default=(0, None))[1],
        "not_finite": len(values) - len(finite),
    }
