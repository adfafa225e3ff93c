"""``disthooks explain``: how many bytes autograd saves in each module of a model, and where a plan would put them."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import typer

from disthooks.cli.output import console, document, line, progress, size, table
from disthooks.errors import UsageError


class Row(NamedTuple):
    """The saved bytes of one module.

    Attributes:
        name: the module's name; "" for the model.
        kind: the name of the module's class.
        own: bytes that were saved in the module's own forward, without those of the modules inside.
        whole: bytes that were saved while the module ran, with those of the modules inside.
    """

    name: str
    kind: str
    own: int
    whole: int


def explain(
    model: str = typer.Argument(..., help="package.module:function or file.py:function, returning (module, inputs)."),
    file: str | None = typer.Argument(None, help="A hooks file: where its plan would put the bytes."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """RUN the model, one forward and backward for real, and tell how many bytes autograd saves in each module.

    Each content counts once, and weights do not count. With a hooks file the model runs a second time under its plan,
    and the bytes that were moved, shared and kept are shown for each module that the plan attaches to. This takes the
    memory and the time of two steps.
    """
    from disthooks.cli.workload import build

    with progress(3) as begin:
        begin("building the model")
        made, inputs = build(model)
        if inputs is None:
            raise UsageError(
                f"{model} gave a module alone: explain runs it, so it has to return (module, example inputs)"
            )
        begin("one forward and backward without hooks")
        rows = saved_by(made, inputs)
        if file is not None:
            begin(f"one forward and backward under {file}")
        plan = _planned(made, inputs, file) if file is not None else None
    whole = max([row.whole for row in rows], default=0)
    if as_json:
        told = [{"module": row.name, "class": row.kind, "own": row.own, "whole": row.whole} for row in rows]
        document({"model": model, "file": file, "saved": whole, "modules": told, "plan": plan})
        return
    _show(rows, whole)
    if plan is not None:
        _show_plan(plan, str(file))


def _show(rows: list[Row], whole: int) -> None:
    body = [(row.name or "(model)", row.kind, size(row.own), size(row.whole)) for row in rows if row.whole]
    heads = ("module", "class", "saved", "with what is inside")
    console().print(table(body, heads, right=(2, 3), title="one forward and backward without hooks"))
    line(f"autograd saves {size(whole)}, weights not counted")


def saved_by(model: Any, inputs: Any) -> list[Row]:
    """One row for each module that ran, in the order of ``model.named_modules()``.

    Args:
        model: the model.
        inputs: its example inputs, as :func:`~disthooks.cli.workload.step` takes them.
    """
    from disthooks._match import match_modules
    from disthooks.cli.workload import step
    from disthooks.watch.trace import trace

    with trace(model, print=None) as traced:
        step(model, inputs)
    own: collections.Counter[str] = collections.Counter()
    for event in traced.events:
        if event.kind == "pack" and event.note not in ("parameter", "shared"):
            own[event.name] += event.nbytes
    ran = {row.name: row for row in traced.report().rows}
    order = {name: i for i, (name, _) in enumerate(match_modules(model, ["*"]))}
    rows = [Row(name, row.type, own[name], row.nbytes) for name, row in ran.items()]
    return sorted(rows, key=lambda row: order.get(row.name, len(order)))


def _planned(model: Any, inputs: Any, file: str) -> dict[str, Any]:
    """Run the model under the plan of ``file``, and return the figures of each module, and the warnings."""
    from disthooks.cli.workload import Findings, entries_of, figures, place, reports
    from disthooks.config import from_config

    plan, findings = from_config(file), Findings()
    entries = entries_of(plan)
    place(plan, entries, model, findings)
    if findings.errors:
        raise UsageError("; ".join(findings.errors))
    placed = [
        (name, module, entry.placed or entry.pipeline) for entry in entries for name, module in entry.modules.items()
    ]
    told = {name: figures(report) for name, report in reports(model, inputs, placed).items()}
    to = {name: _short(pipeline.store) for name, _, pipeline in placed}
    modules = [{"module": name, "to": to[name]} | figure for name, figure in told.items()]
    return {"modules": modules, "warnings": findings.warnings}


def _show_plan(plan: dict[str, Any], file: str) -> None:
    keys = ("stored", "moved", "shared", "recomputed", "kept")
    rows = [(each["module"] or "(model)", each["to"], *(size(each[key]) for key in keys)) for each in plan["modules"]]
    total = ("all", "", *(size(sum(each[key] for each in plan["modules"])) for key in keys))
    heads = ("module", "goes to", *keys)
    console().print(table([*rows, total], heads, right=(2, 3, 4, 5, 6), title=f"the same under {file}"))
    for text in plan["warnings"]:
        line(f"warning: {text}", "yellow")


def _short(store: Any) -> str:
    """The class of a store, with its directories or the stores inside it."""
    inner = [_short(each) for each in getattr(store, "stores", ())]
    return " ".join([type(store).__name__, *getattr(store, "directories", ()), *inner])
