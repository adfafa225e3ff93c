"""Which tests ``make test`` runs (``pytest --tier first``), and which ``make test-all`` and ``make test-full`` add.

The latter are ``--tier second`` and ``--tier full``, and ``--tier all`` is the first and the second tier. Without the
option everything runs that is named on the command line. The tier of a test is said by the nearest mark, on the test or
on its file, and otherwise by its folder:

- ``@pytest.mark.second_tier``: the test takes long, needs a framework, or is one of many of its kind;
- ``@pytest.mark.full_tier``: only ``make test-full`` runs it, before a release; ``full_tier(ranks=(4,))``: those with
  these parameters. In a file that has this mark, a test with ``second_tier`` still belongs to the second tier;
- ``@pytest.mark.first_tier``: ``make test`` runs it;
- ``@pytest.mark.first_tier(engine=("ddp", "fsdp2"))``: ``make test`` runs it with these parameters only;
- without a mark: the folders in :data:`SECOND` belong to the second tier, all others to the first.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from _pytest.doctest import DoctestModule

from tests.support import ROOT

FIRST, REST, FULL = "first", "second", "full"
#: Folders of the second tier.
SECOND = tuple(
    ROOT / folder
    for folder in (
        "tests/device",
        "tests/engines",
        "tests/gpu",
        "tests/integrations",
        "tests/end_to_end",
        "disthooks/integrations",
    )
)


def is_full(marks: Iterable[pytest.Mark], parameters: Mapping[str, Any]) -> bool:
    """Whether a test with these marks belongs to the full tier."""
    full = [mark.kwargs for mark in marks if mark.name == "full_tier"]
    return any(all(parameters.get(name) in values for name, values in kwargs.items()) for kwargs in full)


def is_first(path: pathlib.Path, marks: Iterable[pytest.Mark], parameters: Mapping[str, Any]) -> bool:
    """Whether a test in the file ``path`` with these marks, the nearest first, belongs to the first tier."""
    for mark in marks:
        if mark.name == "second_tier":
            return False
        if mark.name == "first_tier":
            return all(parameters.get(name) in values for name, values in mark.kwargs.items())
    return not _is_in_second(path)


def _is_in_second(path: pathlib.Path) -> bool:
    return any(path.is_relative_to(folder) for folder in SECOND)


def tier_of(item: pytest.Item) -> str:
    """``"first"``, ``"second"`` or ``"full"``."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    for node in reversed(item.listchain()):  # the test itself, then its class and its file
        if is_full(node.own_markers, parameters):
            return FULL
        if any(mark.name in ("first_tier", "second_tier") for mark in node.own_markers):
            break
    return FIRST if is_first(item.path, item.iter_markers(), parameters) else REST


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=(FIRST, REST, FULL, "all"),
        help="the tests of `make test`, those that `make test-all` or `make test-full` adds, or of `make test-all`",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "first_tier(**parameters): `make test` runs it, if its parameters are among these"
    )
    config.addinivalue_line("markers", "second_tier: `make test-all` runs it, `make test` does not")
    config.addinivalue_line("markers", "full_tier(**parameters): only `make test-full` runs it")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Import no file of the second tier for the first: it could import a framework that the first tier does not run."""
    if config.option.tier != FIRST or collection_path.suffix != ".py" or not _is_in_second(collection_path):
        return None
    return "first_tier" not in collection_path.read_text() or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: pathlib.Path) -> Any:
    """Look for doctests in the library alone."""
    found = yield
    is_test = file_path.is_relative_to(ROOT / "tests")
    return [each for each in found if not (is_test and isinstance(each, DoctestModule))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier that was asked for."""
    asked = config.option.tier
    if asked is None:
        return
    wanted = (FIRST, REST) if asked == "all" else (asked,)
    others = [item for item in items if tier_of(item) not in wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if tier_of(item) in wanted]
