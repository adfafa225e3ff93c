"""``disthooks explain``: what a model saves for backward, the memory of a step, and whether it fits in a limit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from disthooks.errors import UsageError
from disthooks.run.cli.output import console, document, line, progress, size, table

#: Seconds after which a search tries no new size or change.
_PATIENCE = 30.0

if TYPE_CHECKING:
    from disthooks.predict.explanation import Explanation, ModuleRow


def explain(
    model: str = typer.Argument(..., help="package.module:function or file.py:function, returning (module, inputs)."),
    file: str | None = typer.Argument(None, help="A hooks file: the step is predicted with its plan, too."),
    device: str = typer.Option("cuda", help="Whose operators run: cuda (as on an H100), cpu, or a GPU's name."),
    backend: str | None = typer.Option(None, help="The kernels of attention: flash, efficient, cudnn or math."),
    dtype: str | None = typer.Option(None, help="Convert the model to this dtype, such as bf16."),
    autocast: str | None = typer.Option(None, help="Run the forward under autocast to this dtype."),
    optimizer: str | None = typer.Option(None, help="Add the step of this optimizer, such as adamw."),
    engine: str | None = typer.Option(None, help="ddp, fsdp1, fsdp2, hsdp, tp, fsdp2+tp, or zero0 to zero3."),
    world: int = typer.Option(1, min=1, help="The number of ranks."),
    batch: int | None = typer.Option(None, min=1, help="The batch size of one rank."),
    seq: int | None = typer.Option(None, min=1, help="The length of a sequence."),
    fits: str | None = typer.Option(
        None, help="Say whether the step fits in this memory (80GiB), and find the largest sizes that fit."
    ),
    advice: bool = typer.Option(True, help="Try changes, and show the best three."),
    output: str | None = typer.Option(None, "--output", "-o", help="Write a page to this file (.html)."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """PREDICT what one training step of the model saves, and how much memory it needs. It needs no GPU: nothing runs.

    The step is predicted with tensors that have shapes but no memory, so a large model needs seconds and no GPU. Each
    storage counts once, and weights do not count as saved. With a hooks file, the step is predicted with its plan and
    without it.
    """
    _check_folder(output)
    with _warned_once(), progress(4) as begin:
        begin("importing torch and the model")
        # The imports take a second or more, so they stand behind the first line of progress.
        from disthooks._tensors import parse_bytes
        from disthooks.predict.answers.advice import Tried, advise, what_if
        from disthooks.predict.answers.fits import fits as find_fits
        from disthooks.predict.explain import explain as predict
        from disthooks.predict.fake.builder import Builder
        from disthooks.report.page.page import page
        from disthooks.run.cli.workload import find

        limit = None if fits is None else parse_bytes(fits, "--fits")
        builder = Builder(find(model), name=model)
        begin("predicting one step")
        said = predict(
            builder,
            plan=file,
            optimizer=optimizer,
            engine=engine,
            world=world,
            device=device,
            dtype=dtype,
            autocast=autocast,
            backend=backend,
            batch=batch,
            seq=seq,
        )
        told = {"file": file, **said.to_dict(), "fits": None, "advice": []}
        say = (lambda text: None) if as_json else line
        detail = functools.partial(begin, is_step=False)
        tried: Tried = {}  # the changes that were run: they run once
        known: Any = {"patience": _PATIENCE, "progress": detail, "tried": tried}
        # The command prints each answer at once: the next one may take a minute, and Ctrl-C may end it.
        _say_verdict(said, told, limit, say)
        try:
            begin("trying changes")
            best = advise(builder, said, limit=limit, **known) if advice else []
            told["advice"] = [each.to_dict() for each in best]
            for number, change in enumerate(best, 1):
                say(f"advice {number}: {change.title}: {change.text}")
                for each in (change.yaml or change.code).rstrip().splitlines():
                    say(f"    {each}")
            begin("looking for the largest sizes")
            if limit is not None:
                far = find_fits(builder, said.situation, limit, explanation=said, found=say, **known)
                told["fits"] = far.to_dict()
                for text in far.of_change():
                    say(text)
        except KeyboardInterrupt:
            if not as_json:
                show(said, told)
            raise
        if output is not None:
            told["what_if"] = what_if(said, best, tried)
            pathlib.Path(output).write_text(page("explain", told), encoding="utf-8")
    if as_json:
        document(told)
    else:
        show(said, told)
    if output is not None and not as_json:
        line(f"wrote {output}")


def _say_verdict(said: Explanation, told: dict[str, Any], limit: int | None, say: Callable[[str], object]) -> None:
    from disthooks.predict.answers.fits import verdict

    for text in () if limit is None else verdict(said, limit):
        say(text)
    peak, (low, high) = said.peak, said.peak_range
    with_plan = "" if told["plan"] is None else f" with {told['file']}"
    around = "" if size(low) == size(high) else f" ({size(low)} to {size(high)})"
    say(f"the peak{with_plan} is {size(peak.nbytes)}{around}, {peak.where} ({peak.operator})")
    if told["plan"] is not None:
        say(_without_plan(said, told["file"]))
    if said.first_bytes > peak.nbytes:
        say(f"the first step needs {size(said.first_bytes)}: a store knows only then which tensors to move early")
    largest = sorted(peak.by_category.items(), key=lambda each: -each[1])[:2]
    parts = " and ".join(f"{nbytes / peak.nbytes:.0%} of it is {name}" for name, nbytes in largest if nbytes)
    say(f"{parts}; autograd saves {size(said.saved_bytes)} for backward, weights not counted")


def _without_plan(said: Explanation, file: str) -> str:
    """The peak without the plan, and the reason if the plan hardly lowers it."""
    before, peak = said.memory.peak, said.peak
    text = f"the peak without {file} is {size(before.nbytes)}, {before.where}"
    if peak.nbytes > 0.98 * before.nbytes:
        name, nbytes = max(peak.by_category.items(), key=lambda each: each[1])
        text += f": the plan hardly lowers it, because at the peak {size(nbytes)} are {name}"
    return text


def _check_folder(output: str | None) -> None:
    """Refuse a page that could not be written, before anything takes time."""
    if output is not None and not pathlib.Path(output).absolute().parent.is_dir():
        raise UsageError(f"--output={output!r}: there is no folder {str(pathlib.Path(output).parent)!r}; make it first")
    if output is not None and pathlib.Path(output).is_dir():
        raise UsageError(f"--output={output!r} is a folder: give the name of a file, such as {output}/page.html")


@contextlib.contextmanager
def _warned_once() -> Iterator[None]:
    """Show each warning of the user's code once, although the model is built many times."""
    show_warning, shown = warnings.showwarning, set()

    def show_new(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        if (key := (str(message), filename, lineno)) not in shown:
            shown.add(key)
            show_warning(message, category, filename, lineno, *rest, **more)

    warnings.showwarning = show_new
    try:
        yield
    finally:
        warnings.showwarning = show_warning


# -- the tree of modules


class Branch(NamedTuple):
    """A module, or several modules of one structure in a row, in the tree that is shown.

    Attributes:
        label: the last part of the name; of several modules the first and the last.
        times: how many modules it stands for.
        total: saved bytes of all of them, with the modules inside.
    """

    label: str
    kind: str
    times: int
    total: int
    children: tuple[Branch, ...]

    @property
    def structure(self) -> tuple[Any, ...]:
        """The class, and the names and classes inside. Modules in a row with equal structures become one branch."""
        return self.kind, tuple((child.label, child.times, child.structure) for child in self.children)

    def with_next(self, other: Branch) -> Branch:
        """A branch for the modules of this one and of ``other``, which has the same structure."""
        first = self.label.partition("–")[0]
        label = self.label if other.label == self.label else f"{first}–{other.label.rpartition('–')[2]}"
        children = tuple(a.with_next(b) for a, b in zip(self.children, other.children, strict=True))
        count = self.times + (other.times if label != self.label else 0)
        return Branch(label, self.kind, count, self.total + other.total, children)


def folded(rows: tuple[ModuleRow, ...]) -> Branch:
    """The tree of the modules. Numbered modules in a row with equal structures are one branch.

    >>> from disthooks.predict.explanation import ModuleRow
    >>> layers = [ModuleRow(f"layers.{i}", "Layer", 1, 8, 8) for i in range(3)]
    >>> tree = folded((ModuleRow("", "Model", -1, 0, 24), ModuleRow("layers", "ModuleList", 0, 0, 24), *layers))
    >>> [(child.label, child.times, child.total) for child in tree.children[0].children]
    [('0–2', 3, 24)]
    """
    inside: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        inside.setdefault(row.parent, []).append(position)

    def branch(position: int) -> Branch:
        row = rows[position]
        children: list[Branch] = []
        for each in inside.get(position, ()):
            new = branch(each)
            last = children[-1] if children else None
            is_next = last is not None and new.label.isdigit() and last.structure == new.structure
            if last is not None and is_next and last.label.partition("–")[0].isdigit():
                children[-1] = last.with_next(new)
            else:
                children.append(new)
        above = rows[row.parent].name if row.parent >= 0 else ""
        label = row.name[len(above) + 1 :] if above else row.name
        return Branch(label, row.kind, 1, row.whole, tuple(children))

    return branch(0)


_BAR = 16  # columns
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float) -> str:
    """A bar that fills a share of its columns, and the share.

    >>> bar(0.5), bar(0.0078125)
    ('████████          50.0%', '▏                  0.8%')
    """
    full, rest = divmod(round(max(0.0, min(1.0, share)) * _BAR * 8), 8)
    return f"{('█' * full + (_EIGHTHS[rest] if rest else '')).ljust(_BAR)} {share:6.1%}"


