"""``disthooks check``: read a configuration file, and try it on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from disthooks.errors import DisthooksError, as_line
from disthooks.run.cli.output import console, document, line, progress, shortened, size, table

if TYPE_CHECKING:
    from disthooks.run.cli.workload import Findings, SaveEntry
    from disthooks.saved.report import SavedReport


def check(
    file: str = typer.Argument(..., help="The hooks file."),
    model: str | None = typer.Option(
        None, "--model", help="package.module:function or file.py:function: a module, or (module, example inputs)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """Read a configuration file as a run does, and tell what it would do; exit code 1 when a run would fail.

    Random tensors go through each pipeline and back. With --model it also shows the modules and parameters that each
    pattern matches, and conflicts with checkpointing, compiled code and engines. With example inputs one forward and
    backward is predicted, as by disthooks explain: nothing runs. The bytes that a run moves are shown for each module.
    """
    from disthooks.run.cli.workload import Findings

    findings = Findings()
    with progress(4) as begin:
        facts = _checked(file, model, findings, begin)
    facts |= {"ok": not findings.errors, "errors": findings.errors, "warnings": findings.warnings}
    if as_json:
        document(facts)
    else:
        _show(facts)
    if findings.errors:
        raise typer.Exit(1)


def _checked(file: str, name: str | None, findings: Findings, begin: Callable[[str], None]) -> dict[str, Any]:
    from disthooks.config import from_config
    from disthooks.run.cli.workload import build, check_sinks, entries_of, made, place, scopes

    facts: dict[str, Any] = {"file": file, "model": name, "save": [], "watch": None, "run": None}
    try:
        begin(f"reading {file}")
        plan = from_config(file)
        begin("building the model")
        model, inputs = build(name) if name else (None, None)
    except DisthooksError as error:
        findings.failed("", error)
        return facts
    entries = entries_of(plan)
    if plan.watches:
        check_sinks(plan, findings)
        facts["watch"] = {"every": plan.watches.get("every"), "rules": None, "groups": None}
        for what in ("rules", "stats", "sinks"):
            facts["watch"][f"{what}_asked"] = [repr(each) for each in made(plan, what)]
    if model is not None:
        place(plan, entries, model, findings)
        if plan.watches:
            facts["watch"] |= scopes(plan, model, findings)
    begin("saving random tensors through each pipeline")
    facts["save"] = [_entry(entry, model is not None, findings) for entry in entries]
    if inputs is not None and not findings.errors:
        begin("predicting one forward and backward")
        facts["run"] = _run(str(name), entries, findings)
    return facts


def _entry(entry: SaveEntry, on_model: bool, findings: Findings) -> dict[str, Any]:
    from disthooks.run.cli.workload import DTYPES, round_trip

    where, trips = f"{entry.at}: {entry.where}", []
    for dtype in DTYPES:
        try:
            trip = round_trip(entry.pipeline, dtype)
        except (DisthooksError, RuntimeError, TypeError) as error:
            findings.failed(where, f"a {dtype} tensor does not get through: {error}")
            continue
        if trip.lossless and not trip.identical:
            what = f"a {trip.dtype} tensor came back with other bits, and no codec says it is lossy"
            findings.failed(where, what)
        elif trip.error == float("inf"):
            findings.failed(where, f"finite numbers of a {trip.dtype} tensor came back infinite or NaN")
        trips.append(trip._asdict())
    return {
        "where": entry.where,
        "patterns": list(map(str, entry.patterns)),
        "pipeline": str(entry.pipeline),
        "round_trips": trips,
        "matched": entry.matched if on_model else None,
        "modules": list(entry.modules) if on_model else None,
        "parameters": entry.parameters() if on_model else None,
    }


def _run(model: str, entries: list[SaveEntry], findings: Findings) -> list[dict[str, Any]] | None:
    from disthooks.run.cli.workload import figures, reports
    from disthooks.saved.report import SavedReport

    placed = [
        (name, module, entry.placed or entry.pipeline) for entry in entries for name, module in entry.modules.items()
    ]
    try:
        told = reports(model, placed)
    except DisthooksError as error:
        findings.failed("the run", error)
        return None
    for name, report in told.items():
        passed = ", ".join(f"{reason} {count}" for reason, count in report.passed.items())
        if passed and not report.calls:
            findings.failed(
                "the run", f"{name or 'the model'!r} saved nothing: all its calls went without hooks ({passed})"
            )
        elif passed or not report.calls:
            findings.warnings.append(f"{name or 'the model'!r}: {passed or 'it was not called in this forward'}")
    for entry in entries:
        _find_idle(entry, sum((told[name] for name in entry.modules), SavedReport()), findings)
    return [{"module": name} | figures(report) for name, report in told.items()]


def _find_idle(entry: SaveEntry, report: SavedReport, findings: Findings) -> None:
    """An entry that takes nothing out of memory is an error; a warning if it might on a GPU."""
    if not report.calls or report.stored or report.shared or report.recomputed or report.recast:
        return
    kept = ", ".join(f"{reason} {size(count)}" for reason, count in sorted(report.kept_by.items()))
    if "in place" in report.kept_by:
        findings.warnings.append(
            f"{entry.where}: it would store nothing on this machine: its tensors are where the store would put them "
            f"({kept})"
        )
        return
    why = f"all that its modules save stays where it is ({kept})" if kept else "its modules save no tensor"
    remedy = ": attach to modules that save more, lower at_least, or give example inputs of the real size"
    findings.failed(f"{entry.at}: {entry.where}", f"it would store nothing: {why}{remedy if kept else ''}")


def _show(facts: dict[str, Any]) -> None:
    for entry in facts["save"]:
        line(f"save   {', '.join(entry['patterns'])}: {entry['pipeline']}")
        for trip in entry["round_trips"]:
            kept = "the same bits" if trip["identical"] else f"relative error {trip['error']:.2g}"
            line(f"       {trip['dtype']}, there and back: {kept}; {size(trip['before'])} are {size(trip['after'])}")
        for pattern, names in (entry["matched"] or {}).items():
            line(f"       {pattern} matches {len(names)}: {shortened(names)}")
        if entry["modules"]:
            names, count = entry["modules"], entry["parameters"]
            line(f"       on {len(names)}: {shortened(names)}; {count:,} parameters inside")
    if facts["watch"]:
        _show_watch(facts["watch"])
    if facts["run"]:
        _show_run(facts["run"])
    for text in facts["warnings"]:
        line(f"warning: {text}", "yellow")
    errors, warnings = len(facts["errors"]), len(facts["warnings"])
    told = f", {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    if errors:
        line(f"{facts['file']}: {errors} error{'s' * (errors > 1)}{told}: a run would fail", "red")
    else:
        tried = "" if facts["model"] else " (give --model to check the patterns, too)"
        line(f"{facts['file']}: ok{told}{tried}", "yellow" if warnings else "green")
    for text in facts["errors"]:
        line(as_line(text), "red", error=True)


def _show_watch(watch: dict[str, Any]) -> None:
    line(f"watch  every: {watch['every']}")
    rules = watch["rules"] or {f"{i} {rule}": None for i, rule in enumerate(watch["rules_asked"])}
    for rule, names in rules.items():
        line(f"       rule {rule}" + ("" if names is None else f" for {len(names)}: {shortened(names)}"))
    for group, names in (watch["groups"] or {}).items():
        line(f"       group {group}, {len(names)}: {shortened(names)}")
    for what in ("stats", "sinks"):
        for each in watch[f"{what}_asked"]:
            line(f"       {what.removesuffix('s')} {each}")


def _show_run(run: list[dict[str, Any]]) -> None:
    dropped = ("recomputed",) if any(each["recomputed"] for each in run) else ()  # 80 columns are few
    heads = ("module", "stored", "moved", "shared", *dropped, "kept", "weights")
    rows = [(each["module"] or "(model)", *(size(each[key]) for key in heads[1:])) for each in run]
    total = ("all", *(size(sum(each[key] for each in run)) for key in heads[1:]))
    console().print(
        table([*rows, total], heads, right=range(1, len(heads)), title="one forward and backward, predicted")
    )
