"""Fixtures that every test may use."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).parent / folder) for folder in ("ranks", "laws")]

from harness import Ranks  # noqa: E402

import disthooks as dh  # noqa: E402

# The models of the tests are small: what they save has to go to disk all the same (harness.py has the same line).
dh.OnDisk.worth = 4096


#: They read the command line when they are imported: no modules to look for examples in.
collect_ignore_glob = ["launch/scripts/*"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two gloo processes; ``ranks(function, *args)`` is the list of what ``function(rank, *args)`` returned."""
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture
def four() -> Ranks:
    """Four of them, which start when they are first called and then stay up too."""
    from proof import FOUR

    return FOUR
