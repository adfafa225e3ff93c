"""What users, files and checkpoints rely on is written down beside this file, and must not change by accident.

For a change that is meant, ``GOLDEN_WRITE=1`` in front of pytest writes the files anew.
"""

from __future__ import annotations

import difflib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden import golden_commands, golden_errors, golden_runs, golden_signatures

HERE = pathlib.Path(__file__).parent
#: What is computed and compared, and into which file it is written.
GOLDEN: dict[str, Callable[[], Any]] = {
    "attributes": golden_runs.attributes,
    "commands": golden_commands.commands,
    "documents": golden_commands.documents,
    "errors": golden_errors.errors,
    "log_names": golden_runs.names,
    "signatures": golden_signatures.signatures,
    "states": golden_runs.states,
}
HOW = "If the change is meant, run the test with GOLDEN_WRITE=1 and say in CHANGELOG.md what changed."


def text_of(value: Any) -> str:
    """What stands in a golden file: sorted, a name in each line."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def compare(name: str, value: Any) -> None:
    """Fail with what is different from the golden file of that name."""
    file = HERE / f"{name}.json"
    if os.environ.get("GOLDEN_WRITE"):
        file.write_text(text_of(value), encoding="utf-8")
    wanted, found = file.read_text(encoding="utf-8"), text_of(value)
    if wanted != found:
        lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), file.name, "now", lineterm="", n=4)
        pytest.fail("\n".join([*lines, "", HOW]), pytrace=False)


@pytest.mark.parametrize("name", GOLDEN)
def test_it_is_as_it_was(name: str) -> None:
    compare(name, GOLDEN[name]())
