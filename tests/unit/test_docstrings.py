"""Each public method has a docstring, unless it overrides one: ruff cannot tell the two apart, so D102 is off."""

from __future__ import annotations

import importlib
import inspect
import pathlib
from collections.abc import Iterator

import pytest

import disthooks

PACKAGE = pathlib.Path(disthooks.__file__).parent


def _modules() -> Iterator[str]:
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).with_suffix("").as_posix()
        if not path.endswith("__main__"):
            yield ".".join(["disthooks", *path.removesuffix("/__init__").split("/")]).removesuffix(".__init__")


@pytest.mark.parametrize("name", _modules())
def test_public_methods_that_override_nothing_are_described(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} needs a package that is not installed: {error}")
    missing = []
    for kind in vars(module).values():
        if not inspect.isclass(kind) or kind.__module__ != name or kind.__name__.startswith("_"):
            continue
        for method, value in vars(kind).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
            if method.startswith("_") or not inspect.isfunction(function) or function.__doc__:
                continue
            if not any(method in vars(base) | inspect.get_annotations(base) for base in kind.__mro__[1:]):
                missing.append(f"{kind.__name__}.{method}")
    assert missing == []
