"""Sinks, the values in a record, and the writer that gives the records to the sinks.

To add a sink, write a function of a dict: ``gradients(sinks=[print])`` works. A sink with a ``kind:`` in YAML is a
frozen dataclass with ``@register("sink")``. If it holds a file or a connection, it is two classes:

- the spec derives from :class:`SinkSpec` and says where to write. ``open()`` refuses early, by a ``UsageError``, what
  cannot work, and returns
- the open sink, which derives from :class:`OpenSink`: it is called with each record, and ``close()`` is called once.

    @register("sink")
    @dataclass(frozen=True)
    class Csv(SinkSpec):
        path: str

        def open(self) -> OpenSink:
            return _Rows(self, open(self.path, "a"))

A record is a dict: ``step``, then names with numbers, texts, lists and histograms. :func:`scalars`,
:func:`histograms` and :func:`texts` take it apart, and :func:`portable` makes its names fit for every framework.
See [Note: a sink that fails].
"""

# [Note: a sink that fails]
# Sinks run on the first rank alone. If one raised there, in the middle of a step, the other ranks would go on and wait
# for the first one in their next collective, for ever. So what cannot work is refused when the sink is opened, where
# all ranks can be told; and a sink that raises later is named in a warning and left out from then on. The same holds
# for what is logged beside gradients (`also`), for functions that are told of non-finite steps, and for `close()`.

from __future__ import annotations

import contextlib
import importlib
import math
import numbers
import posixpath
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from disthooks._handles import LoggedRecords
from disthooks.errors import UsageError

_LONGEST = 250  # what MLflow allows
_LABELS = re.compile(
    r"(.*/)?(arg(min|max)_rank|(outlier|peak|lead)_rank|peak_step|optimizer|run|restart|nonfinite_since|replicas/steps)(/.*)?"
)
_COUNTS = re.compile(r"(nonfinite|nonfinite_params|activation_nonfinite|activation_unread|skipped)(/.*)?")
_TOTALS = re.compile(r"saved/(?!.*/?(held|in_flight|_per_step|peak|budget)$).*|nonfinite_steps")

#: What the loop set, a number for each parameter group.
_OF_GROUPS = ("loop/lr", "loop/weight_decay")
#: How the name of an entry ends that has a number of each rank.
OF_RANKS = "/of_ranks"
_FOREMOST = ("nonfinite_params", "grad_norm", "clip_ratio", "saved/moved_per_step", "grad_max_abs")


class Histogram(NamedTuple):
    """How many elements lie between each edge and the next; there is one more edge than counts."""

    edges: list[float]
    counts: list[float]

    def at_most(self, buckets: int) -> Histogram:
        """The same histogram with neighbours joined, if it has more buckets than ``buckets``.

        >>> Histogram([0.0, 1.0, 2.0, 3.0], [5, 6, 7]).at_most(2)
        Histogram(edges=[0.0, 2.0, 3.0], counts=[11, 7])
        """
        step = max(1, math.ceil(len(self.counts) / buckets))
        counts = [sum(self.counts[i : i + step]) for i in range(0, len(self.counts), step)]
        return Histogram([*self.edges[:-1:step], self.edges[-1]], counts)


def scalars(record: Mapping[str, Any]) -> dict[str, float | int]:
    """The numbers of ``record`` without its step, also those that are not finite.

    What the loop set for several parameter groups has the number of the group behind its name.

    >>> scalars({"step": 3, "grad_norm": 0.5, "clipped": True, "nonfinite_at": [], "note": "warm"})
    {'grad_norm': 0.5, 'clipped': 1}
    >>> scalars({"step": 3, "loop/lr": [0.1, None, 0.2], "loop/weight_decay": [0.0]})
    {'loop/lr/0': 0.1, 'loop/lr/2': 0.2, 'loop/weight_decay': 0.0}
    """
    of_groups = [(name, record[name]) for name in _OF_GROUPS if name in record]
    flat = {
        f"{name}/{i}" if len(found) > 1 else name: each for name, found in of_groups for i, each in enumerate(found)
    }
    return {
        name: int(value) if isinstance(value, numbers.Integral) else float(value)
        for name, value in (*record.items(), *flat.items())
        if name != "step" and isinstance(value, numbers.Real)
    }


