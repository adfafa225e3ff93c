"""docs/architecture.md says what the code is: its picture, its ways, its links, and the Notes that the code cites."""

from __future__ import annotations

import collections
import re
import sys

from tests.support import ROOT

sys.path.append(str(ROOT / "tools"))
import architecture
from package import Package

PACKAGE = Package(ROOT / "disthooks")
TEXT = architecture.PAGE.read_text()
WAYS = [line for line in TEXT.splitlines() if re.match(r"\| \[\w+/", line) and line.count("|") == 4 and "`" in line]


def test_it_is_what_the_code_is() -> None:
    for path, make in ((architecture.PICTURE, architecture.picture), (architecture.PAGE, architecture.page)):
        before = path.read_text()
        assert make(PACKAGE, before) == before, "run make architecture"


def test_a_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 60
    assert [link for link in links if not (architecture.PAGE.parent / link).exists()] == []


def defined(path: str) -> set[str]:
    """The names of all classes, functions and methods of a file."""
    file = PACKAGE.by_name[path.removesuffix(".py").replace("/", ".")]
    return {node.name for node in (*file.classes(), *file.functions())}


def test_what_is_called_on_a_way_is_there() -> None:
    assert len(WAYS) > 15
    for row in WAYS:
        _, files, called, _ = (cell.strip() for cell in row.split("|")[:4])
        paths = re.findall(r"\]\(\.\./(disthooks/[^)]+\.py)\)", files)
        there = set().union(*map(defined, paths))
        names = set(re.findall(r"`(\w+)`", called))
        assert names <= there, f"{names - there} in {paths}"
    for path, name in re.findall(r"\]\(\.\./(disthooks/[^)]+\.py)\) \(`(\w+)`\)", TEXT):
        assert name in defined(path), f"{name} in {path}"


def test_a_note_that_is_cited_is_there_once_and_is_cited() -> None:
    made, cited = architecture.notes(PACKAGE)
    names = collections.Counter(note.name for note in made)
    assert {name: times for name, times in names.items() if times > 1} == {}
    assert [note for note in cited if note.name not in names] == []
    assert sorted(names.keys() - {note.name for note in cited}) == [], "cite them where the code depends on them"
    in_docs = {
        " ".join(name.split())
        for path in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"(?<!`)\[Note: ([^\]]+)\]", path.read_text())
    }
    assert in_docs <= names.keys()
