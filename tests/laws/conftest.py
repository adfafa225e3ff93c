"""The laws on another device than the CPU: see tests/support/switch.py."""

from __future__ import annotations

import pytest

from tests.support import switch
from tests.support.switch import on_device  # noqa: F401

switch.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    switch.mark(items)