def meaning(name: str) -> str:
    """How the values of ``name`` in several records are summed up.

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
    """The three most important numbers of ``record``, for a console with little room.

    >>> foremost({"grad_norm": 0.5, "grad_max_abs": 1.0, "saved/moved_per_step": 9, "clip_ratio": 0.1})
    {'grad_norm': 0.5, 'clip_ratio': 0.1, 'saved/moved_per_step': 9}
    """
    found = scalars(record)
    return {name: found[name] for name in [name for name in _FOREMOST if name in found][:3]}


def histograms(record: Mapping[str, Any]) -> dict[str, Histogram]:
    """Every histogram in ``record``; an infinite edge is moved to its neighbour, so that it can be drawn.

    >>> histograms({"step": 0, "grad_histogram": {"edges": [0.0, 1.0, float("inf")], "counts": [3, 1]}})
    {'grad_histogram': Histogram(edges=[0.0, 1.0, 1.0], counts=[3, 1])}
    """
    found = {}
    for name, value in record.items():
        if _is_histogram(value) and value["counts"]:
            edges = [float(edge) for edge in value["edges"]]
            finite = [edge for edge in edges if math.isfinite(edge)]
            # Only the outermost edges can be infinite.
            drawn = [min(max(edge, finite[0]), finite[-1]) for edge in edges] if finite else [0.0] * len(edges)
            found[name] = Histogram(drawn, list(value["counts"]))
    return found


def texts(record: Mapping[str, Any], most: int | None = 4) -> dict[str, str]:
    """All other values that are not empty, in words; of a list the first ``most`` items.

    >>> texts({"step": 0, "nonfinite": 0, "nonfinite_at": [], "phase": "warm-up"})
    {'phase': 'warm-up'}
    """
    return {
        name: shown(value, most)
        for name, value in record.items()
        if not isinstance(value, numbers.Real) and not _is_histogram(value) and not is_empty(value)
        if name not in _OF_GROUPS and not name.endswith(OF_RANKS)
    }


def portable(name: str) -> str:
    """``name`` as every framework accepts it: letters, digits and ``_-. /``, as a path, at most 250 characters.

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
        items = []
        for item in value[:most]:
            if isinstance(item, Mapping) and "param" in item:
                items.append(place_words(item))
            else:
                items.append(shown(item))
        return ", ".join(items) + (f" and {len(value) - most} more" if most is not None and len(value) > most else "")
    if isinstance(value, Mapping) and _is_histogram(value) and value["counts"]:
        return f"{sum(value['counts'])} from {shown(value['edges'][0])} to {shown(value['edges'][-1])}"
    return str(value)


#: What is known of a gradient that was finite on each rank and is not finite now.
FINITE_WHEN_MEASURED = (
    "finite on every rank when its gradient was measured; it became non-finite later in backward or in the reduction"
)


def place_words(place: Mapping[str, Any], says_rank: bool = True) -> str:
    """An entry of ``nonfinite_at`` in words.

    >>> place_words({"param": "w", "rank": 1}), place_words({"param": "w", "rank": None}), place_words({"param": "w"})
    ('w on rank 1', 'w (finite on every rank when measured)', 'w on several ranks')
    >>> place_words({"param": "9.bias", "rank": 1, "before": "10.weight"})
    '9.bias on rank 1 (10.weight behind it is finite)'
    """
    rank = place.get("rank")
    where = " on several ranks" if "rank" not in place else " (finite on every rank when measured)"
    where = where if rank is None else f" on rank {rank}"
    behind = f" ({place['before']} behind it is finite)" if "before" in place else ""
    return f"{place.get('param')}{where if says_rank else ''}{behind}"


def places_words(places: Sequence[Mapping[str, Any]], count: int, most: int, says_rank: bool = True) -> str:
    """The first ``most`` of ``places`` in words, and how many more there are of ``count``.

    >>> places_words([{"param": "9.bias", "rank": 1}, {"param": "9.weight", "rank": 1}], 53, 1)
    '9.bias on rank 1 and 52 more'
    """
    more = max(count, len(places)) - len(places[:most])
    return ", ".join(place_words(place, says_rank) for place in places[:most]) + (f" and {more} more" if more else "")


