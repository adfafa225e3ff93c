"""``disthooks report``: say what went wrong in a run that was logged, then show its numbers."""

# [Note: what stands out]
# The report begins with sentences about the run. A norm stands out if it is ten times the median. A rank stands out if
# its norm is ten times that of the others in one step, or twice in half of the steps: batches of a healthy run differ
# by less. Steps that are not finite, tensors that differ between ranks, and skipped steps are always named. What the
# log has no numbers of is named too, so that nobody takes "nothing stands out" for more than it is.

from __future__ import annotations

import collections
import itertools
import json
import math
import pathlib
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import typer

from disthooks.cli.output import console, document, line, size, table
from disthooks.errors import UsageError

_MOST = 10  # a text names at most so many steps, files or line numbers
_FEW = 3  # steps that the verdict names one by one
_MUCH = 10.0  # see [Note: what stands out]
_WAITS = ("pack_seconds", "unpack_seconds")
_SECONDS = re.compile(r"_seconds(_per_step)?$")


class Log(NamedTuple):
    """The content of a log file.

    Attributes:
        records: one dict for each logged step, in the order of the lines.
        half: whether the last line is incomplete, because the run is writing it, or was killed.
        broken: the numbers of other lines that are no records; the first line has number 1.
    """

    records: list[dict[str, Any]]
    half: bool
    broken: list[int]


