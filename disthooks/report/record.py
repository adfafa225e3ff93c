"""``record_of``: a line of a log as a record; what is no record is said."""

# [Note: a log is not trusted]
# A log may have been killed in the middle of a line, written by an older version, or made by somebody else. So each
# line is held against the schema here, when it is read, and nowhere else: a line in which a field that a reader uses
# has another type is no record, is left out and counted, and the report says why. Fields may be missing, and there may
# be others. Of the columns, one that has another length than its names, or a value that is no number, is a missing
# number. Names are texts and nothing more: whoever shows them escapes them.

from __future__ import annotations

import functools
import math
import re
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json

#: What columns are of: parameters and modules.
KINDS = ("param", "module")
#: Why a line is none, if it may be the first part of a record.
NO_JSON = "it is no JSON"

Number = float | None
Whole = Annotated[int, Field(gt=-(2**53), lt=2**53)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
_NOT_FINITE = ("nan", "inf", "-inf")
_FINGERPRINT = re.compile("([0-9a-f]{16})+")
_UNLIKE = {
    "missing": "is missing",
    "int_type": "is no whole number",
    "float_type": "is no number",
    "string_type": "is no text",
    "string_unicode": "is no text",
    "list_type": "is no list",
    "model_type": "is no object",
}


class LoggedObject(BaseModel):
    """An object in a record; it may have more keys."""

    model_config = ConfigDict(extra="allow", strict=True)


class About(LoggedObject):
    engine: str = ""
    ranks: Annotated[int, Field(ge=1, lt=2**31)] = 1
    parameters: Whole = 0
    every: Whole = 1
    rules: list[str] = []


class Names(LoggedObject):
    param: list[str] = []
    module: list[str] = []
    called: list[int] = []
    group: list[int] = []


class Place(LoggedObject):
    """A parameter whose gradient was not finite."""

    param: str
    rank: Rank | None = None
    before: str = ""


_Of = TypeVar("_Of")


class _Field(Generic[_Of]):
    """A field that readers use: its type in the schema, and its value where a record has none."""

    def __init__(self, name: str, of: Any, missing: _Of) -> None:
        self.name, self.of, self._missing = name, of, missing

    @overload
    def __get__(self, record: None, owner: type) -> _Field[_Of]: ...
    @overload
    def __get__(self, record: dict[str, Any], owner: type) -> _Of: ...

    def __get__(self, record: dict[str, Any] | None, owner: type) -> Any:
        return self if record is None else record.get(self.name, self._missing)


def _number(name: str) -> _Field[Number]:
    return _Field(name, Number, None)


def _rank(name: str) -> _Field[int | None]:
    return _Field(name, Rank | None, None)


class Record(dict[str, Any]):
    """The entries that a log has of one step, by name. Each entry that a detector reads is a field with a type.

    >>> record = Record({"step": 3, "loss": 2.5})
    >>> record.step, record.loss, record.grad_norm, record.nonfinite_at
    (3, 2.5, None, ())
    """

    step = _Field[int]("step", Whole, 0)
    run = _Field[str | None]("run", str, None)
    optimizer = _Field[int | None]("optimizer", Whole, None)
    restart = _Field[int]("restart", Rank, 0)
    time = _Field[float | None]("time", Annotated[float, Field(ge=0, lt=2**37)], None)  # until the year 6325
    about = _Field[dict[str, Any] | None]("about", About, None)
    names = _Field[dict[str, Any] | None]("names", Names, None)
    loss = _number("loss")
    loss_max_rank = _number("loss/max_rank")
    loss_argmax_rank = _rank("loss/argmax_rank")
    grad_norm = _number("grad_norm")
    grad_norm_peak = _number("grad_norm/peak")
    grad_norm_peak_step = _Field[int | None]("grad_norm/peak_step", Whole | None, None)
    grad_norm_peak_rank = _rank("grad_norm/peak_rank")
    grad_norm_max_rank = _number("grad_norm/max_rank")
    grad_norm_mean_rank = _number("grad_norm/mean_rank")
    grad_norm_argmax_rank = _rank("grad_norm/argmax_rank")
    nonfinite = _number("nonfinite")
    nonfinite_at = _Field[Sequence[dict[str, Any]]]("nonfinite_at", list[Place], ())
    nonfinite_ranks = _Field[Sequence[int]]("nonfinite_ranks", list[Rank], ())
    nonfinite_params = _Field[int | None]("nonfinite_params", Whole, None)
    nonfinite_steps = _Field[int | None]("nonfinite_steps", Whole, None)
    nonfinite_since = _Field[int | None]("nonfinite_since", Whole, None)
    skipped = _number("skipped")
    spike = _number("spike")
    rerun = _Field[str]("rerun", str, "")
    rerun_why = _Field[str]("rerun_why", str, "")
    rerun_capture = _Field[Sequence[str]]("rerun_capture", list[str], ())
    rerun_ranks = _Field[Sequence[int]]("rerun_ranks", list[Rank], ())
    blame = _Field[Sequence[str]]("blame", list[str], ())
    replicas_differ = _number("replicas/differ")
    replicas_compared = _number("replicas/compared")
    replicas_steps = _Field[int | None]("replicas/steps", Whole, None)
    replicas_names = _Field[Sequence[str]]("replicas/names", list[str], ())
    replicas_ranks = _Field[Sequence[int]]("replicas/ranks", list[Rank], ())
    loop_lr = _Field[Sequence[float | None]]("loop/lr", list[Number], ())  # None also for what is not finite
    loop_weight_decay = _Field[Sequence[float | None]]("loop/weight_decay", list[Number], ())
    loop_trained = _Field[int | None]("loop/trained", Whole, None)
    loop_began = _Field[Sequence[str]]("loop/began", list[str], ())
    loop_ended = _Field[Sequence[str]]("loop/ended", list[str], ())
    loop_training = _Field[bool | None]("loop/training", bool, None)
    loop_inputs = _Field[int | None]("loop/inputs", Whole, None)
    loop_micro_batches = _Field[int | None]("loop/micro_batches", Whole, None)
    loop_scale = _number("loop/scale")
    loop_seconds = _number("loop/seconds")
    replicas_at = _Field[Sequence[str]]("replicas/at", list[str], ())


_FIELDS = {field.name: field.of for field in vars(Record).values() if isinstance(field, _Field)}
_Schema = create_model(
    "_Schema", __base__=LoggedObject, **{name: (of, ... if name == "step" else None) for name, of in _FIELDS.items()}
)  # type: ignore[call-overload]


def record_of(line: bytes) -> Record:
    """The record in a line. Numbers that are not finite are floats, and columns of numbers are arrays.

    For a line that is none ValueError says why. See [Note: a log is not trusted].

    >>> record_of(b'{"step": 3, "loss": "nan", "param": {"grad_norm": [1, "inf", null]}}')
    {'step': 3, 'loss': nan, 'param': {'grad_norm': array('d', [1.0, inf, nan])}}
    >>> record_of(b'{"step": 3, "about": {"ranks": "two"}}')
    Traceback (most recent call last):
    ValueError: about.ranks is no whole number
    """
    try:
        found = from_json(line)
    except ValueError:
        raise ValueError(NO_JSON) from None
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    columns = {of: _columns(of, found.pop(of)) for of in KINDS if of in found}
    record = Record({name: _value(name, value) for name, value in found.items()})
    if "grad_norm/peak" in record and record.grad_norm_peak_step is None:
        raise ValueError("grad_norm/peak_step is missing")
    try:
        _Schema.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where} {_UNLIKE.get(first['type'], 'is out of range')}") from None
    return Record(record | columns)