def is_finite_when_measured(places: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no rank's own gradient was infinite or NaN, by the entries of ``nonfinite_at``."""
    return bool(places) and all("rank" in place and place["rank"] is None for place in places)


def _is_histogram(value: Any) -> bool:
    return isinstance(value, Mapping) and {"edges", "counts"} <= value.keys()


def is_empty(value: object) -> bool:
    """Whether ``value`` says nothing: None, an empty list or text, a histogram of no elements."""
    if isinstance(value, Mapping) and _is_histogram(value):
        return not value["counts"]
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and not value)


Sink = Callable[[dict[str, Any]], object]
AlsoLogged = Callable[[], Mapping[str, Any]]

#: Running totals whose growth from step to step is what a chart should show.
PER_STEP = tuple(f"saved/{name}" for name in ("stored", "moved", "loaded", "pack_seconds", "unpack_seconds"))


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class SinkSpec:
    """A sink that only says where to write, frozen and picklable. ``open()`` returns the sink that is called."""

    def open(self) -> OpenSink:
        """Open the sink that is called with the records. Another attachment can open the spec again.

        Raises:
            UsageError: when it cannot work: a package is not installed, a path cannot be written.
        """
        raise NotImplementedError

    def __call__(self, record: dict[str, Any]) -> None:
        """Refuse: nothing is open here."""
        raise UsageError(f"{self!r} is not open: give it to gradients(sinks=[...]), or call what its open() returns")


