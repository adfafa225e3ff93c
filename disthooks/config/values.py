"""Whether a value of a configuration is what a parameter's annotation asks for."""

from __future__ import annotations

import collections.abc
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

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