def _value(name: str, value: Any) -> Any:
    if _is_label(name):
        if value is not None and (type(value) is not int or abs(value) >= 2**53):
            raise ValueError(f"{name} is no whole number")
    elif isinstance(value, list) and name in (Record.loop_lr.name, Record.loop_weight_decay.name):
        return [None if each in _NOT_FINITE else each for each in value]
    elif name.endswith("/of_ranks"):
        return _of_ranks(name, value)
    elif isinstance(value, int) and abs(value) >= 2**1000:  # which is no float
        raise ValueError(f"{name} is out of range")
    return float(value) if value in _NOT_FINITE else value


def _of_ranks(name: str, value: Any) -> dict[str, float | None]:
    """The number of each rank."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")
    for rank, found in value.items():
        if not rank.isdecimal() or not (
            found is None
            or isinstance(found, float)
            or (type(found) is int and abs(found) < 2**53)
            or found in _NOT_FINITE
        ):
            raise ValueError(f"{name}.{rank} is no number of a rank")
    return {rank: None if found is None else float(found) for rank, found in value.items()}


@functools.lru_cache(maxsize=2**16)
def _is_label(name: str) -> bool:
    from disthooks.grads.sinks.base import meaning

    return name not in _FIELDS and meaning(name) == "label"


def _columns(of: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{of} is no object")
    for name, column in found.items():
        if not isinstance(column, list):
            raise ValueError(f"{of}.{name} is no list")
        if not name.startswith("fingerprint/"):
            try:
                found[name] = packed(column)
            except OverflowError:
                raise ValueError(f"{of}.{name} is out of range") from None
        elif not all(each is None or (isinstance(each, str) and _FINGERPRINT.fullmatch(each)) for each in column):
            raise ValueError(f"{of}.{name} is no list of fingerprints")
    return found


def packed(column: list[Any]) -> array[float]:
    """The numbers of a column: NaN where there is none, and infinity where it is not finite.

    A long log has millions of numbers, and a list of floats takes four times the memory.
    """
    try:
        return array("d", column)
    except TypeError:  # some are no numbers
        return array("d", map(_cell, column))


def _cell(value: Any) -> float:
    if not isinstance(value, (int, float)):
        return math.inf if value in _NOT_FINITE else math.nan
    return float(value) if math.isfinite(value) else math.inf