def tree_rows(top: Branch, whole: int, smallest: float = 0.01) -> list[tuple[str, str, str, str]]:
    """The rows of the tree. The parts of a module that are below ``smallest`` of the whole share one row."""
    rows: list[tuple[str, str, str, str]] = []

    def add(each: Branch, depth: int) -> None:
        many = f" × {each.times}" if each.times > 1 else ""
        name = "  " * depth + (each.label or "(model)") + many
        rows.append((name, each.kind, size(each.total), bar(each.total / whole)))
        inside = sorted((child for child in each.children if child.total), key=lambda child: -child.total)
        small = [child for child in inside if child.total < smallest * whole]
        for child in inside[: len(inside) - len(small)]:
            add(child, depth + 1)
        if small:
            rest = sum(child.total for child in small)
            rows.append(("  " * (depth + 1) + f"{len(small)} smaller", "", size(rest), ""))

    if whole:
        add(top, 0)
    return rows


# -- the curve


def curve_lines(said: Explanation, width: int = 72, height: int = 8) -> list[str]:
    """The memory over the step as lines of text, with the parts of the step below."""
    samples = (said.planned or said.memory).timeline.samples
    record = said.record if said.with_plan is None else said.with_plan.record
    moments = max(1, len(record.operators))
    columns = [0] * width
    for each in samples:
        place = min(width - 1, each.moment * width // moments)
        columns[place] = max(columns[place], each.total)
    for place in range(1, width):
        columns[place] = columns[place] or columns[place - 1]  # nothing changed in this stretch
    top = max(columns) or 1
    lines = []
    for row in range(height, 0, -1):
        parts = (max(0.0, min(1.0, value / top * height - row + 1)) for value in columns)
        text = "".join(" ▁▂▃▄▅▆▇█"[round(part * 8)] for part in parts)
        scale = size(top * row / height) if row in (height, height // 2) else ""
        lines.append(f"{scale:>10} │{text}")
    names = [""] * width
    for phase, begin in record.phases.items():
        place = max(0, min(width - len(phase) - 1, begin * width // moments))
        for offset, letter in enumerate(f"│{phase}"[:width]):
            names[place + offset] = letter
    lines.append(" " * 12 + "".join(name or " " for name in names).rstrip())
    mark, place = "▼ peak", columns.index(top)
    lines.insert(0, " " * 12 + (" " * place + mark if place + len(mark) <= width else f"{'peak ▼':>{place + 1}}"))
    return lines


# -- all of it


def show(said: Explanation, told: dict[str, Any]) -> None:
    rows = tree_rows(folded(said.modules), said.saved_bytes)
    if rows:
        heads = ("module", "class", "saved", "share")
        console().print(table(rows, heads, right=(2,), title="saved for backward, by module"))
        operators = {name: nbytes for name, nbytes in said.by_operator.items() if nbytes * 100 >= said.saved_bytes}
        console().print(_bars(operators, said.saved_bytes, "operator", "saved for backward, by operator"))
    line("memory over the step")
    for each in curve_lines(said, max(24, min(72, console().width - 13))):
        line(each)
    peak = said.peak
    console().print(_bars(peak.by_category, peak.nbytes, "what", "in memory at the peak"))
    if told["plan"] is not None:
        _show_plan(told)
    _show_notes(said, told)


def _bars(figures: Mapping[str, int], whole: int, head: str, title: str) -> Any:
    largest_first = sorted(figures.items(), key=lambda pair: -pair[1])
    rows = [(name, size(nbytes), bar(nbytes / whole if whole else 0.0)) for name, nbytes in largest_first]
    return table(rows, (head, "bytes", "share"), right=(1,), title=title)


def _show_plan(told: dict[str, Any]) -> None:
    plan, keys = told["plan"], ("stored", "moved", "shared", "recomputed", "kept")
    rows = [(name, to, *map(size, figures)) for name, to, *figures in _alike(plan["modules"], keys)]
    total = ("all", "", *(size(sum(each[key] for each in plan["modules"])) for key in keys))
    heads = ("module", "goes to", *keys)
    console().print(table([*rows, total], heads, right=(2, 3, 4, 5, 6), title=f"what {told['file']} does"))
    for where, nbytes in {"in the host's memory": plan["host"], "on disk": plan["disk"]}.items():
        if nbytes:
            line(f"the plan keeps at most {size(nbytes)} {where}")


def _alike(modules: list[dict[str, Any]], keys: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Rows of name, place and figures. Modules in a row with equal figures are one row."""
    rows: list[tuple[Any, ...]] = []
    for _, group in itertools.groupby(modules, lambda each: (each["to"], *(each[key] for key in keys))):
        alike = list(group)
        first, last = alike[0], alike[-1]
        name = first["module"] or "(model)"
        if len(alike) > 1:
            name += f" … {last['module']} × {len(alike)}"
        rows.append((name, first["to"], *(sum(each[key] for each in alike) for key in keys)))
    return rows


def _show_notes(said: Explanation, told: dict[str, Any]) -> None:
    from disthooks.predict.hardware.roofline import format_seconds

    for each in told["unknown"]:
        where = each["module"] or "the model"
        line(f"not known: {each['what']} in {where}; assumed: {each['assumed']}", "yellow")
    for text in told["warnings"]:
        line(f"warning: {' '.join(text.split())}", "yellow")
    for text in told["not_counted"]:
        line(f"not counted: {text}")
    if said.seconds:
        parts = ", ".join(f"{phase} {format_seconds(duration)}" for phase, duration in said.seconds.items())
        line(f"time on {told['situation']['hardware']}, roughly: {parts}")
