"""The front door: ``__all__`` is sorted, complete and documented, and every example in it runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import disthooks as dh
from disthooks._registry import NOUNS, base_of, own_kinds
from tests.support import ROOT

PUBLIC = [name for name in dh.__all__ if name != "__version__"]


def _for_type_checkers() -> dict[str, str]:
    """The module of each name that ``disthooks/__init__.py`` imports for type checkers."""
    tree = ast.parse((ROOT / "disthooks/__init__.py").read_text())
    imports = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    named = [node for node in imports if isinstance(node, ast.ImportFrom) and node.module != "disthooks"]
    return {alias.name: str(node.module) for node in named for alias in node.names}


def test_all_is_sorted_and_complete() -> None:
    assert list(dh.__all__) == sorted(dh.__all__)
    assert {*_for_type_checkers(), "__version__"} == set(dh.__all__)


@pytest.mark.parametrize(("name", "module"), _for_type_checkers().items())
def test_a_name_is_what_type_checkers_take_it_for(name: str, module: str) -> None:
    assert getattr(dh, name) is getattr(importlib.import_module(module), name)


def test_a_name_is_imported_when_it_is_used() -> None:
    call = "import sys, disthooks; print('torch' in sys.modules, 'OnDisk' in dir(disthooks)); disthooks.OnDisk"
    call += "; print('torch' in sys.modules, 'ClipNorm' in vars(disthooks), 'disthooks.grads' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False True", "True False False"]


def test_a_star_import_gives_every_name() -> None:
    found: dict[str, object] = {}
    exec("from disthooks import *", found)
    assert set(dh.__all__) <= set(found)


def test_modules_come_when_they_are_asked_for() -> None:
    """Lines of README as they are typed; nothing of it is imported before."""
    call = "import sys, disthooks; print([m for m in sys.modules if m.startswith('disthooks.')])"
    call += "; print(disthooks.config.find, disthooks.integrations, 'integrations' in dir(disthooks))"
    call += "; print('transformers' in sys.modules, dir(disthooks.integrations)[-1])"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    assert first == "[]"
    assert second.startswith("<function locate_config")  # its name inside the library
    assert (second.split()[-1], third) == ("True", "False transformers")
    with pytest.raises(AttributeError, match="there are accelerate, lightning, transformers"):
        dh.integrations.deepspeed  # noqa: B018


def test_no_name_is_hidden_by_a_file() -> None:
    files = {path.stem for path in (ROOT / "disthooks").iterdir()}
    assert not files & set(dh.__all__)


def test_the_front_door_is_small() -> None:
    """Verbs, stores, codecs and rules; what functions return is imported from its module."""
    assert len(PUBLIC) <= 40


@pytest.mark.parametrize("name", dh._ELSEWHERE)
def test_a_name_that_is_elsewhere_says_where(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': ") as error:
        getattr(dh, name)
    given = re.search(r"import it from (disthooks[.\w]+)", str(error.value))
    assert given is None or hasattr(importlib.import_module(given[1]), name)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_documented_with_an_example(name: str) -> None:
    value = getattr(dh, name)
    doc = inspect.getdoc(value) or ""
    assert doc, f"{name} has no docstring"
    if not isinstance(value, types.ModuleType):
        assert ">>>" in doc, f"the docstring of {name} has no example that doctest could run"
    written = (ROOT / "README.md").read_text() + "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert name in written, f"{name} is in no page of docs and not in README"


def _public() -> Iterator[tuple[str, Any]]:
    """What has a docstring: what ``disthooks`` exports, each kind and each base class."""
    yield from ((name, getattr(dh, name)) for name in dh.__all__)
    yield from ((f"the base of {noun}", base) for noun in NOUNS if (base := base_of(noun)) is not None)
    yield from ((kind.name, kind.made or kind.target) for noun in NOUNS for kind in own_kinds(noun))


@pytest.mark.parametrize(("name", "value"), list(_public()))
def test_what_is_public_is_described(name: str, value: Any) -> None:
    """With its public methods; a method that overrides one needs no docstring."""
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
