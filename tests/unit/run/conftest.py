"""What each test of the command line begins with."""

from __future__ import annotations

import sys
import threading

import pytest

from disthooks.run.cli import doctor, output
from tests.support.command_line import JOBS


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the tests can be imported, nobody's launcher is told of, and no line depends on the clock."""
    monkeypatch.setattr(output, "EVERY", threading.TIMEOUT_MAX)
    monkeypatch.setattr(sys, "path", [str(JOBS), *sys.path])
    for name in doctor.environment():
        monkeypatch.delenv(name)
