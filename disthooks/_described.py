"""A text that says what an object was made of, equal in every process that made it alike: ranks compare such texts."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

# [Note: what ranks compare]
# `repr` is no ground to compare ranks on: the order of a set of strings depends on the hash seed of its process, a
# tensor shows its device and its values, an object without a repr shows its address. So each kind of value has its own
# text here. A tensor is described by its dtype alone: a mask that a user gives to a function is this rank's own, has
# the shape of this rank's part, and lies on this rank's device. Of an object that is none of the kinds known here only
# the class counts.


def described(value: Any, _inside: tuple[int, ...] = ()) -> str:
    """What ``value`` was made of: scalars, containers, dataclasses, functions, partial functions, and their parts.

    >>> described({"*.weight", "*.bias"})
    "{'*.bias', '*.weight'}"
    >>> described(functools.partial(max, 2, default=torch.ones(3)))
    'partial(builtins.max, 2, default=tensor(torch.float32))'
    """
    if id(value) in _inside:  # it holds itself
        return "..."
    part = functools.partial(described, _inside=(*_inside, id(value)))
    for kinds, text in _TEXTS:
        if isinstance(value, kinds):
            return text(value, part)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        return f"{type(value).__qualname__}({', '.join(f'{name}={part(getattr(value, name))}' for name in shown)})"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None) or ''}.{named.__qualname__}".lstrip(".")


def _partial(value: functools.partial[Any], part: Callable[[Any], str]) -> str:
    given = [*map(part, value.args), *(f"{name}={part(each)}" for name, each in value.keywords.items())]
    return f"partial({', '.join([part(value.func), *given])})"


_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, os.PathLike)
_TEXTS: list[tuple[Any, Callable[[Any, Callable[[Any], str]], str]]] = [
    (_SCALARS, lambda value, part: repr(value)),
    (torch.Tensor, lambda value, part: f"tensor({value.dtype})"),
    (torch.device, lambda value, part: f"device({value.type})"),
    (functools.partial, _partial),
    (Mapping, lambda value, part: "{" + ", ".join(f"{part(k)}: {part(v)}" for k, v in value.items()) + "}"),
    (Set, lambda value, part: "{" + ", ".join(sorted(map(part, value))) + "}"),
    ((list, tuple), lambda value, part: "[" + ", ".join(map(part, value)) + "]"),
]
