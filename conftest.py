"""The tests' own plugins; that this file is here also puts the repository on ``sys.path`` for pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.support.tiers", "tests.support.failures"]


@pytest.fixture(autouse=True)
def _no_kind_outlives_its_test() -> Iterator[None]:
    """A kind that a test, or an example in a docstring, registers is not there in later tests of the same worker."""
    from disthooks._kinds import KINDS
    from disthooks._registry import _registered

    before = {noun: set(kinds) for noun, kinds in _registered.items()}
    yield
    for noun, kinds in _registered.items():
        for name in kinds.keys() - before[noun] - KINDS[noun].keys():  # those of disthooks stay: they are made once
            del kinds[name]
