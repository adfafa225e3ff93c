"""The laws on another device than the CPU: see switch.py."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import switch
from switch import on_device  # noqa: F401

switch.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    switch.mark(items)
