"""What is public has a docstring: what ``disthooks`` exports, each kind, each base class, and their public methods.

A method that overrides one needs none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import disthooks
from disthooks._registry import NOUNS, base_of, own_kinds


def _public() -> Iterator[tuple[str, Any]]:
    yield from ((name, getattr(disthooks, name)) for name in disthooks.__all__)
    yield from ((f"the base of {noun}", base) for noun in NOUNS if (base := base_of(noun)) is not None)
    yield from ((kind.name, kind.made or kind.target) for noun in NOUNS for kind in own_kinds(noun))


@pytest.mark.parametrize(("name", "value"), list(_public()))
def test_what_is_public_is_described(name: str, value: Any) -> None:
    assert isinstance(value, str) or inspect.getdoc(value), name
    if not inspect.isclass(value):
        return
    missing = []
    for method, each in vars(value).items():
        function = getattr(each, "fget", None) or getattr(each, "__func__", None) or each
        if method.startswith("_") or not inspect.isfunction(function) or function.__doc__:
            continue
        if not any(method in vars(base) | inspect.get_annotations(base) for base in value.__mro__[1:]):
            missing.append(method)
    assert missing == []
