"""What counts frames of the library does so in a clone in a folder named after it, where all paths have its name."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

#: Tests that ask whether a frame is of the library: they use `tests.support.is_ours`.
COUNTING = ("tests/laws/test_06_nothing_left_interrupted.py", "tests/engines/test_deepspeed.py")


@pytest.mark.full_tier
def test_frames_are_counted_in_a_folder_named_disthooks(tmp_path: pathlib.Path) -> None:
    deepspeed = importlib.util.find_spec("deepspeed")
    assert deepspeed is not None
    assert deepspeed.origin is not None
    clone = tmp_path / "disthooks"
    for folder in ("disthooks", "tests"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.cfg", "pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / file, clone)
    # As with an environment in the clone, the files of DeepSpeed have the name in their paths, too.
    (clone / "installed").symlink_to(pathlib.Path(deepspeed.origin).parents[1])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tier", "first", *COUNTING]
    paths = os.environ | {"PYTHONPATH": f"{clone}{os.pathsep}{clone / 'installed'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=clone, env=paths, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[100%]" in done.stdout
