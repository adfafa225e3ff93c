"""What each test of the command line begins with."""

from __future__ import annotations

import os
import re
import sys
import threading

import pytest

from disthooks.run.cli import output
from tests.support.command_line import JOBS

_OF_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_\w+|DISTHOOKS_\w+|PET_\w+|TORCHELASTIC_\w+"
)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the tests can be imported, nobody's launcher is told of, and no line depends on the clock."""
    monkeypatch.setattr(output, "EVERY", threading.TIMEOUT_MAX)
    monkeypatch.setattr(sys, "path", [str(JOBS), *sys.path])
    for name in [name for name in os.environ if _OF_LAUNCHERS.fullmatch(name)]:
        monkeypatch.delenv(name)
