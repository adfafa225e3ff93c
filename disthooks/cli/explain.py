"""``disthooks explain``: what a model saves for backward, the memory of a step, and whether it fits. Nothing runs."""

from __future__ import annotations

import itertools
import pathlib
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from disthooks.cli.output import console, document, line, progress, size, table
from disthooks.errors import UsageError

#: Seconds after which no further change is tried; and seconds after which no question is answered by further steps.
_PATIENCE, _PATIENCE_FOR_ANSWERS = 30.0, 120.0

if TYPE_CHECKING:
    from disthooks.predict.explanation import Explanation, ModuleRow


def explain(
    model: str = typer.Argument(..., help="package.module:function or file.py:function, returning (module, inputs)."),
    file: str | None = typer.Argument(None, help="A hooks file: what its plan makes of the saved bytes."),
    device: str = typer.Option("cuda", help="Whose operators run: cuda (as on an H100), cpu, or a GPU's name."),
    backend: str | None = typer.Option(None, help="Of attention: flash, efficient, cudnn or math."),
    dtype: str | None = typer.Option(None, help="Convert the model to this dtype, such as bf16."),
    autocast: str | None = typer.Option(None, help="Run the forward under autocast to this dtype."),
    optimizer: str | None = typer.Option(None, help="With a step of this optimizer, such as adamw."),
    engine: str | None = typer.Option(None, help="ddp, fsdp1, fsdp2, hsdp, tp, fsdp2+tp, or zero0 to zero3."),
    world: int = typer.Option(1, min=1, help="The number of ranks."),
    batch: int | None = typer.Option(None, min=1, help="The batch size of one rank."),
    seq: int | None = typer.Option(None, min=1, help="The length of a sequence."),
    measured: str | None = typer.Option(
        None, help="The log of a run with this hooks file, to compare with.", metavar="LOG"
    ),
    fits: str | None = typer.Option(None, help="Does it fit into so much memory (80GiB), and how far can it go?"),
    advice: bool = typer.Option(True, help="Try changes, and name the best three."),
    output: str | None = typer.Option(None, "--output", "-o", help="Write a page to this file (.html)."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """PREDICT what one training step of the model saves and needs. It needs no GPU and no memory: nothing runs.

    The step runs on tensors that have shapes and no memory, so a model of any size takes seconds. Each memory counts
    once, and weights do not count as saved. With a hooks file, the step is predicted with its plan and without.
    """
    from disthooks._tensors import parse_bytes
    from disthooks.cli.workload import find
    from disthooks.predict.answers.advice import Tried, advise, what_if
    from disthooks.predict.answers.fits import fits as find_fits
    from disthooks.predict.answers.questions import answers
    from disthooks.predict.explain import explain as predict
    from disthooks.predict.fake.builder import Builder

    limit = None if fits is None else parse_bytes(fits, "--fits")
    with progress(5) as begin:
        begin("importing the model")
        builder = Builder(find(model), name=model)
        begin("one step on tensors without memory")
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
        begin("how far it can go")
        tried: Tried = {}  # the changes that were run: they run once
        known: Any = {"patience": _PATIENCE, "tried": tried}
        far = None if limit is None else find_fits(builder, said.situation, limit, explanation=said, **known)
        begin("what could be changed")
        best = advise(builder, said, limit=limit, **known) if advice else []
        compared = () if measured is None else said.beside(measured)
        told = {"file": file, **said.to_dict(), "measured": [each.to_dict() for each in compared]}
        told["fits"] = None if far is None else far.to_dict()
        told["advice"] = [each.to_dict() for each in best]
        if output is not None or as_json:
            begin("the questions that users have")
            told["answers"] = [each.to_dict() for each in answers(said, far, builder, _PATIENCE_FOR_ANSWERS)]
        if output is not None:
            told["what_if"] = what_if(builder, said, best, tried=tried)
    if output is not None:
        from disthooks.predict.page.page import page

        pathlib.Path(output).write_text(page(told), encoding="utf-8")
    if as_json:
        document(told)
        return
    show(said, told)
    for each in compared:
        line(str(each))
    for number, change in enumerate(best, 1):
        line(f"advice {number}: {change.title}: {change.text}")
        if change.yaml:
            line(textwrap.indent(change.yaml.rstrip(), "    "))
    if far is not None:
        line(str(far))
    if output is not None:
        line(f"wrote {output}")


# -- the tree of modules


class Branch(NamedTuple):
    """A module, or several modules of one structure in a row, in the tree that is shown.

    Attributes:
        label: the last part of the name; of several modules the first and the last.
        kind: the name of the class.
        times: how many modules it stands for.
        total: saved bytes of all of them, with the modules inside.
        children: their parts; a part stands for the same part of each of them.
    """

    label: str
    kind: str
    times: int
    total: int
    children: tuple[Branch, ...]

    @property
    def structure(self) -> tuple[Any, ...]:
        """The classes and names inside, which modules in a row have in common."""
        return self.kind, tuple((child.label, child.times, child.structure) for child in self.children)

    def with_next(self, other: Branch) -> Branch:
        """This branch, with ``other``, of the same structure, in it."""
        first = self.label.partition("–")[0]
        label = self.label if other.label == self.label else f"{first}–{other.label.rpartition('–')[2]}"
        children = tuple(a.with_next(b) for a, b in zip(self.children, other.children, strict=True))
        count = self.times + (other.times if label != self.label else 0)
        return Branch(label, self.kind, count, self.total + other.total, children)


def folded(rows: tuple[ModuleRow, ...]) -> Branch:
    """The tree of the modules. Neighbours in a list that have one structure are one branch.

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


_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(part: float, width: int = _BAR) -> str:
    """A bar that fills ``part`` of ``width`` columns.

    >>> bar(0.5, 4), bar(0.03125, 4)
    ('██  ', '▏   ')
    """
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def tree_lines(top: Branch, whole: int, smallest: float = 0.01) -> list[tuple[str, str, str, str]]:
    """The lines of the tree: name, class, bytes and share. Parts below ``smallest`` of the whole are one line."""
    lines: list[tuple[str, str, str, str]] = []

    def add(each: Branch, depth: int) -> None:
        many = f" × {each.times}" if each.times > 1 else ""
        name = "  " * depth + (each.label or "(model)") + many
        share = each.total / whole
        lines.append((name, each.kind, size(each.total), f"{bar(share)} {share:6.1%}"))
        inside = sorted((child for child in each.children if child.total), key=lambda child: -child.total)
        small = [child for child in inside if child.total < smallest * whole]
        for child in inside[: len(inside) - len(small)]:
            add(child, depth + 1)
        if small:
            rest = sum(child.total for child in small)
            lines.append(("  " * (depth + 1) + f"{len(small)} smaller", "", size(rest), ""))

    if whole:
        add(top, 0)
    return lines


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
        text = "".join(_vertical(value / top * height - row + 1) for value in columns)
        scale = size(top * row / height) if row in (height, height // 2) else ""
        lines.append(f"{scale:>10} │{text}")
    names = [""] * width
    for phase, begin in record.phases.items():
        place = min(width - len(phase) - 1, begin * width // moments)
        for offset, letter in enumerate(f"│{phase}"):
            names[place + offset] = letter
    lines.append(" " * 12 + "".join(name or " " for name in names).rstrip())
    return lines


def _vertical(part: float) -> str:
    return " ▁▂▃▄▅▆▇█"[round(max(0.0, min(1.0, part)) * 8)]


# -- all of it


def show(said: Explanation, told: dict[str, Any]) -> None:
    """Print an explanation on the terminal.

    Args:
        said: the explanation.
        told: the same as a document, with what the command adds to it.
    """
    lines = tree_lines(folded(said.modules), said.saved_bytes)
    if not lines:
        raise UsageError(f"{said.model}: autograd saves nothing, so there is nothing to explain")
    heads = ("module", "class", "saved", "share")
    console().print(table(lines, heads, right=(2,), title="saved for backward, by module"))
    rows = [(name, size(nbytes)) for name, nbytes in said.by_operator.items() if nbytes * 100 >= said.saved_bytes]
    console().print(table(rows, ("operator", "saved"), right=(1,), title="by operator"))
    console().print("\n".join(curve_lines(said)))
    peak = said.peak
    rows = [(name, size(nbytes)) for name, nbytes in peak.by_category.items()]
    console().print(table(rows, ("at the peak", "bytes"), right=(1,)))
    if told["plan"] is not None:
        _show_plan(told)
    _show_notes(said, told)
    low, high = said.peak_range
    where = f"in the {peak.phase} of {peak.module or 'the model'} ({peak.operator})"
    line(f"the peak is {size(peak.nbytes)}, {where}; the range is {size(low)} to {size(high)}")
    line(f"autograd saves {size(said.saved_bytes)}, weights not counted")


def _show_plan(told: dict[str, Any]) -> None:
    plan, keys = told["plan"], ("stored", "moved", "shared", "recomputed", "kept")
    rows = [(name, to, *map(size, figures)) for name, to, *figures in _alike(plan["modules"], keys)]
    total = ("all", "", *(size(sum(each[key] for each in plan["modules"])) for key in keys))
    heads = ("module", "goes to", *keys)
    console().print(table([*rows, total], heads, right=(2, 3, 4, 5, 6), title=f"under {told['file']}"))
    line(f"without the plan the peak is {size(told['peak']['nbytes'])}")
    held = {"in the host's memory": plan["host"], "on disk": plan["disk"]}
    line("with it " + ", ".join(f"{size(nbytes)} {where}" for where, nbytes in held.items() if nbytes))


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
    for each in told["unknown"]:
        where = each["module"] or "the model"
        line(f"unknown: {each['what']} in {where}; assumed: {each['assumed']}", "yellow")
    for text in told["warnings"]:
        line(f"warning: {text}", "yellow")
    for text in told["not_counted"]:
        line(f"not counted: {text}")
    if said.seconds:
        parts = ", ".join(f"{phase} {duration:.3g} s" for phase, duration in said.seconds.items())
        line(f"time on {told['situation']['hardware']}, roughly: {parts}")
    if said.link_or_compute is not None:
        line(f"offload or compute again: {said.link_or_compute}")
