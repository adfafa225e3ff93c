"""The files around the package name what there is: the version, the Pythons, the versions of torch, targets of make."""

from __future__ import annotations

import configparser
import re

import yaml

import disthooks as dh
from tests.support import ROOT


def test_one_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == dh.__version__
    newest = re.search(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == dh.__version__


def test_the_matrix_is_what_is_promised() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    promised = set(re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"]))
    assert min(promised, key=lambda text: int(text[2:])) == config["options"]["python_requires"].removeprefix(">=")
    steps = [step for job in jobs.values() for step in job["steps"]]
    own = {step["with"]["python-version"] for step in steps if "python-version" in step.get("with", {})}
    assert {*jobs["python"]["strategy"]["matrix"]["python"], *own} - {"${{ matrix.python }}"} == promised
    table = (ROOT / "docs/torch.md").read_text()
    for version in jobs["torch"]["strategy"]["matrix"]["torch"]:
        assert re.search(rf"^\| {re.escape(version)}, ", table, re.MULTILINE), version


def test_their_commands_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    files = [".github/workflows/ci.yml", ".github/pull_request_template.md", ".pre-commit-config.yaml"]
    files.append("docs/releases.md")
    for file in files:
        for words in re.findall(r"make ((?:[a-z-]+ ?)+)", (ROOT / file).read_text()):
            assert set(words.split()) <= targets | {"pass"}, (file, words)
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= form.keys()