def report(
    path: str = typer.Argument(..., help="A gradients.jsonl, or the directory of a run."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """Say what went wrong in a run, and show the numbers that it logged.

    The report begins with a few sentences: steps with infinite or NaN gradients, ranks that differ, large norms, how
    often gradients were clipped, and what saving tensors elsewhere moved and cost. The figures follow. If a file has
    several runs, they are shown one after the other.
    """
    file = _file(pathlib.Path(path))
    log = read(file)
    if log.broken and not log.records:
        raise UsageError(
            f"{file}: none of its {len(log.broken)} lines is a record of a run; give what the sink Jsonl wrote"
        )
    told = [summary(run) for run in runs_in(log.records)]
    if as_json:
        document({"file": str(file), "half": log.half, "broken": log.broken, "runs": told})
        return
    if not log.records:
        line(f"{file}: no step is logged there yet")
    for run in told:
        _show(file, run, several=len(told) > 1)
    if log.half:
        line("the last line is not whole and was left out: the run is writing it, or was killed")
    if log.broken:
        line(f"{len(log.broken)} lines are no records and were left out: {log.broken[:_MOST]}")


def _file(path: pathlib.Path) -> pathlib.Path:
    """``path`` itself if it is a file, or the one log in the directory ``path``."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such file or directory; give what the sink Jsonl was given as path")
    named = sorted(path.rglob("gradients.jsonl")) or sorted(path.rglob("*.jsonl"))
    if len(named) != 1:
        what = f"{len(named)} logs: {', '.join(map(str, named[:_MOST]))}" if named else "no .jsonl file"
        raise UsageError(f"{path} has {what}; give the file")
    return named[0]


def read(file: pathlib.Path) -> Log:
    """Read the records of a log.

    Raises:
        UsageError: if the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    tail, records, broken = lines.pop(), [], []
    for number, text in enumerate(lines, 1):
        record = _record(text)
        if record is not None:
            records.append(record)
        elif text.strip():
            broken.append(number)
    last = _record(tail)
    return Log(records + ([last] if last else []), bool(tail.strip()) and last is None, broken)


def _record(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def runs_in(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The records of each run, and of each optimizer in it, in the order in which they begin.

    Records without the key ``run`` count as one run: older versions did not write it.

    >>> records = [{"step": 0, "run": "a"}, {"step": 0, "run": "b"}, {"step": 1, "run": "a"}]
    >>> [[record["step"] for record in run] for run in runs_in(records)]
    [[0, 1], [0]]
    """
    found: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault((record.get("run"), record.get("optimizer")), []).append(record)
    return list(found.values())


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one run in plain values; docs/cli.md has the keys."""
    from disthooks.grads.sinks.base import meaning

    # Each step once, in order. If a restarted run made a step again, its last record counts.
    kept = sorted({record["step"]: record for record in records}.values(), key=lambda record: int(record["step"]))
    names = list(dict.fromkeys(name for record in kept for name in record))
    figures: dict[str, dict[str, Any]] = {"number": {}, "count": {}, "total": {}, "label": {}}
    for name in names:
        kind = meaning(name)
        if kind in figures and "/param/" not in name and name not in ("run", "restart", "optimizer", "param", "module"):
            # The peak of a record is that of an earlier step, if steps are not logged.
            of = [record.get(f"{name}_step", record["step"]) for record in kept]
            found = _figures(kind, [_value(record, name) for record in kept], of)
            if found:
                figures[kind][name] = found
    about: dict[str, Any] = next((record["about"] for record in records if isinstance(record.get("about"), dict)), {})
    times = [record["time"] for record in records if isinstance(record.get("time"), (int, float))]
    told = {
        "run": records[0].get("run"),
        "optimizer": records[0].get("optimizer"),
        "about": about,
        "restarts": max((record.get("restart") or 0 for record in records), default=0),
        "began": min(times, default=None),
        "ended": max(times, default=None),
        "steps": len(kept),
        "first_step": kept[0]["step"],
        "last_step": kept[-1]["step"],
        "again": any(later["step"] <= earlier["step"] for earlier, later in itertools.pairwise(records)),
        "repeated": len(records) - len(kept),
        "numbers": figures["number"],
        "counts": figures["count"],
        "totals": figures["total"],
        "labels": figures["label"],
        "single": sum("/param/" in name for name in names)
        + sum(len(column) for of in ("param", "module") for column in (kept[-1].get(of) or {}).values()),
        "nonfinite": _not_finite(kept),
    }
    return told | {"verdict": verdict(told, kept)}


def _value(record: dict[str, Any], name: str) -> Any:
    """The value of ``name``; None for the number of a rank that was found by norms that are not finite."""
    which = re.sub(r"(argmin|argmax|outlier)_rank", "max_rank", name)
    if which != name and not math.isfinite(_number(record.get(which)) or 0.0):
        return None
    return record.get(name)


def _figures(kind: str, column: Sequence[Any], steps: Sequence[int]) -> dict[str, Any]:
    """The figures of one name over all steps; empty if the column has no number.

    Args:
        kind: what the name means: "number", "count", "total" or "label".
        column: the value in each record; None in a record without the name.
        steps: the step of each record.
    """
    if kind == "label":  # the number of a rank: how often each rank was named, the most frequent first
        named = collections.Counter(value for value in column if isinstance(value, (int, float)))
        return {str(int(value)): times for value, times in named.most_common()}
    found = [
        (number, step) for value, step in zip(column, steps, strict=True) if (number := _number(value)) is not None
    ]
    values = [number for number, _ in found]
    if not values:
        return {}
    if kind == "count":
        return {"sum": sum(values), "steps": sum(value != 0 for value in values), "of": len(values)}
    if kind == "total":  # each record has the sum up to its step
        return {"last": values[-1]}
    finite = [value for value in values if math.isfinite(value)]
    return {
        "first": values[0],
        "median": statistics.median(finite or [math.nan]),
        "last": values[-1],
        "max": max(finite or [math.nan]),
        "max_step": max(
            (pair for pair in found if math.isfinite(pair[0])), key=lambda pair: pair[0], default=(0, None)
        )[1],
        "not_finite": len(values) - len(finite),
    }


def _number(value: Any) -> float | None:
    """``value`` as a float; None if it is no number. ``Jsonl`` writes numbers that are not finite as strings."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _not_finite(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with gradients that were not finite, and the parameters and ranks that the records name."""
    found = []
    for record in records:
        count, norm = _number(record.get("nonfinite")), _number(record.get("grad_norm"))
        if count is not None:  # the statistic NonFinite has counted
            is_nonfinite = count > 0
        else:
            is_nonfinite = bool(record.get("nonfinite_at")) or (norm is not None and not math.isfinite(norm))
        if is_nonfinite:
            places = [place for place in record.get("nonfinite_at") or [] if isinstance(place, dict)]
            keys = ("nonfinite_ranks", "nonfinite_params", "nonfinite_since", "nonfinite_steps", "skipped")
            more = {key.removeprefix("nonfinite_"): record[key] for key in keys if key in record}
            found.append({"step": record["step"], "at": places, **more})
    return found


# -- the verdict


def verdict(run: dict[str, Any], records: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences that say what went wrong, what the rules did, what saving cost, and what the log does not tell.

    See [Note: what stands out].

    Args:
        run: the figures of :func:`summary`.
        records: the records of the run, each step once, in order.
    """
    wrong = [*_nonfinite_said(run, records), *_replicas_said(records), *_norm_said(records), *_rank_said(run, records)]
    if not wrong:
        wrong = [f"Nothing stands out in {run['steps']} logged steps, {run['first_step']} to {run['last_step']}."]
    return [*wrong, *_clipping_said(run, records), *_saving_said(run), *_missing_said(run, records)]


def _nonfinite_said(run: dict[str, Any], records: Sequence[dict[str, Any]]) -> Iterator[str]:
    found = run["nonfinite"]
    first = [each for each in found if "since" not in each]
    for each in first[:_FEW]:
        yield f"Step {each['step']}: {nonfinite_words(each)}."
    if len(first) > _FEW:
        yield f"{len(first) - _FEW} more such steps began a row of their own; the last of them is {first[-1]['step']}."
    total = int(run["totals"].get("nonfinite_steps", {}).get("last", 0)) or len(found)
    if found and (total > 1 or len(found) > 1):
        yield f"Gradients were not finite in {total} steps, {found[0]['step']} to {found[-1]['step']} at least."
    for blamed in dict.fromkeys(text for record in records for text in record.get("blame") or ()):
        yield f"blame found: {blamed}."


def nonfinite_words(found: dict[str, Any]) -> str:
    """What is known of one step with gradients that are not finite, as an entry of ``nonfinite`` has it."""
    from disthooks.grads.sinks.base import FINITE_WHEN_MEASURED, is_finite_when_measured, places_words
    from disthooks.watch.replicas import format_ranks

    ranks, at = found.get("ranks"), found["at"]
    where = f" on {format_ranks(ranks, ' and ')}" if ranks else ""
    count = found.get("params") or len(at)
    is_late = is_finite_when_measured(at)
    words = places_words(at, count, _FEW, says_rank=not is_late and len(ranks or ()) != 1)
    names = f", of {count} parameter{'s' if count != 1 else ''}: {words}" if at else ""
    skipped = {None: "", 0.0: "; the step was made", 1.0: "; the step was skipped"}[found.get("skipped")]
    late = f" ({FINITE_WHEN_MEASURED})" if is_late else ""
    return f"gradients were not finite{where}{names}{late}{skipped}"


def _replicas_said(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    wrong = [record for record in records if record.get("replicas/differ")]
    if wrong:
        first, last = wrong[0], wrong[-1]
        after = f"after {first['replicas/steps']} steps" if "replicas/steps" in first else f"by step {first['step']}"
        names = "".join(f"; {name}" for name in last.get("replicas/at") or ())
        yield (
            f"The ranks no longer have the same model, found {after}: {last['replicas/differ']:.0f} of "
            f"{last['replicas/compared']:.0f} tensors differ{names}."
        )


def _norm_said(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    peak = peak_of(records)
    if peak and peak["norm"] > _MUCH * peak["median"]:
        led = f", and rank {peak['rank']} had the largest norm" if peak["rank"] is not None else ""
        yield (
            f"Step {peak['step']}: the gradient norm was {figure('', peak['norm'])}, "
            f"{_times(peak['norm'], peak['median'])} its median of {figure('', peak['median'])}{led}."
        )


def peak_of(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The largest finite norm of a run, its step, the rank that led if it is known, and the median of logged norms."""
    norms = [value for record in records if math.isfinite(value := _number(record.get("grad_norm")) or math.nan)]
    found = []
    for record in records:
        if math.isfinite(norm := _number(record.get("grad_norm/peak")) or math.nan):
            found.append((norm, record["grad_norm/peak_step"], record.get("grad_norm/peak_rank")))
        if math.isfinite(norm := _number(record.get("grad_norm")) or math.nan):
            found.append((norm, record["step"], record.get("grad_norm/argmax_rank")))
    if not norms or not found:
        return None
    norm, step, rank = max(found, key=lambda each: each[0])
    return {"norm": norm, "step": step, "rank": rank, "median": statistics.median(norms)}


def _rank_said(run: dict[str, Any], records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Which rank led with the largest norm, if its lead stands out."""
    leads: dict[int, list[tuple[float, float, float, int]]] = collections.defaultdict(list)
    for record in records:
        rank = _value(record, "grad_norm/argmax_rank")
        most, mean = _number(record.get("grad_norm/max_rank")), _number(record.get("grad_norm/mean_rank"))
        if rank is None or most is None or mean is None:
            continue
        ranks = run["about"].get("ranks") or 2
        others = max((mean * ranks - most) / max(ranks - 1, 1), 0.0)
        leads[rank].append((most / others if others else math.inf, most, others, record["step"]))
    many = sum(map(len, leads.values()))
    for rank, found in leads.items():
        lead, most, others, step = max(found)
        usual = statistics.median(each[0] for each in found)
        if lead > _MUCH or (usual > 2 and 2 * len(found) > many):
            yield (
                f"Rank {rank} had the largest gradient norm in {len(found)} of {many} logged steps. Its lead is the "
                f"largest at step {step}: {figure('', most)}, and {figure('', others)} on the other ranks on average."
            )


def _clipping_said(run: dict[str, Any], records: Sequence[dict[str, Any]]) -> Iterator[str]:
    for name in run["numbers"]:
        if name.split("/")[0] in ("clip_ratio", "unit_clip_ratio"):
            ratios = [ratio for record in records if (ratio := _number(record.get(name))) is not None]
            clipped = [ratio for ratio in ratios if ratio < 1]
            label = f" ({name.partition('/')[2]})" if "/" in name else ""
            factor = f"; the median factor was {statistics.median(clipped):.3g}" if clipped else ""
            yield f"Gradients were clipped in {len(clipped)} of {len(ratios)} logged steps{label}{factor}."
    skipped = run["numbers"].get("skipped_total", {}).get("max") or run["counts"].get("skipped", {}).get("sum", 0)
    if skipped:
        yield f"{skipped:.0f} step{'s were' if skipped > 1 else ' was'} skipped."


def _saving_said(run: dict[str, Any]) -> Iterator[str]:
    moved = run["numbers"].get("saved/moved_per_step")
    if moved is None:
        return
    if not moved["max"]:
        yield "Saving moved nothing on the first rank: saved tensors stayed where they were."
        return
    waits = [run["numbers"].get(f"saved/{name}_per_step", {}).get("median", 0.0) for name in _WAITS]
    told = f"Saving moved {size(moved['median'])} of saved tensors a step out of the memory they were in"
    made = run["last_step"] - run["first_step"]
    share = ""
    if run["began"] is not None and made > 0 and run["ended"] > run["began"]:
        each = (run["ended"] - run["began"]) / made
        share = f", {sum(waits) / each:.1%} of the {seconds(each)} from step to step"
    yield f"{told}, on the first rank; forward and backward waited {seconds(sum(waits))} a step for it{share}."


def _missing_said(run: dict[str, Any], records: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = {name for record in records for name in record}
    several = run["about"].get("ranks", 2) > 1
    signals = (
        ("gradients that are not finite in unlogged steps (SkipNonFinite, NonFinite)", {"nonfinite", "skipped"}, True),
        ("which rank leads (Spread)", {"grad_norm/argmax_rank", "grad_norm/peak_rank"}, several),
        ("whether the ranks still have the same model (check_replicas)", {"replicas/compared"}, several),
    )
    missing = [what for what, needed, applies in signals if applies and not needed & names]
    if missing:
        yield f"The log does not tell {'; '.join(missing)}."


def _times(value: float, median: float) -> str:
    if not median:
        return "above"
    return f"{value / median:,.0f} times" if value > _MUCH * median else f"{value / median:.3g} times"


# -- for people


def _show(file: pathlib.Path, run: dict[str, Any], several: bool) -> None:
    for text in _heading(file, run, several):
        line(text)
    for text in run["verdict"]:
        line(text)
    keys = ("first", "median", "last", "max")
    numbers = [
        (name, *(figure(name, told[key]) for key in keys), _at(told["max_step"]), str(told["not_finite"] or ""))
        for name, told in sorted(run["numbers"].items(), key=lambda each: each[0] != "grad_norm")
    ]
    counts = [
        (name, f"{told['sum']:.10g}", f"{told['steps']} of {told['of']} steps") for name, told in run["counts"].items()
    ]
    totals = [(name, figure(name, told["last"])) for name, told in run["totals"].items()]
    tables: list[tuple[list[Any], tuple[str, ...]]] = [
        (numbers, ("", *keys, "max at", "not finite")),
        (counts, ("", "in logged steps", "not 0 in")),
        (totals, ("", f"up to step {run['last_step']}")),
    ]
    for rows, heads in tables:
        if rows:
            console().print(table(rows, heads, right=range(1, len(heads))))
    _show_places(run)


def _show_places(run: dict[str, Any]) -> None:
    """The ranks that were named, and the steps that were not finite."""
    from disthooks.grads.sinks.base import places_words

    for name, told in run["labels"].items():
        if name.endswith("_rank"):
            many = sum(told.values())
            named = [f"rank {rank} in {times} of {many} logged steps" for rank, times in told.items()]
            line(f"{name}: {', '.join(named[:_MOST])}")
    if run["single"]:
        line(f"{run['single']} numbers of single parameters are not shown")
    if run["nonfinite"]:
        line("logged steps with gradients that were not finite:")
    for each in run["nonfinite"][:_MOST]:
        since = f" (since step {each['since']})" if "since" in each else ""
        places = places_words(each["at"], each.get("params", 0), _MOST)
        line(f"  step {each['step']}{since}: {places or 'no parameter is named'}")
    if len(run["nonfinite"]) > _MOST:
        line(f"  and {len(run['nonfinite']) - _MOST} more")


def _at(step: int | None) -> str:
    return "" if step is None else f"step {step}"


def figure(name: str, value: float) -> str:
    """A number for people: bytes as MiB, seconds as ms, others with four digits.

    >>> figure("saved/moved", 589824.0), figure("saved/pack_seconds_per_step", 0.0042), figure("grad_norm", 0.28957)
    ('576.0 KiB', '4.2 ms', '0.2896')
    """
    if _SECONDS.search(name):
        return seconds(value)
    if name.startswith("saved/") and math.isfinite(value):
        return size(value)
    return f"{value:.4g}"


def seconds(value: float) -> str:
    """A time for people.

    >>> seconds(0.0000213), seconds(0.2), seconds(75.0)
    ('0.0213 ms', '200 ms', '75 s')
    """
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s" if abs(value) < 1000 else f"{value:.0f} s"


def _heading(file: pathlib.Path, run: dict[str, Any], several: bool) -> Iterator[str]:
    named = f", run {run['run']}" if run["run"] is not None and several else ""
    named += f", optimizer {run['optimizer']}" if run["optimizer"] is not None else ""
    yield f"{file}{named}: {run['steps']} logged steps, {run['first_step']} to {run['last_step']}"
    if about := run["about"]:
        ranks = f"{about['ranks']} rank{'s' if about['ranks'] != 1 else ''}"
        rules = ", ".join(about["rules"]) or "none"
        yield f"{about['engine']}, {ranks}, {about['parameters']} parameters, every {about['every']}; rules: {rules}"
    if run["began"] is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["began"]))
        again = f", restarted {run['restarts']} times" if run["restarts"] else ""
        yield f"from {began}, {run['ended'] - run['began']:.0f} s{again}"
    if run["again"] and run["run"] is None:
        why = "the run was restarted, or several wrote into one file"
        yield f"steps come again: {why}; of each step the last line counts"
    elif run["repeated"]:
        yield f"{run['repeated']} steps come again; of each the last line counts"
