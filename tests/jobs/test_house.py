"""What ``make house`` measures: a small package whose figures are known, and the library's own trips."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT

sys.path.append(str(ROOT / "benchmarks"))

# Files that the page names and the trips do not enter: they attach once, or serve another form of the same way.
NOT_ON_THE_TRIP = {
    "saved/module_class.py",
    "saved/weights.py",
    "saved/stores/staging.py",
    "grads/attach.py",
    "grads/stats/scan.py",
}

FIRST = '''"""A module.

With a docstring of three lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataclasses import dataclass

if TYPE_CHECKING:
    from small import second  # the type checker alone


@dataclass
class Wide:
    """A class."""

    one: int
    two: int

    def method(self) -> int:
        # a comment
        self.three = _used_once()

        return _used_twice() + _used_twice()


def _used_once():
    return 1


def _used_twice():
    return 2
'''
SECOND = """class Wide:
    def __init__(self):
        from small.first import Wide
        self.made = Wide
"""


def test_a_small_package_has_the_figures_that_it_has(tmp_path: pathlib.Path) -> None:
    from house_source import Package, measured

    package = tmp_path / "small"
    package.mkdir()
    for name, text in {"__init__": "", "first": FIRST, "second": SECOND}.items():
        (package / f"{name}.py").write_text(text)
    found = measured(Package(package))
    assert (found["lines"], found["code_lines"], found["docstring_lines"], found["comment_lines"]) == (38, 20, 4, 2)
    assert (found["files"], found["modules"], found["functions"], found["classes"]) == (3, 2, 4, 2)
    assert found["body_lines"] == {"median": 1, "p90": 2, "max": 2}
    assert (found["private_functions_used_once"], found["private_functions"]) == (1, 2)
    assert found["largest_classes"][0] == {"class": "small.first.Wide", "attributes": 3}
    assert found["class_names_used_twice"] == ["Wide"]
    assert found["circles"] == [["small.first", "small.second"]], "TYPE_CHECKING and imports in functions count"


def measure(out: pathlib.Path, *trips: str) -> tuple[dict[str, Any], str]:
    """What ``make house`` writes for ``trips``, each made once, and what it prints."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    script = [sys.executable, str(ROOT / "benchmarks" / "house.py"), "--runs", "1", "--json", str(out)]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [*script, "--trips", *trips], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["trips"].keys() == {*trips}
    for trip in found["trips"].values():
        assert trip["calls"] >= trip["functions"] > trip["files"] > 3
        assert trip["calls"] > trip["switches"] > trip["files"]
    return found, done.stdout


@pytest.mark.full_tier
def test_the_trips_go_through_the_library(tmp_path: pathlib.Path) -> None:
    found, printed = measure(tmp_path / "out.json", "disk", "gradient", "yaml")
    for trip, package in {"disk": "saved", "gradient": "grads", "yaml": "config"}.items():
        assert any(name.startswith(f"{package}/") for name in found["trips"][trip]["names_of_files"])
    # What docs/architecture.md says of the two ways is so: all of the files in the first column are on them.
    _, saved, gradient = (ROOT / "docs" / "architecture.md").read_text().split("## The way of ")
    for trip, text in (("disk", saved), ("gradient", gradient.partition("\n## ")[0])):
        cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| [")]
        files = {name for cell in cells for name in re.findall(r"\]\(\.\./disthooks/([^)]+)\)", cell)}
        assert len(files) > 8
        assert files - set(found["trips"][trip]["names_of_files"]) <= NOT_ON_THE_TRIP
    assert all(place["own_file"] and place["named_in"]["tests"] for place in found["places"].values())
    code = f"{found['source']['code_lines']:,}"
    assert f"| code lines | {code} |" in printed.splitlines()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full_tier
def test_the_trip_of_a_launched_worker(tmp_path: pathlib.Path) -> None:
    found, _ = measure(tmp_path / "out.json", "worker")
    packages = {name.split("/")[0] for name in found["trips"]["worker"]["names_of_files"]}
    assert packages >= {"saved", "engines", "grads", "config"}


def test_figures_stand_beside_older_ones() -> None:
    import house

    older = json.loads((ROOT / "benchmarks" / "results" / "house_before.json").read_text())
    lines = house.table(older | {"source": older["source"] | {"lines": 7}, "trips": {}}, older).splitlines()
    assert lines[0] == "| | before | after |"
    assert f"| lines | {older['source']['lines']:,} | 7 |" in lines
    assert any(line.startswith("| one YAML rule") and line.endswith(" |  |") for line in lines), "what was not measured"
