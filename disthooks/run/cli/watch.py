"""``disthooks watch``: a run that goes on, in a terminal."""

# [Note: a picture of the run in a terminal]
# The frame has a row for each group of layers and a column for each of the last logged steps. A cell says how far the
# gradients of the group, or their updates, are from what is usual for them: by colour and by letter height, so that it
# can be read without colours too. The frame is made anew from the last 600 records whenever the log has grown, so it
# works over ssh, on a run of another machine, and on a run that is restarted.

from __future__ import annotations

import pathlib
import statistics
import time
from typing import TYPE_CHECKING, Any

import typer

from disthooks.errors import UsageError
from disthooks.run.cli.output import console, styled

if TYPE_CHECKING:
    from disthooks.report.log import Run, Tail

_BARS = "▁▂▃▄▅▆▇█"
_INKS = ("bright_black", "blue", "cyan", "green", "yellow", "bright_yellow", "red", "bright_red")
_ROWS = 12  # groups of layers
_STEPS = 60  # columns
_CURVES = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("clip_ratio", "clip factor"),
    ("update_ratio", "update"),
    ("lr", "lr"),
)
_SAVED = ("peak_held", "moved_per_step")


def watch(
    path: str = typer.Argument(..., help="A gradients.jsonl, or the directory of a run."),
    once: bool = typer.Option(False, "--once", help="Print one frame and end."),
    every: float = typer.Option(1.0, "--every", help="Seconds between two looks at the log."),
) -> None:
    """Show a run that goes on: loss, norms, layers, ranks, saved tensors, and what stands out. Ctrl-C ends it."""
    from disthooks.report.log import Tail, file_of

    if every <= 0:
        raise UsageError(f"--every {every}: a number of seconds above 0 is needed")
    tail = Tail(file_of(pathlib.Path(path)))
    if once:
        console().print(frame(tail))
        return
    from rich.live import Live

    with Live(frame(tail), console=console(), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(every)
            live.update(frame(tail), refresh=True)


def frame(tail: Tail) -> Any:
    """What the terminal shows of a run now. See [Note: a picture of the run in a terminal]."""
    from rich.console import Group

    run, parts = tail.read(), list[Any]()
    if tail.broken:
        parts.append(styled(f"{tail.broken} lines of {tail.file} are no records; report says why", "yellow"))
    if run is None:
        return Group(*parts, styled(f"{tail.file}: no step is logged there yet"))
    from disthooks.report.sentences import nothing_said
    from disthooks.report.timeline import timeline

    parts.insert(0, styled(_head(tail.file, run), "bold"))
    found = timeline(run)
    for culprit in found.culprits[-3:]:
        parts.append(styled(culprit.text, "red"))
    if not found.culprits:
        parts.append(styled(nothing_said(run, found), "green"))
    parts += _curves(run)
    parts += _layers(run)
    parts += _ranks(run)
    parts += _saved(run)
    return Group(*parts)


def _head(file: pathlib.Path, run: Run) -> str:
    from disthooks.report.sentences import seconds

    about = run.about
    ranks = "?" if run.ranks is None else run.ranks
    what = f"{about.get('engine', 'a run')}, {ranks} rank{'' if ranks == 1 else 's'}" if about else str(file)
    rate = ""
    if run.began is not None and run.ended is not None and run.ended > run.began and run.steps[-1] > run.steps[0]:
        each = (run.ended - run.began) / (run.steps[-1] - run.steps[0])
        ago = time.time() - run.ended
        rate = f", {seconds(each)} a step, logged {seconds(max(0.0, ago))} ago"
    return f"step {run.steps[-1]:,}  {what}{rate}"


def _curves(run: Run) -> list[Any]:
    """A line for each of the most important numbers: its last value and its course."""
    from disthooks.report.sentences import figure

    made = []
    for name, label in _CURVES:
        column = run.column(name)[-_STEPS:]
        known = [value for value in column if value is not None]
        if known:
            text = styled(f"{label:>16} {figure(name, known[-1]):>10} ")
            text.append(_bars([value if value is None else float(value) for value in column]), style="cyan")
            made.append(text)
    return made


def _bars(column: list[float | None]) -> str:
    """A small picture of numbers; "!" stands for one that is not finite.

    >>> _bars([1.0, 2.0, None, float("nan"), 3.0])
    '▁▄ !█'
    """
    finite = [value for value in column if value is not None and abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    letters = []
    for value in column:
        if value is None:
            letters.append(" ")
        elif not abs(value) < float("inf"):
            letters.append("!")
        else:
            letters.append(_BARS[int((value - low) / (high - low) * 7) if high > low else 0])
    return "".join(letters)


def _layers(run: Run) -> list[Any]:
    """A row for each group of layers: how far its gradients are from the usual, step by step."""
    from disthooks.report.moved import Scores, values_of

    values = values_of(run, "param", "grad_norm")
    if values is None:
        return []
    distance = Scores(values).last(_STEPS)
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(run.names["param"]):
        groups.setdefault(_group(name), []).append(place)
    if len(groups) > _ROWS:  # so many neighbours are one row that all rows fit
        each = -(-len(groups) // _ROWS)
        names = list(groups)
        groups = {
            f"{names[at]} …": [place for name in names[at : at + each] for place in groups[name]]
            for at in range(0, len(names), each)
        }
    made = [styled("gradients against the usual: ▁ below, ▄ as usual, █ ten times", "dim")]
    for name, places in groups.items():
        row = distance[:, places].nanmedian(1).values.tolist()
        text = styled(f"{name[-16:]:>16} ")
        for value in row:
            level = 3 if value != value else max(0, min(7, round(3 + 4 * value)))
            text.append(" " if value != value else _BARS[level], style=_INKS[level])
        made.append(text)
    return made


def _group(name: str) -> str:
    """The block of a parameter: its name up to the first number, with it.

    >>> _group("model.layers.3.mlp.up.weight"), _group("head.weight")
    ('model.layers.3', 'head')
    """
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1]) if number is not None else parts[0]


def _ranks(run: Run) -> list[Any]:
    """Which rank took longest, and which had the largest norm, of the last steps."""
    from disthooks.report.sentences import seconds

    made = []
    for phase in ("input", "forward", "backward"):
        most = [each for each in run.column(f"{phase}_seconds/max_rank")[-_STEPS:] if each is not None]
        mean = [each for each in run.column(f"{phase}_seconds")[-_STEPS:] if each is not None]
        who = [each for each in run.labels(f"{phase}_seconds/argmax_rank")[-_STEPS:] if each is not None]
        if most and mean and who:
            rank = statistics.mode(who)
            usual, slowest = (seconds(statistics.median(column)) for column in (mean, most))
            share = f"rank {rank} in {who.count(rank) / len(who):.0%} of steps"
            made.append(styled(f"{phase:>16} mean {usual}, slowest rank {slowest}, {share}"))
    leads = [each for each in run.labels("grad_norm/argmax_rank")[-_STEPS:] if each is not None]
    if leads and (run.ranks or 1) > 1:
        rank = statistics.mode(leads)
        made.append(styled(f"{'largest norm':>16} rank {rank} in {leads.count(rank) / len(leads):.0%} of steps"))
    return made


def _saved(run: Run) -> list[Any]:
    """How many bytes of saved tensors each place held at most, and how many moved."""
    from disthooks.report.sentences import figure

    last = run.records[-1]
    told = [
        f"{name.removeprefix('saved/')} {figure(name, float(value))}"
        for name, value in last.items()
        if name.startswith("saved/") and name.endswith(_SAVED) and isinstance(value, (int, float))
    ]
    return [styled(f"{'saved tensors':>16} {', '.join(told)}")] if told else []
