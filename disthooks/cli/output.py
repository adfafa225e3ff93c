"""Tables and lines for a terminal; a file or a pipe gets them without colours and without folded lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_WIDE = 100_000  # columns of what is no terminal
_COLOURS = {"red": "31", "green": "32", "yellow": "33"}


def console() -> Any:
    """The console on stdout, made at each use: a test may have replaced stdout."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def table(
    rows: Iterable[Sequence[object]], heads: Sequence[str] = (), right: Sequence[int] = (), title: str = ""
) -> Any:
    """A table of texts, without markup; the columns in ``right`` have numbers, which are never cut."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        show_header=bool(heads),
        box=box.SQUARE,
    )
    texts = [tuple(map(str, row)) for row in rows]
    for i in range(max([len(heads), *map(len, texts)])):
        numbers = i in right
        made.add_column(
            Text(heads[i]) if heads else "",
            justify="right" if numbers else "left",
            no_wrap=numbers or (i == 0 and not heads),
            overflow="fold",
        )
    for row in texts:
        made.add_row(*(Text(cell) for cell in row))
    return made


def line(text: str, colour: str = "", error: bool = False) -> None:
    """Print ``text`` in one line, however long: other programs look for it.

    Args:
        text: what is printed.
        colour: "red", "green" or "yellow", where a terminal shows it.
        error: whether it goes to stderr.
    """
    stream = sys.stderr if error else sys.stdout
    shown = colour and stream.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if shown else text, file=stream)


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal for what takes seconds; nothing elsewhere.

    Args:
        steps: how many there are.

    Returns:
        A function that is called with what comes next, before each of them.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    text = TextColumn("{task.description}", markup=False)
    with Progress(SpinnerColumn(), BarColumn(), text, console=Console(stderr=True), transient=True) as bar:
        task, begun = bar.add_task("", total=steps), [0]

        def begin(text: str) -> None:
            bar.update(task, completed=begun[0], description=text)
            begun[0] += 1

        yield begin


def document(value: object) -> None:
    """Print one JSON document; a number that is not finite is a word in it, as in the log."""
    print(json.dumps(_strict(value), indent=2, default=str, allow_nan=False), file=sys.stdout)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def shortened(names: Sequence[str], most: int = 4) -> str:
    """The first of ``names``, and how many there are besides.

    >>> shortened(["a", "b", "", "d", "e", "f"])
    'a, b, (model), d and 2 more'
    """
    told = ", ".join(name or "(model)" for name in names[:most])
    return f"{told} and {len(names) - most} more" if len(names) > most else told


def speed(rate: float | None) -> str:
    """Bytes a second, as people read them.

    >>> speed(2.5e9), speed(None)
    ('2.50 GB/s', 'not measured')
    """
    return "not measured" if rate is None else f"{rate / 1e9:.2f} GB/s"


def size(count: float | None) -> str:
    """Bytes, as people read them.

    >>> size(3 << 30), size(None)
    ('3.0 GiB', 'unknown')
    """
    from disthooks._tensors import format_bytes

    return "unknown" if count is None else format_bytes(count)
