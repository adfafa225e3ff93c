"""README's own lines run, as they stand, in an empty folder."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import disthooks as dh

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_runs(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(_blocks("python")))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stored " in done.stdout
    assert (tmp_path / "runs/gradients.jsonl").read_text().count("\n") == 1


def test_the_yaml_is_read(tmp_path: pathlib.Path) -> None:
    (block,) = _blocks("yaml")
    file = tmp_path / "hooks.yaml"
    file.write_text(block)
    plan = dh.from_config(file)
    assert plan.saves[0][0] == ("layers.*",)


def test_nothing_is_left_to_be_filled_in() -> None:
    assert "_TABLE" not in README
