"""Whether a value of a configuration is what a parameter's annotation asks for.

The names in ``kind:``, and the classes that they stand for.

A limit for weights and saved tensors together on the device of a rank.

An entry with a ``kind``, checked, and what makes its object.
"""

from __future__ import annotations

import collections.abc
import difflib
import importlib
import inspect
import itertools
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from disthooks._match import unwrap_engine
from disthooks._registry import NOUNS, Kind, UnknownKindError, base_of, find_kind, kind_names
from disthooks._tensors import format_bytes, local_part, parse_bytes
from disthooks.config.source import Expansion, Path, Source
from disthooks.errors import ConfigError, DisthooksError
from disthooks.grads.rules.base import Rule
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.stores.base import Functions, Store
from disthooks.saved.stores.tiers import OnDevice, Tiered

_PATHS = ("path", "directory", "log_dir")


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of what ``target`` is called with; none where they cannot be found out.

    >>> hints(torch.nn.Linear)["bias"]
    <class 'bool'>
    """
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except Exception:  # annotations may name anything
        return {}


def is_path(name: str, hint: Any) -> bool:
    """Whether a parameter takes a path: by its name, or since ``os.PathLike`` is among what it takes.

    >>> is_path("directory", None), is_path("where", str | os.PathLike[str]), is_path("limit", int | str)
    (True, True, False)
    """
    return name in _PATHS or any(typing.get_origin(part) is os.PathLike or part is os.PathLike for part in parts(hint))


def parts(hint: Any) -> list[Any]:
    """What a union is of, and what is in the lists of it; ``[hint]`` for anything else."""
    if _union(hint) or typing.get_origin(hint) in (collections.abc.Sequence, collections.abc.Iterable, list, tuple):
        return [part for each in typing.get_args(hint) for part in parts(each)]
    return [hint]


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` may be given for ``hint``; True for annotations that say nothing about plain values.

    >>> fits(1, float), fits(True, int), fits("x", int | None), fits([0.5], tuple[float, ...]), fits("a", Literal["a"])
    (True, False, False, True, True)
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _union(hint):
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in args)
    if origin is os.PathLike:
        return isinstance(value, (str, os.PathLike))
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Iterable):
        return isinstance(value, (list, tuple)) and all(fits(each, args[0]) for each in value) if args else True
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, Mapping)
    if origin is collections.abc.Callable:
        return callable(value)
    return _is(value, hint)


def _is(value: Any, hint: Any) -> bool:
    if hint in (None, types.NoneType):
        return value is None
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if isinstance(hint, type) and hint is not object:
        return isinstance(value, hint)
    return True


def shown(hint: Any) -> str:
    """What is expected, in the words of YAML.

    >>> shown(float | None), shown(Literal["a", "b"]), shown(int | str)
    ('a number or null', "'a' or 'b'", 'a whole number or a text')
    """
    return " or ".join(dict.fromkeys(_named(part) for part in _choices(hint)))


def choices(hint: Any) -> list[str]:
    """The words that a ``Literal`` takes."""
    return [word for part in _choices(hint) if isinstance(part, _Word) for word in [part.word] if isinstance(word, str)]


class _Word(typing.NamedTuple):
    """One value of a ``Literal``."""

    word: Any


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
    torch.dtype: "a dtype such as bfloat16",
    os.PathLike: "a text",
}


def _choices(hint: Any) -> list[Any]:
    if _union(hint):
        return [part for each in typing.get_args(hint) for part in _choices(each)]
    return [_Word(each) for each in typing.get_args(hint)] if typing.get_origin(hint) is Literal else [hint]


def _named(part: Any) -> str:
    if isinstance(part, _Word):
        return repr(part.word)
    origin = typing.get_origin(part)
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Iterable):
        return f"a list, each {shown(typing.get_args(part)[0])}" if typing.get_args(part) else "a list"
    known = _WORDS.get(part) or _WORDS.get(origin)
    return known or f"a {getattr(part, '__name__', str(part)).lower()}"


def _union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


_ELSEWHERE = {
    "Functions": "no file can hold its two functions: write a class of your own, kind: package.module:Class",
    "AtLeast": "write at_least: 4 KiB beside modules",
}


def kind_of(name: str, noun: str) -> Kind:
    """The kind of that name.

    Raises:
        UnknownKindError: when there is none, with the nearest right name, or why a class cannot be imported.

    >>> kind_of("OnCpu", "store").target.__name__, kind_of("disthooks:OnCpu", "store").name
    ('OnCpu', 'disthooks:OnCpu')
    """
    if ":" in name:
        return Kind(name, noun, _imported(name))
    if (kind := find_kind(noun, name)) is not None:
        return kind
    if name in _ELSEWHERE:
        raise UnknownKindError(f"{name!r} cannot be a {noun} here; {_ELSEWHERE[name]}")
    other = next((each for each in NOUNS if each != "engine" and name in kind_names(each)), None)
    # The name of something else was not meant for the one that is spelt nearly like it.
    raise UnknownKindError(
        f"{name!r} is {f'a {other}, ' if other else ''}no {noun}{near('' if other else name, kind_names(noun))}"
    )


def near(name: str, known: Iterable[str]) -> str:
    """The nearest right name, or all there are."""
    known = list(known)
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else f"; there are {', '.join(sorted(known)) or 'none'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The nearest right name, if one is near.

    >>> nearest("onDisk", ["OnCpu", "OnDisk"]), nearest("many", ["OnCpu"])
    ('OnDisk', None)
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not close:  # onDisk, ON_DISK
        folded = {each.lower().replace("_", ""): each for each in known}
        close = difflib.get_close_matches(name.lower().replace("_", ""), list(folded), n=1, cutoff=0.6)
        close = [folded[each] for each in close]
    return close[0] if close else None


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module of one's own may raise anything
        raise UnknownKindError(f"kind {name!r} cannot be imported: {_said(error)}") from error
    if not callable(found):
        raise UnknownKindError(f"kind {name!r} is no class: it is {type(found).__name__}")
    known: Callable[..., Any] = found
    return known


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {text}"


def weights_of(model: nn.Module) -> int:
    """Bytes of parameters and buffers on this rank as the model is now: local shards; on "meta" as if allocated.

    >>> weights_of(nn.Linear(10, 10, device="meta"))
    440
    """
    tensors = itertools.chain(unwrap_engine(model).parameters(), unwrap_engine(model).buffers())
    return sum(_nbytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _nbytes(tensor: torch.Tensor) -> int:
    sharded = getattr(tensor, "ds_tensor", None)  # DeepSpeed's ZeRO 3: the parameter itself is empty
    return local_part(tensor if sharded is None else sharded).nbytes


def stores_within(
    budget: int | str | None, model: nn.Module, saves: Iterable[tuple[Any, Pipeline]], source: Source
) -> Sequence[tuple[Any, Pipeline]]:
    """``saves`` with a first tier on the device in front of every store: what ``budget`` leaves beside the weights.

    All share its limit. Entries with the same store share the tiers too, so that the tensors that are wanted last move.

    Raises:
        ConfigError: when the weights alone are more, or a store cannot be a tier.
    """
    saves = list(saves)
    if budget is None:
        return saves
    device = OnDevice(_left(parse_bytes(budget, "budget"), weights_of(model), source))
    tiers: list[tuple[Store, Tiered]] = []
    found = []
    for number, (patterns, line) in enumerate(saves):
        tiered = next((made for store, made in tiers if store == line.store), None)
        if tiered is None:
            tiered = _tiered(device, line.store, number, source)
            tiers.append((line.store, tiered))
        found.append((patterns, replace(line, store=tiered)))
    return found


def _left(budget: int, weights: int, source: Source) -> int:
    if weights > budget:
        source.fail(
            ("budget",),
            f": {format_bytes(budget)} ({budget} bytes) are less than the parameters and buffers of the model take on "
            f"this rank, {format_bytes(weights)} ({weights} bytes)",
        )
    return budget - weights


def _tiered(device: OnDevice, store: Store, number: int, source: Source) -> Tiered:
    below = store.stores if isinstance(store, Tiered) else (store,)
    path = ("save", number, "store")
    if any(isinstance(tier, OnDevice) for tier in below):
        source.fail(path, ": OnDevice and 'budget' both say how much stays on the device: leave out one of them")
    if any(isinstance(tier, Functions) for tier in below):
        source.fail(path, ": Functions cannot be a tier, so 'budget' cannot be kept: leave it out, or use a store")
    return Tiered(device, *below)


_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, eq=False)
class Recipe:
    """What makes the object of one entry; called once for each time it is attached.

    Attributes:
        kind: what is called.
        arguments: with what, but for what is given when it is attached.
        source: where it was read.
        path: its place there.
    """

    kind: Kind
    arguments: Mapping[str, Any]
    source: Source
    path: Path

    def __call__(self, model: object = None) -> Any:
        """The object; ``model`` is what some sinks need."""
        if inspect.isclass(self.kind.target):
            self._check(self.kind.target, issubclass)
        given = {} if self.kind.given is None else {self.kind.given: model}
        try:
            made = self.kind.target(**self.arguments, **given)
        except DisthooksError as error:
            raise ConfigError(self.source.say(self.path, f": {error}")) from None
        except Exception as error:  # a class of one's own may raise anything
            said = " ".join(str(error).split())
            words = self.source.say(self.path, f": {self.kind.name} raised {type(error).__name__}: {said}")
            raise ConfigError(words) from error
        self._check(made, isinstance)
        return made

    def _check(self, made: Any, is_of: Any) -> None:
        base: Any = base_of(self.kind.noun) or Callable
        if not is_of(made, base) and not (base is Rule and is_of(made, Callable)):
            wanted = "a function of a dict" if base is Callable else f"a subclass of {base.__module__}.{base.__name__}"
            self.source.fail(self.path, f": {self.kind.name} is no {self.kind.noun}: {wanted} is needed")


class Cook:
    """Makes recipes of the entries of one configuration.

    Args:
        source: the configuration.
        expand: what stands for what in paths.
    """

    def __init__(self, source: Source, expand: Expansion) -> None:
        self._source, self._expand = source, expand

    def recipe(self, entry: Mapping[str, Any], noun: str, path: Path) -> Recipe:
        """The recipe of ``entry``; unknown kinds and arguments, and values of the wrong type, are found now."""
        kind = self._kind(entry, noun, path)
        parameters, known = kind.parameters(), hints(kind.target)
        given = {key: value for key, value in entry.items() if key != "kind"}
        for key in given:
            if key not in parameters and not kind.takes_any_name:
                self._source.fail((*path, key), f" is no argument of {kind.name}{near(key, parameters)}")
        arguments = {key: self._value(key, value, known.get(key), noun, (*path, key)) for key, value in given.items()}
        missing = [name for name, it in parameters.items() if _needed(it) and name not in given]
        if missing:
            self._source.fail(path, f": {kind.name} needs {' and '.join(map(repr, missing))}")
        for key, value in arguments.items():
            self._check(key, value, known.get(key), (*path, key))
        made = Recipe(kind, arguments, self._source, path)
        if noun != "sink" or (kind.given is None and ":" not in kind.name):
            made()  # a sink of one's own may open something
        return made

    def _kind(self, entry: Mapping[str, Any], noun: str, path: Path) -> Kind:
        if "kind" not in entry:
            self._source.fail(path, f" has no kind; a {noun} is one of {', '.join(kind_names(noun))}")
        name = entry["kind"]
        if not isinstance(name, str):
            self._source.fail((*path, "kind"), f" is a name, got {name!r}")
        try:
            return kind_of(name, noun)
        except UnknownKindError as error:
            raise ConfigError(self._source.say((*path, "kind"), f": {error}")) from error.__cause__

    def _value(self, key: str, value: Any, hint: Any, noun: str, path: Path) -> Any:
        if isinstance(value, list):
            return [self._value(key, each, hint, noun, (*path, i)) for i, each in enumerate(value)]
        if isinstance(value, Mapping) and "kind" in value:
            return self.recipe(value, _noun_in(hint, key, noun), path)()
        if isinstance(value, str) and (hint is torch.dtype or key == "dtype"):
            return self._dtype(value, path)
        return self._expand(value, path) if isinstance(value, str) and is_path(key, hint) else value

    def _dtype(self, value: str, path: Path) -> torch.dtype:
        found = getattr(torch, value.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
        names = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
        short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
        hint = f"; did you mean {short[value]!r}?" if value in short else near(value, names)
        self._source.fail(path, f": {value!r} is no dtype of torch{hint}")

    def _check(self, key: str, value: Any, hint: Any, path: Path) -> None:
        if hint is None or fits(value, hint):
            return
        words = choices(hint)
        hint_text = near(value, words) if isinstance(value, str) and words else _bare(value)
        self._source.fail(path, f": {shown(hint)} is needed, got {value!r}{hint_text if '?' in hint_text else ''}")


def _needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is _EMPTY and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _bare(value: Any) -> str:
    """The first word in ``value`` that is the name of a kind, as it should be written."""
    given = value if isinstance(value, list) else [value]
    names = {name for noun in NOUNS for name in kind_names(noun)}
    word = next((each for each in given if isinstance(each, str) and each in names), None)
    return f"; did you mean {{kind: {word}}}?" if word else ""


def _noun_in(hint: Any, key: str, noun: str) -> str:
    """What an entry inside another one is: by the annotation, else by the name of the argument, else as outside."""
    text = str(hint)
    for other, its in NOUNS.items():
        if its.base is not None and its.base.replace(":", ".") in text:
            return other
    return key.removesuffix("s") if key.removesuffix("s") in NOUNS else noun