class OpenSink:
    """A sink that is open, until ``close()``. Its ``repr``, which warnings show, is that of the spec.

    Attributes:
        about: what is attached, in plain values: engine, number of ranks, rules and statistics. Empty if the sink was
            opened by hand.
        names: the names of the parameters ("param") and of the modules ("module") that records have numbers of, in the
            order of the model; and the places of the modules in the order in which forward called them ("called").
            Empty if the sink was opened by hand.
    """

    about: Mapping[str, Any] = _NOTHING
    names: Mapping[str, Sequence[Any]] = _NOTHING

    def __init__(self, sink: object) -> None:
        self._named = repr(sink)

    def __repr__(self) -> str:
        return self._named

    def __call__(self, record: dict[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Write what is in buffers, and close files and connections."""


class RecordWriter:
    """Gives the records of one attachment to its sinks, on the first rank; on the other ranks it has none.

    See [Note: a sink that fails].

    Attributes:
        sinks: the functions that are called with each record.
    """

    def __init__(self, also: Sequence[AlsoLogged] = ()) -> None:
        self.sinks: list[Sink] = []
        self._opened: list[Sink] = []
        self._also = list(also)
        self._last: Mapping[str, Any] = _NOTHING  # the record that was written last
        self._said_before: dict[WhenRead, Mapping[str, Any]] = {}  # what each had said then
        self._taken: dict[
            int, list[tuple[AlsoLogged, Mapping[str, Any] | None]]
        ] = {}  # by step, until its record is made

    def open(
        self,
        sinks: Iterable[Sink],
        about: Mapping[str, Any] = _NOTHING,
        names: Mapping[str, Sequence[Any]] = _NOTHING,
    ) -> None:
        """Open each of ``sinks``, with ``about`` and ``names`` as its attributes.

        If one raises, close those that are open and raise its error.
        """
        try:
            for sink in sinks:
                made = getattr(sink, "open", lambda: None)()
                if isinstance(made, OpenSink):
                    made.about, made.names = about, names
                self._opened.append(made if isinstance(made, OpenSink) else sink)
        except BaseException:
            self.close()
            raise
        self.sinks = list(self._opened)

    def add(self, sink: Sink) -> None:
        """Call ``sink`` too from now on; it is open already, and :meth:`close` leaves it alone."""
        self.sinks.append(sink)

    def write_rest(self, record: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """Write ``record`` of the last step, with what is ``known`` and was found since the last one; if there is any.

        If that step has a record already, it is written again with more, because the last line of a step counts.
        """
        found = dict(known)
        for source in [each for each in self._also if isinstance(each, WhenRead)]:
            with self._leaving_out(cast("AlsoLogged", source)):
                if (said := source()) != self._said_before.get(source, {}):
                    found |= said
        if found and record["step"] >= 0:
            self.write({**(self._last if self._last.get("step") == record["step"] else {}), **record, **found})

    def write(self, record: Mapping[str, Any]) -> None:
        self._last = record
        for sink in list(self.sinks):
            try:
                sink(dict(record))
            except Exception as error:
                self.sinks = [other for other in self.sinks if other is not sink]
                warnings.warn(f"{sink!r} failed and is left out from now on: {error!r}", RuntimeWarning, stacklevel=3)

    def take_also(self, step: int) -> None:
        """Ask each of ``also`` for its values in ``step``, which is made now; its record is made later."""
        taken = self._taken[step] = []
        for source in list(self._also):
            if isinstance(source, WhenRead):
                taken.append((cast("AlsoLogged", source), None))
                continue
            with self._leaving_out(source):
                taken.append((source, source.at(step) if isinstance(source, Totals) else source()))
        LoggedRecords.count += 1

    def add_also(self, record: dict[str, Any]) -> None:
        """Put the values of ``also`` that were taken in the step of ``record`` into it, and those asked now."""
        for source, values in self._taken.pop(record["step"], ()):
            with self._leaving_out(source):
                more = source() if values is None else values
                if isinstance(source, WhenRead):
                    self._said_before[source] = more
                if taken := sorted(record.keys() & more.keys()):
                    raise UsageError(f"{taken} are logged already")
                record.update(more)

    @contextlib.contextmanager
    def _leaving_out(self, source: AlsoLogged) -> Iterator[None]:
        """If the block raises, leave ``source`` out from now on, like a sink."""
        try:
            yield
        except Exception as error:
            self._also = [other for other in self._also if other is not source]
            warnings.warn(f"{source!r} failed and is left out from now on: {error!r}", RuntimeWarning, stacklevel=6)

    def close(self) -> None:
        """Close each sink that this writer opened, once. A sink that raises is named in a warning."""
        opened, self._opened = self._opened, []
        for sink in {id(sink): sink for sink in opened}.values():
            try:
                getattr(sink, "close", lambda: None)()
            except Exception as error:
                warnings.warn(f"{sink!r} could not be closed: {error!r}", RuntimeWarning, stacklevel=3)


class WhenRead(NamedTuple):
    """What is known of a step only after it, such as a comparison of copies: asked when the step's record is read."""

    ask: Callable[[], Mapping[str, Any]]

    def __call__(self) -> Mapping[str, Any]:
        return self.ask()


class Totals:
    """The totals in the reports of ``what``, and their growth per step since the record before.

    A first record of step 0 has the growth since this object was made. Before any other first record, as in a run that
    goes on from a checkpoint, the number of steps is not known, so it has no growth.

    >>> class Two:
    ...     def report(self):
    ...         return self
    ...     def record(self):
    ...         return {"saved/moved": 40, "saved/held": 0}
    >>> numbers = Totals(Two())
    >>> numbers.at(0)
    {'saved/moved': 40, 'saved/held': 0, 'saved/moved_per_step': 0.0}
    """

    def __init__(self, what: Any) -> None:
        self._what = what
        self._last: tuple[int, Mapping[str, Any]] = -1, self()

    def __repr__(self) -> str:
        return repr(self._what)

    def __call__(self) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", self._what.report().record())

    def at(self, step: int) -> dict[str, Any]:
        """The totals, and the growth of each of :data:`PER_STEP` per step since the record before."""
        now = dict(self())
        last, self._last = self._last, (step, now)
        if step <= last[0] or (last[0] < 0 < step):
            return now
        steps = step - last[0]
        return now | {f"{name}_per_step": (now[name] - last[1][name]) / steps for name in PER_STEP if name in last[1]}


def as_also_logged(what: Any) -> AlsoLogged:
    """The function whose values are logged of ``what``: ``what`` itself, or the totals in its reports.

    >>> as_also_logged(lambda: {"lr": 0.1})()
    {'lr': 0.1}
    """
    if hasattr(what, "report") and hasattr(what.report(), "record"):
        return Totals(what)
    if not callable(what):
        raise UsageError(
            f"also={what!r}: give an object whose report() has a record(), or a function that returns a dict"
        )
    return cast(AlsoLogged, what)


def import_framework(module: str, package: str, sink: SinkSpec) -> Any:
    """Import the module of a framework, for a sink that is being opened.

    Raises:
        UsageError: when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{sink!r} needs {package}: pip install {package} ({error})") from error


def check_prefix(sink: object, prefix: object) -> None:
    """Raise UsageError unless ``prefix`` can be put in front of a name."""
    if not isinstance(prefix, str):
        raise UsageError(f"{type(sink).__name__}: prefix is put in front of every name, as 'train/'; got {prefix!r}")
