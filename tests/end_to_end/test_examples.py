"""Every example runs alone and proves what it shows; three as real processes too."""

from __future__ import annotations

import pathlib
import runpy
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("[0-9]*.py"))


def test_there_are_examples() -> None:
    """A number belongs to one example for ever: docs name it. Those that are missing became lessons of the course."""
    assert len(EXAMPLES) >= 13
    assert len({path.name[:2] for path in EXAMPLES}) == len(EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_asserts(path: pathlib.Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 80
    assert any(line.lstrip().startswith("assert ") for line in lines)


#: One of saved tensors and one of gradients.
OFTEN = ("01_data_parallel", "07_gradient_statistics")


@pytest.mark.full_tier(path=tuple(path for path in EXAMPLES if path.stem not in OFTEN))
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    with torch.random.fork_rng():
        try:
            runpy.run_path(str(path), run_name="__main__")
        except subprocess.CalledProcessError:
            # Only if a rank ended with signal 6 after its script was done, by a fault of torch: docs/upstream/index.md.
            said = capfd.readouterr().err
            if "terminate called without an active exception" not in said or "[rank" in said:
                pytest.fail(said)
            runpy.run_path(str(path), run_name="__main__")


@pytest.mark.full_tier
@pytest.mark.parametrize("path", EXAMPLES[5::6], ids=lambda path: path.stem)
def test_it_runs_as_a_process_from_anywhere(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    said = [
        line for line in done.stderr.splitlines() if not line.startswith("disthooks: the configuration: attached to")
    ]
    assert said == []
