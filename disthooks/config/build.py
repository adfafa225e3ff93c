"""Checks an entry with a ``kind``, and makes its object."""

# [Note: checked when read, made when attached]
# The kinds, names and values of all entries are checked when a configuration is read, so that a wrong argument is an
# error with its line, before anything is attached. Some arguments are checked by the constructor only. So the object is
# made once as a check, and thrown away; rules, statistics and sinks are made again for each attachment. Two sorts of
# sinks are not made as a check: those that need the engine, which is not there yet, and those that are written as
# `package.module:Class`, because the constructor of a user's class may open a file or a connection.

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from disthooks._registry import NOUNS, Kind, UnknownKindError, base_of, find_kind, kind_names, near
from disthooks.config.source import Expansion, Path, Source, is_path
from disthooks.errors import ConfigError, DisthooksError
from disthooks.grads.rules.base import Rule

_ELSEWHERE = {
    "Functions": "no file can hold its two functions: write a class of your own, kind: package.module:Class",
}


def kind_of(name: str, noun: str) -> Kind:
    """The kind of ``noun`` with this name: one of the registry, or a class written as ``package.module:Class``.

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
    # A name that is right for another noun gets no "did you mean": the user did not misspell it.
    raise UnknownKindError(
        f"{name!r} is {f'a {other}, ' if other else ''}no {noun}{near('' if other else name, kind_names(noun))}"
    )


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module may raise anything when it is imported
        text = " ".join(str(error).split())
        # The texts of these two classes are clear without the name of the class.
        if not isinstance(error, (ImportError, AttributeError)):
            text = f"{type(error).__name__}: {text}"
        raise UnknownKindError(f"kind {name!r} cannot be imported: {text}") from error
    if not callable(found):
        raise UnknownKindError(f"kind {name!r} is no class: it is {type(found).__name__}")
    target: Callable[..., Any] = found
    return target


@dataclass(frozen=True, eq=False)
class BuildSpec:
    """A function that makes the object of one entry. It is called once for each attachment.

    ``arguments`` are those of the file, without the one that is given when the object is attached.
    """

    kind: Kind
    arguments: Mapping[str, Any]
    source: Source
    path: Path

    def __call__(self, model: object = None) -> Any:
        """Make the object."""
        if inspect.isclass(self.kind.target):
            self._check(self.kind.target, issubclass)
        given = {} if self.kind.given is None else {self.kind.given: model}
        try:
            made = self.kind.target(**self.arguments, **given)
        except DisthooksError as error:
            raise ConfigError(self.source.say(self.path, f": {error}")) from None
        except Exception as error:  # a user's class may raise anything
            text = " ".join(str(error).split())
            message = self.source.say(self.path, f": {self.kind.name} raised {type(error).__name__}: {text}")
            raise ConfigError(message) from error
        self._check(made, isinstance)
        return made

    def _check(self, made: Any, is_of: Any) -> None:
        # A rule may be a plain function, and a sink is any function of a dict, so these need no base class.
        base: Any = base_of(self.kind.noun) or Callable
        if not is_of(made, base) and not (base is Rule and is_of(made, Callable)):
            wanted = "a function of a dict" if base is Callable else f"a subclass of {base.__module__}.{base.__name__}"
            self.source.fail(self.path, f": {self.kind.name} is no {self.kind.noun}: {wanted} is needed")


class SpecBuilder:
    def __init__(self, source: Source, expand: Expansion) -> None:
        self._source, self._expand = source, expand

    def spec(self, entry: Mapping[str, Any], noun: str, path: Path) -> BuildSpec:
        """Check ``entry`` and return its spec; see [Note: checked when read, made when attached]."""
        # Only reading a file needs pydantic, so it is imported here and not with the package.
        from disthooks.config.schema import WrongArgumentError, check_arguments

        kind = self._kind(entry, noun, path)
        hints = kind.hints()
        given = {key: value for key, value in entry.items() if key != "kind"}
        try:
            # The names are checked first, because each value below is made by the annotation of its argument.
            check_arguments(kind, given, names_alone=True)
            arguments = {
                key: self._value(key, value, hints.get(key), noun, (*path, key)) for key, value in given.items()
            }
            check_arguments(kind, arguments)
        except WrongArgumentError as error:
            self._source.fail((*path, *error.path), str(error))
        made = BuildSpec(kind, arguments, self._source, path)
        # Sinks that need the engine, and a user's own sinks, are not made as a check.
        if noun != "sink" or (kind.given is None and ":" not in kind.name):
            made()
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
        """The value of an argument: entries in it as objects, names of dtypes as dtypes, paths with their parts."""
        if isinstance(value, list):
            return [self._value(key, each, hint, noun, (*path, i)) for i, each in enumerate(value)]
        if isinstance(value, Mapping) and "kind" in value:
            return self.spec(value, _noun_in(hint, key, noun), path)()
        if not isinstance(value, str):
            return value
        if hint is torch.dtype or key == "dtype":
            dtype = getattr(torch, value.removeprefix("torch."), None)
            if isinstance(dtype, torch.dtype):
                return dtype
            short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
            names = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
            advice = f"; did you mean {short[value]!r}?" if value in short else near(value, names)
            self._source.fail(path, f": {value!r} is no dtype of torch{advice}")
        return self._expand(value, path) if is_path(key, hint) else value


def _noun_in(hint: Any, key: str, noun: str) -> str:
    """The noun of an entry inside another one: from the annotation, else from the argument's name, else ``noun``."""
    text = str(hint)
    for other, its in NOUNS.items():
        if its.base is not None and its.base.replace(":", ".") in text:
            return other
    return key.removesuffix("s") if key.removesuffix("s") in NOUNS else noun
