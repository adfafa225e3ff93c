"""The lessons in docs/course/: the Python blocks of a page run in order in one process. Their output is on the page."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.support import ROOT

FOLDER = ROOT / "docs" / "course"
PAGES = sorted(path.name for path in FOLDER.glob("*.md"))
LESSONS = [page for page in PAGES if page[0].isdigit()]
_FENCED = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)```$\n?", re.MULTILINE)


class Block(NamedTuple):
    """One fenced Python block, and the output that the page shows of it.

    Attributes:
        line: of its first line.
        text: what is in it.
        shown: the block of the language ``text`` that directly follows it; empty if there is none.
    """

    line: int
    text: str
    shown: str


def _blocks(page: str) -> list[Block]:
    text = (FOLDER / page).read_text()
    found = list(_FENCED.finditer(text))
    blocks = []
    for i, it in enumerate(found):
        if it[1] != "python":
            continue
        following = found[i + 1] if i + 1 < len(found) else None
        follows = following is not None and following[1] == "text" and not text[it.end() : following.start()].strip()
        blocks.append(Block(text[: it.start()].count("\n") + 2, it[2], following[2] if follows and following else ""))
    return blocks


def _told(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


# All output of a block belongs to it, also that of threads. Its processes write nothing.
RUNNER = """
import contextlib, io, json, sys
page, blocks = json.load(sys.stdin)
names, outputs = {"__name__": "__main__"}, []
for line, text, _ in blocks:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile("\\n" * (line - 1) + text, page, "exec"), names)
    outputs.append(output.getvalue())
json.dump(outputs, sys.stdout)
"""


@pytest.mark.dist
@pytest.mark.full_tier
@pytest.mark.parametrize("page", LESSONS)
def test_a_lesson_prints_what_it_shows(page: str, tmp_path: pathlib.Path) -> None:
    blocks = _blocks(page)
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    env = os.environ | more
    command, given = [sys.executable, "-W", "ignore", "-c", RUNNER], json.dumps([page, blocks])
    done = subprocess.run(command, cwd=tmp_path, env=env, input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for block, output in zip(blocks, json.loads(done.stdout), strict=True):
        # Also a block that prints nothing is compared, so what is printed is always shown.
        assert _told(output) == _told(block.shown), f"{page}:{block.line}"


def test_there_are_twelve_lessons_and_the_index_has_each() -> None:
    assert [page[:2] for page in LESSONS] == [f"{i:02}" for i in range(1, 13)]
    index = (FOLDER / "index.md").read_text()
    assert re.findall(r"\]\((\d\d-[^)]*\.md)\)", index) == LESSONS


@pytest.mark.parametrize("page", LESSONS)
def test_a_lesson_has_its_parts_and_leads_to_the_next(page: str) -> None:
    text = (FOLDER / page).read_text()
    assert text.startswith(f"# Lesson {int(page[:2])}: ")
    parts = re.findall(r"^## (Plain torch|What goes wrong|With disthooks|To remember)", text, re.MULTILINE)
    assert list(dict.fromkeys(parts)) == ["Plain torch", "What goes wrong", "With disthooks", "To remember"]
    following = dict(zip(LESSONS, [*LESSONS[1:], "seeds.md"], strict=True))[page]
    assert f"]({following})" in text.rpartition("## To remember")[2]
