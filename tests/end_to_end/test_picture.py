"""README's pictures are made by a script, in light and in dark."""

from __future__ import annotations

import pathlib
import struct
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.browser import find_browser


@pytest.mark.full_tier
def test_the_pictures_of_readme_are_made(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    find_browser()
    command = [sys.executable, str(ROOT / "tools/picture.py"), "--layers", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("explain", "report"):
        light, dark = ((tmp_path / f"{name}-{scheme}.png").read_bytes() for scheme in ("light", "dark"))
        shown = [(ROOT / f"docs/img/{name}-{scheme}.png").read_bytes() for scheme in ("light", "dark")]
        sizes = {struct.unpack(">II", picture[16:24]) for picture in (light, dark, *shown)}  # of the header of a file
        assert sizes == {(1120, 900)}
        assert light != dark
