"""What is in a record, by what frameworks can take of it: numbers, histograms, and the rest as text."""

from __future__ import annotations

import math
import numbers
import posixpath
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_LONGEST = 250  # what MLflow allows
_LABELS = re.compile(r"(.*/)?(arg(min|max)_rank|outlier_rank|optimizer|run|restart|nonfinite_since)(/.*)?")
_COUNTS = re.compile(r"(nonfinite|nonfinite_params|skipped)(/.*)?")
_TOTALS = re.compile(r"saved/(?!.*/?(held|in_flight|_per_step)$).*")

_FOREMOST = ("nonfinite_params", "grad_norm", "clip_ratio", "saved/moved_per_step", "saved/moved", "grad_max_abs")


class Histogram(NamedTuple):
    """How many lie between each edge and the next: one more edge than counts."""

    edges: list[float]
    counts: list[float]

    def at_most(self, buckets: int) -> Histogram:
        """The same with neighbours joined, when there are more buckets than that.

        >>> Histogram([0.0, 1.0, 2.0, 3.0], [5, 6, 7]).at_most(2)
        Histogram(edges=[0.0, 2.0, 3.0], counts=[11, 7])
        """
        step = max(1, math.ceil(len(self.counts) / buckets))
        counts = [sum(self.counts[i : i + step]) for i in range(0, len(self.counts), step)]
        return Histogram([*self.edges[:-1:step], self.edges[-1]], counts)


def scalars(record: Mapping[str, Any]) -> dict[str, float | int]:
    """The numbers of ``record``, not finite ones too, without its step.

    >>> scalars({"step": 3, "grad_norm": 0.5, "clipped": True, "nonfinite_at": [], "note": "warm"})
    {'grad_norm': 0.5, 'clipped': 1}
    """
    return {
        name: int(value) if isinstance(value, numbers.Integral) else float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, numbers.Real)
    }


def meaning(name: str) -> str:
    """What the values of ``name`` in several records are together.

    Returns:
        ``"label"`` for the number of a rank, an optimizer or a step, which has no mean and no sum; ``"count"`` for what
        is counted anew in each step, which has a sum; ``"total"`` for a running total, of which the last value counts;
        ``"time"`` for a moment; ``"number"`` for anything else, which has a median.

    >>> [meaning(name) for name in ("grad_norm", "grad_norm/argmax_rank", "nonfinite", "saved/moved", "saved/held")]
    ['number', 'label', 'count', 'total', 'number']
    """
    if name in ("step", "time"):
        return "time"
    kinds = (("label", _LABELS), ("count", _COUNTS), ("total", _TOTALS))
    return next((kind for kind, names in kinds if names.fullmatch(name)), "number")


def foremost(record: Mapping[str, Any]) -> dict[str, float | int]:
    """The three numbers that a console has room for, of those that there are.

    >>> foremost({"step": 3, "grad_norm": 0.5, "grad_max_abs": 1.0, "saved/moved": 9, "clip_ratio": 0.1})
    {'grad_norm': 0.5, 'clip_ratio': 0.1, 'saved/moved': 9}
    """
    found = scalars(record)
    return {name: found[name] for name in [name for name in _FOREMOST if name in found][:3]}


def histograms(record: Mapping[str, Any]) -> dict[str, Histogram]:
    """Every value that has ``edges`` and ``counts``; an infinite edge is moved to its neighbour, to be drawn.

    >>> histograms({"step": 0, "grad_histogram": {"edges": [0.0, 1.0, float("inf")], "counts": [3, 1]}})
    {'grad_histogram': Histogram(edges=[0.0, 1.0, 1.0], counts=[3, 1])}
    """
    return {
        name: Histogram(_finite([float(edge) for edge in value["edges"]]), list(value["counts"]))
        for name, value in record.items()
        if _is_histogram(value) and value["counts"]
    }


def texts(record: Mapping[str, Any], most: int | None = 4) -> dict[str, str]:
    """What is neither a number nor a histogram nor empty, in words; of a list the first ``most``.

    >>> texts({"step": 0, "nonfinite": 0, "nonfinite_at": [], "phase": "warm-up"})
    {'phase': 'warm-up'}
    """
    return {
        name: shown(value, most)
        for name, value in record.items()
        if not isinstance(value, numbers.Real) and not _is_histogram(value) and not is_empty(value)
    }


def portable(name: str) -> str:
    """``name`` as every framework takes it: letters, digits and ``_-. /``, as a path, no longer than 250.

    >>> portable("grad_norm/*.bias"), portable("saved/OnDisk('/tmp')/written")
    ('grad_norm/_.bias', 'saved/OnDisk__/tmp__/written')
    """
    path = posixpath.normpath("/" + re.sub(r"[^\w.\- /]", "_", name)).lstrip("/")
    return path if len(path) <= _LONGEST else f"{path[: _LONGEST // 2 - 1]}_{path[-_LONGEST // 2 :]}"


def shown(value: object, most: int | None = 4) -> str:
    """A value in a few words.

    >>> shown([{"param": "w", "rank": 1}, 0.25]), shown({"edges": [0, 1, 8], "counts": [3, 4]})
    ('w on rank 1, 0.25', '7 from 0 to 8')
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        items = [_item(item) for item in value[:most]]
        return ", ".join(items) + (f" and {len(value) - most} more" if most is not None and len(value) > most else "")
    if isinstance(value, Mapping) and _is_histogram(value) and value["counts"]:
        return f"{sum(value['counts'])} from {shown(value['edges'][0])} to {shown(value['edges'][-1])}"
    return str(value)


def _is_histogram(value: Any) -> bool:
    return isinstance(value, Mapping) and {"edges", "counts"} <= value.keys()


def is_empty(value: object) -> bool:
    """Whether there is nothing to say of it: None, an empty list or text, a histogram of nothing."""
    if isinstance(value, Mapping) and _is_histogram(value):
        return not value["counts"]
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and not value)


def _finite(edges: list[float]) -> list[float]:
    """Only the outer edges can be infinite."""
    inner = [edge for edge in edges if math.isfinite(edge)]
    return [min(max(edge, inner[0]), inner[-1]) for edge in edges] if inner else [0.0] * len(edges)


def _item(item: object) -> str:
    if isinstance(item, Mapping) and "param" in item:
        return f"{item['param']} on {_rank(item.get('rank'))}"
    return shown(item)


def _rank(rank: int | None) -> str:
    return "no rank before the reduction" if rank is None else f"rank {rank}"
