"""An entry with a ``kind``, checked, and what makes its object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from disthooks.config.kinds import KINDS, NOUNS, Kind, Unknown, kind_of, near
from disthooks.config.paths import Expansion
from disthooks.config.source import Path, Source
from disthooks.config.values import choices, fits, is_path, shown
from disthooks.errors import ConfigError, DisthooksError
from disthooks.grads.rules.base import Rule

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
        base: Any = NOUNS[self.kind.noun] or Callable
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
        parameters, hints = kind.parameters(), kind.hints()
        given = {key: value for key, value in entry.items() if key != "kind"}
        for key in given:
            if key not in parameters and not kind.open:
                self._source.fail((*path, key), f" is no argument of {kind.name}{near(key, parameters)}")
        arguments = {key: self._value(key, value, hints.get(key), noun, (*path, key)) for key, value in given.items()}
        missing = [name for name, it in parameters.items() if _needed(it) and name not in given]
        if missing:
            self._source.fail(path, f": {kind.name} needs {' and '.join(map(repr, missing))}")
        for key, value in arguments.items():
            self._check(key, value, hints.get(key), (*path, key))
        made = Recipe(kind, arguments, self._source, path)
        if noun != "sink" or (kind.given is None and ":" not in kind.name):
            made()  # a sink of one's own may open something
        return made

    def _kind(self, entry: Mapping[str, Any], noun: str, path: Path) -> Kind:
        if "kind" not in entry:
            self._source.fail(path, f" has no kind; a {noun} is one of {', '.join(sorted(KINDS[noun]))}")
        name = entry["kind"]
        if not isinstance(name, str):
            self._source.fail((*path, "kind"), f" is a name, got {name!r}")
        try:
            return kind_of(name, noun)
        except Unknown as error:
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
    names = {name for kinds in KINDS.values() for name in kinds}
    word = next((each for each in given if isinstance(each, str) and each in names), None)
    return f"; did you mean {{kind: {word}}}?" if word else ""


def _noun_in(hint: Any, key: str, noun: str) -> str:
    """What an entry inside another one is: by the annotation, else by the name of the argument, else as outside."""
    text = str(hint)
    for other, base in NOUNS.items():
        if base is not None and f"{base.__module__}.{base.__name__}" in text:
            return other
    return key.removesuffix("s") if key.removesuffix("s") in NOUNS else noun
