"""What the files of laws share: the default device (tests/support/switch.py) and fixtures that several files use."""

from __future__ import annotations

import pathlib

import pytest

from tests.support import switch
from tests.support.stores.faulty import no_collector  # noqa: F401
from tests.support.stores.moving import alone, one_thread, shut  # noqa: F401
from tests.support.stores.pairs import PAIRS, Pair
from tests.support.switch import on_device  # noqa: F401

switch.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    switch.mark(items)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Pair:
    """Each pair of hooks that torch's own cases are run with."""
    return Pair(request.param, tmp_path)
