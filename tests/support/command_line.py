"""The command line in this process and in one of its own, and files for it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from disthooks.run.cli.app import app
from tests.support import ROOT

JOBS = ROOT / "tests" / "support" / "jobs"
BUILT = str(JOBS / "built.py")
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{JOBS}"}
MIB = 1 << 20


def run(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def process(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "disthooks", *map(str, words)]
    return subprocess.run(call, capture_output=True, text=True, check=False, timeout=300, **({"env": ENV} | more))


def hooks(folder: pathlib.Path, text: str) -> pathlib.Path:
    file = folder / "hooks.yaml"
    file.write_text(text.replace("{folder}", str(folder)))
    return file
