"""Tables and lines for a terminal. In a file or a pipe they have no colours, and no line is folded."""

# [Note: text that is not ours]
# Names in a log, in a model or of a file may hold control characters, which a terminal obeys: they move the cursor, set
# the title of the window, or turn the direction of a line. So all that is printed goes through `plain`, which shows a
# character that is not printable as its escape. `line`, `table`, `styled` and the console do so for every caller.

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

_WIDE = 100_000  # columns if stdout is no terminal, so that no line is folded
#: Seconds between two lines of progress in a file or a pipe.
EVERY = 5.0
_COLOURS = {"red": "31", "green": "32", "yellow": "33"}


def plain(text: str) -> str:
    r"""``text`` with each character that is not printable shown as its escape. See [Note: text that is not ours].

    >>> print(plain("a\x1b[2Jb\nc\u202e é"))
    a\x1b[2Jb\nc\u202e é
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def console() -> Any:
    """A console on stdout. It is made at each use, because a test may have replaced stdout."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **kwargs):
                is_ours = segment.control or segment.text == "\n"
                yield segment if is_ours else segment._replace(text=plain(segment.text))

    width = None if sys.stdout.isatty() else _WIDE
    return PlainConsole(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def styled(text: str, style: str = "") -> Any:
    """``text`` in a style, as a part of what a console prints; markup in it has no effect."""
    from rich.text import Text

    return Text(plain(text), style)


def table(
    rows: Iterable[Sequence[object]], heads: Sequence[str] = (), right: Sequence[int] = (), title: str = ""
) -> Any:
    """A table of texts; markup in them has no effect."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=styled(title, "bold") if title else None,
        title_justify="left",
        show_header=bool(heads),
        box=box.SQUARE,
    )
    texts = [tuple(map(str, row)) for row in rows]
    for i in range(max([len(heads), *map(len, texts)])):
        numbers = i in right
        made.add_column(
            styled(heads[i]) if heads else "",
            justify="right" if numbers else "left",
            no_wrap=numbers or (i == 0 and not heads),
            overflow="fold",
        )
    for row in texts:
        made.add_row(*map(styled, row))
    return made


def line(text: str, colour: str = "", error: bool = False) -> None:
    """Print ``text`` in one line, however long it is, so that other programs can search for it."""
    text, stream = plain(text), sys.stderr if error else sys.stdout
    shown = colour and stream.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if shown else text, file=stream, flush=True)


class Begin(Protocol):
    def __call__(self, text: str, is_step: bool = True) -> None: ...


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Begin]:
    """Show on stderr what is done: a progress bar on a terminal, and a line every five seconds in a file or a pipe.

    It gives a function to call before each step, with a text. ``is_step=False`` changes the text of the step that runs.
    """
    if not sys.stderr.isatty():
        with _lines() as begin:
            yield begin
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    text = TextColumn("{task.description}", markup=False)
    with Progress(SpinnerColumn(), BarColumn(), text, console=Console(stderr=True), transient=True) as bar:
        task, begun = bar.add_task("", total=steps), [0]

        def begin(text: str, is_step: bool = True) -> None:
            begun[0] += is_step
            bar.update(task, completed=begun[0] - 1, description=text)

        yield begin


@contextlib.contextmanager
def _lines() -> Iterator[Begin]:
    """Write what is done and since when, in a thread: one prediction may take minutes."""
    start, is_over, now = time.monotonic(), threading.Event(), ["starting"]

    def tell() -> None:
        while not is_over.wait(EVERY):
            line(f"disthooks: {time.monotonic() - start:.0f} s: {now[-1]}", error=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield lambda text, is_step=True: now.append(text)
    finally:
        is_over.set()
        teller.join()


def document(value: object) -> None:
    """Print ``value`` as one JSON document.

    Numbers that are not finite are strings in it ("nan", "inf"), as in a log.
    """
    print(json.dumps(_strict(value), indent=2, default=str, allow_nan=False), file=sys.stdout)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def shortened(names: Sequence[str], most: int = 4) -> str:
    """The first ``most`` of ``names``, and the count of the others.

    >>> shortened(["a", "b", "", "d", "e", "f"])
    'a, b, (model), d and 2 more'
    """
    told = ", ".join(name or "(model)" for name in names[:most])
    return f"{told} and {len(names) - most} more" if len(names) > most else told


def size(count: float | None) -> str:
    """Bytes as a text for people."""
    from disthooks._tensors import format_bytes

    return "unknown" if count is None else format_bytes(count)
