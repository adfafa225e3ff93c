"""A bar on a terminal; a line for each block of steps where there is none, as in the log of a CI run."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Shown on rank 0 only; ``with Bar(...) as bar`` and ``bar.step(...)`` after every step."""

    def __init__(self, total: int, console: Console, first: bool) -> None:
        self.console, self.first, self.total, self.done = console, first, total, 0
        columns = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
        self.latest = ""
        self.live = Progress(*columns, console=console, disable=not (first and console.is_terminal))
        self.task = self.live.add_task("starting", total=total)

    def step(self, what: str, loss: float, seconds: float) -> None:
        """One more step is done; ``loss`` is rank 0's."""
        self.done += 1
        words = f"{what:<7} loss {loss:.2f} bits/byte  {seconds:.2f} s"
        self.live.update(self.task, completed=self.done, description=words)
        self.latest = words

    def line(self) -> None:
        """A block of steps is done."""
        if self.first and not self.console.is_terminal:
            self.console.print(f"step {self.done:>4}/{self.total}  {self.latest}", highlight=False)

    def __enter__(self) -> Bar:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)
