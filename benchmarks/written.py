"""The JSON of a benchmark that is written again and again while it runs."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


def write(path: pathlib.Path, found: Mapping[str, Any]) -> None:
    """All of ``found`` in place of what was there: a process that is killed meanwhile leaves one or the other."""
    temporary = path.with_suffix(".part")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(temporary, path)


def reason(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
