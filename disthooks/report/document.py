"""``document``: what the page of a run shows, in plain values."""

# [Note: a heat map in little room]
# A statistic of 200 parameters in 2,000 steps is 400,000 numbers, and a page has six of them. A number is one byte:
# 0 where there is none, 1 for zero, 255 for what is not finite, and 2 to 254 for its logarithm. The scale goes half a
# decade beyond all but two of a hundred numbers at each end, so that one spike does not make all others one colour: 2
# is for the low end and below, 254 for the high end and above. The bytes of a parameter are differences from step to
# step, which zlib makes small, and base64 makes text of them. If there are more numbers, steps are joined, and the
# largest number of the joined steps stays.

from __future__ import annotations

import base64
import math
import statistics
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from disthooks._tensors import format_bytes
from disthooks.report.culprit import Culprit
from disthooks.report.log import Run, number
from disthooks.report.loop import changes
from disthooks.report.moved import values_of
from disthooks.report.record import Record
from disthooks.report.sentences import figure, nonfinite_entries, peak_of, rerun_words, seconds, verdict
from disthooks.report.timeline import timeline

_CELLS = 440_000  # numbers of a heat map
_POINTS = 2_000  # steps of a curve
_MOST = 200  # events
_SHARE = 0.02  # of the numbers that may be beyond each end of the scale of a heat map
_MARGIN = 0.5  # decades

#: The heat maps, in this order: of what, the statistic, the title, whether its scale is that of a share.
HEATS = (
    ("param", "grad_norm", "Gradient norm", False),
    ("param", "update_ratio", "Update over weight", False),
    ("module", "activation_rms", "Activation, root mean square", False),
    ("module", "activation_max", "Activation, largest", False),
    ("module", "activation_zeros", "Zeros in activations", True),
    ("module", "activation_nonfinite", "Activations not finite", False),
    ("param", "grad_zeros", "Zeros in gradients", True),
    ("module", "saved/moved_share", "Saved tensors that moved, part so far", True),
    ("module", "saved/recomputed_share", "Saved tensors computed again, part so far", True),
)

#: The curves: title, the section, and the names of the numbers with what they are called.
CURVES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", "norms", (("loss", "mean of the ranks"), ("loss/max_rank", "largest of a rank"))),
    (
        "Gradient norm",
        "norms",
        (
            ("grad_norm", "at logged steps"),
            ("grad_norm/peak", "largest since"),
            ("grad_norm_clipped", "after clipping"),
        ),
    ),
    ("Clip factor", "norms", (("clip_ratio", "factor"),)),
    ("Update over weight", "norms", (("update_ratio", "all parameters"),)),
    ("Learning rate", "norms", (("lr", "largest of the groups"),)),
    ("Elements of the model's inputs in a step", "also", ((Record.loop_inputs.name, "on the first rank"),)),
    ("Length of a step", "also", ((Record.loop_seconds.name, "on the first rank"),)),
    (
        "Gradient norm of each rank",
        "ranks",
        (("grad_norm/max_rank", "largest"), ("grad_norm/mean_rank", "mean"), ("grad_norm/min_rank", "smallest")),
    ),
    *(
        (
            f"{phase.capitalize()} of each rank",
            "ranks",
            ((f"{phase}_seconds/max_rank", "slowest rank"), (f"{phase}_seconds", "mean")),
        )
        for phase in ("input", "forward", "backward")
    ),
    ("Saved tensors moved in a step", "saved", (("saved/moved_per_step", "on the first rank"),)),
    (
        "Peak and its budget, on the first rank",
        "saved",
        (("saved/peak", "most in use since the record before"), ("saved/budget", "budget")),
    ),
    (
        "What fit has found, on the first rank",
        "saved",
        (
            ("saved/fit/limit", "saved tensors that may stay"),
            ("saved/fit/missing", "that move"),
            ("saved/fit/again", "that are computed again"),
        ),
    ),
)


def document(
    run: Run,
    name: str,
    notes: Sequence[str] = (),
    other: Run | None = None,
    predicted: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What the page shows of ``run``, as JSON can hold it."""
    found = timeline(run)
    wrong = found.culprits
    headline, *sentences = verdict(run, found)
    own = list(curves(run, wrong))
    made: dict[str, Any] = {
        "name": name,
        "run": run.name,
        "steps": run.steps[:: _stride(run)],
        "about": run.about,
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began)) if run.began else None,
        "seconds": run.ended - run.began if run.began is not None and run.ended is not None else None,
        "restarts": run.restarts,
        "logged": len(run.records),
        "verdict": {
            "headline": headline,
            "culprits": [culprit.document() for culprit in wrong[:_MOST]],
            "sentences": [text for text in sentences if text not in {culprit.text for culprit in wrong}],
            "missing": found.unseen,
        },
        "tiles": list(tiles(run, wrong)),
        "curves": own if other is not None else list(map(folded, own)),
        "heats": list(heats(run)),
        "events": list(happenings(run, wrong)),
        "ranks": list(leads(run)),
        "saved": list(places_of_saved(run, predicted)),
        "notes": list(notes),
    }
    if other is not None:
        made["other"] = {
            "name": other.name,
            "about": other.about,
            "steps": other.steps[:: _stride(other)],
            "curves": list(curves(other, [])),
            "tiles": list(tiles(other, timeline(other).culprits)),
        }
    return made


def _stride(run: Run) -> int:
    return max(1, -(-len(run.records) // _POINTS))


def folded(curve: dict[str, Any]) -> dict[str, Any]:
    """The curve; if its only line has one number in all steps, a sentence in its place.

    >>> folded({"title": "Learning rate", "section": "norms", "unit": "", "lines": [{"values": [0.1, 0.1]}]})
    {'title': 'Learning rate', 'section': 'norms', 'sentence': 'Learning rate: 0.1 in each logged step.'}
    """
    (line, *more), title = curve["lines"], curve["title"]
    first = line["values"][0]
    if more or not isinstance(first, float) or any(value != first for value in line["values"]):
        return curve
    number = figure({"bytes": "saved/", "seconds": "_seconds"}.get(curve["unit"], ""), first)
    return {"title": title, "section": curve["section"], "sentence": f"{title}: {number} in each logged step."}


def curves(run: Run, wrong: Sequence[Culprit]) -> Iterator[dict[str, Any]]:
    """The curves of a run. Where steps are joined, the largest number of them stays.

    A chart of ranks has a line for each of them, if the log has their numbers; those that went wrong are named.
    """
    named = {culprit.rank for culprit in wrong if culprit.kind != "noted"}
    known = {name for _, _, names in CURVES for name, _ in names}
    is_alone = run.ranks == 1
    for title, section, names in CURVES:
        if is_alone and "_rank" in names[0][0] and "_seconds" not in names[0][0]:
            continue
        each = list(_of_ranks(run, names[0][0].partition("/")[0], named)) if section == "ranks" else []
        series = [(label, column) for key, label in names if (column := _column(run, key)) is not None]
        if series:
            unit = "seconds" if "seconds" in names[0][0] else "bytes" if "saved/" in names[0][0] else ""
            lines = [{"label": label, "values": column} for label, column in series]
            yield {"title": title, "section": section, "unit": unit, "lines": each or lines}
    held = [name for name in _names(run) if name.startswith("saved/") and name.endswith("/peak_held")]
    if held:
        places = [
            {"label": name.split("/", 1)[1].removesuffix("/peak_held"), "values": _column(run, name)} for name in held
        ]
        yield {"title": "Saved tensors held at most, by place", "section": "saved", "unit": "bytes", "lines": places}
    from disthooks.grads.sinks.base import meaning

    for key in _names(run):
        ours = key in known or key.split("/")[0].split("_")[0] in ("grad", "activation", "input", "forward", "backward")
        if ours or key.startswith(
            ("loop/", "saved/", "replicas/", "skipped", "nonfinite", "loss", "update", "clip", "param_")
        ):
            continue
        column = _column(run, key) if meaning(key) == "number" else None
        if column is not None:
            yield {"title": key, "section": "also", "unit": "", "lines": [{"label": "", "values": column}]}


def _names(run: Run) -> list[str]:
    return list(dict.fromkeys(key for record in run.records for key in record))


def _of_ranks(run: Run, name: str, named: set[int | None]) -> Iterator[dict[str, Any]]:
    """A line for each rank."""
    found = [record.get(f"{name}/of_ranks", {}) for record in run.records]
    for rank in sorted({rank for numbers in found for rank in numbers}, key=int):
        column = _joined(run, [number(numbers.get(rank)) for numbers in found])
        if column is not None:
            yield {"label": f"rank {rank}", "values": column, "is_rank": True, "is_named": int(rank) in named}


def _column(run: Run, name: str) -> list[float | None] | None:
    return _joined(run, run.column(name))


def _joined(run: Run, given: Sequence[float | None]) -> list[float | None] | None:
    """The numbers of all records for a chart, some of them joined; None if there is none."""
    if all(value is None for value in given):
        return None
    stride, found = _stride(run), []
    for begin in range(0, len(given), stride):
        part = [value for value in given[begin : begin + stride] if value is not None]
        bad = [value for value in part if not math.isfinite(value)]
        found.append(None if not part else bad[0] if bad else float(f"{max(part):.6g}"))
    # JSON has no number that is not finite, so the page gets these as texts.
    return [value if value is None or math.isfinite(value) else str(value) for value in found]  # type: ignore[misc]


def heats(run: Run) -> Iterator[dict[str, Any]]:
    """The heat maps of a run. See [Note: a heat map in little room]."""
    for of, name, title, is_share in HEATS:
        values = values_of(run, of, name)
        if values is None or not values.numel() or bool(values.isnan().all()):
            continue
        if name == "activation_nonfinite" and not bool((values > 0).any()):
            continue
        yield heat(values, is_share) | {"title": title, "of": of, "rows": run.names[of]}


def heat(values: torch.Tensor, is_share: bool = False) -> dict[str, Any]:
    """A heat map of ``values``, of shape (steps, rows). See [Note: a heat map in little room].

    >>> made = heat(torch.tensor([[1.0, 10.0], [100.0, float("nan")]]))
    >>> made["low"], made["high"], list(zlib.decompress(base64.b64decode(made["data"])))
    (0.0, 2.0, [2, 252, 128, 128])
    """
    steps, rows = values.shape
    stride = max(1, -(-steps * rows // _CELLS))
    if stride > 1:
        missing = torch.full((-steps % stride, rows), math.nan, dtype=values.dtype)
        known = torch.cat([values, missing]).view(-1, stride, rows)
        largest = known.nan_to_num(-1.0, posinf=math.inf).amax(1)
        values = torch.where(largest < 0, math.nan, largest)
    is_finite = values.isfinite() & ((values > 0) | is_share)
    if is_share:
        low, high, scaled = 0.0, 1.0, values
    else:
        scaled = values.clamp(min=1e-300).log10()
        low, high = _scale_of(scaled[is_finite])
    codes = 2 + ((scaled - low) / max(high - low, 1e-9) * 252).round().clamp(0, 252)
    codes = torch.where(is_finite, codes, torch.where(values.isnan(), 0.0, torch.where(values == 0, 1.0, 255.0)))
    # Bytes wrap around, so that a difference is a byte too.
    bytes_of = codes.to(torch.uint8).T.contiguous()
    bytes_of[:, 1:] -= bytes_of[:, :-1].clone()
    data = base64.b64encode(zlib.compress(bytes(bytes_of.flatten().tolist()), 9)).decode()
    return {"low": low, "high": high, "share": is_share, "stride": stride, "columns": len(values), "data": data}


def _scale_of(levels: torch.Tensor) -> tuple[float, float]:
    """The ends of the scale of a heat map, in decades. See [Note: a heat map in little room].

    >>> _scale_of(torch.cat([torch.linspace(0.0, 1.0, 10_000), torch.tensor([30.0])]))
    (0.0, 1.48)
    """
    if not len(levels):
        return 0.0, 0.0
    some = levels.sort().values
    last = len(some) - 1
    low, high = float(some[int(_SHARE * last)]), float(some[math.ceil((1 - _SHARE) * last)])
    return max(float(some[0]), round(low - _MARGIN, 3)), min(float(some[-1]), round(high + _MARGIN, 3))


def tiles(run: Run, wrong: Sequence[Culprit]) -> Iterator[dict[str, Any]]:
    """The figures at the top of the page: title, figure, and one line below."""
    losses = [loss for loss in run.column("loss") if loss is not None]
    if losses:
        finite = [loss for loss in losses if math.isfinite(loss)]
        low = f"lowest {min(finite):.4g}, first {losses[0]:.4g}" if finite else ""
        yield {"title": "Last loss", "figure": f"{losses[-1]:.4g}", "note": low}
    peak = peak_of(run)
    if peak is not None:
        yield {
            "title": "Gradient norm, median",
            "figure": figure("", peak["median"]),
            "note": f"largest {figure('', peak['norm'])} at step {peak['step']}",
        }
    ratios = [ratio for ratio in run.column("clip_ratio") if ratio is not None]
    if ratios:
        clipped = [ratio for ratio in ratios if ratio < 1]
        note = f"by a median factor of {statistics.median(clipped):.3g}" if clipped else "no step was clipped"
        yield {"title": "Steps clipped", "figure": f"{len(clipped) / len(ratios):.0%}", "note": note}
    skipped = [total for total in run.column("skipped_total") if total is not None]
    bad = nonfinite_entries(run)
    totals = [total for total in run.column("nonfinite_steps") if total is not None]
    note = f"skipped: {max(skipped):.0f}" if skipped else ""
    yield {"title": "Steps not finite", "figure": f"{max([len(bad), *map(int, totals)])}", "note": note}
    if run.began is not None and run.ended is not None and run.ended > run.began and run.steps[-1] > run.steps[0]:
        each = (run.ended - run.began) / (run.steps[-1] - run.steps[0])
        yield {"title": "From step to step", "figure": seconds(each), "note": "on average"}
    moved = [each for each in run.column("saved/moved_per_step") if each is not None]
    if moved:
        yield {
            "title": "Saved tensors moved",
            "figure": format_bytes(statistics.median(moved)),
            "note": "in a step, first rank",
        }


#: What a rule decided of a step, by the number in its record.
_DECIDED = {
    "skipped": "The step was skipped.",
    "spike": "The step was a spike, and was skipped.",
}


def happenings(run: Run, wrong: Sequence[Culprit]) -> Iterator[dict[str, Any]]:
    """What happened when: what went wrong, steps that were skipped or not finite, restarts."""
    found: list[dict[str, Any]] = [
        {"step": each.step, "kind": each.kind, "rank": each.rank, "text": each.text} for each in wrong
    ]
    found += [{"step": each.step, "kind": "loop", "rank": None, "text": each.text} for each in changes(run)]
    named = {each.step for each in wrong}
    for entry in nonfinite_entries(run):
        if entry["step"] not in named:
            found.append({"step": entry["step"], "kind": "nonfinite", "rank": None, "text": "Gradients not finite."})
    lives = 0
    for record in run.records:
        for key, text in _DECIDED.items():
            if (record.get(key) or 0.0) > 0 and record.step not in named:
                found.append({"step": record.step, "kind": "skipped", "rank": None, "text": text})
        if words := rerun_words(record):
            found.append({"step": record.step, "kind": "rerun", "rank": None, "text": words[:1].upper() + words[1:]})
        if record.restart > lives:
            lives = record.restart
            found.append({"step": record.step, "kind": "restart", "rank": None, "text": f"Restart number {lives}."})
    yield from sorted(found, key=lambda each: each["step"])[:_MOST]


def leads(run: Run) -> Iterator[dict[str, Any]]:
    if run.ranks == 1:
        return
    for key, title in (
        ("grad_norm/argmax_rank", "largest gradient norm"),
        ("loss/argmax_rank", "largest loss"),
        ("input_seconds/argmax_rank", "slowest input"),
        ("forward_seconds/argmax_rank", "slowest forward"),
        ("backward_seconds/argmax_rank", "slowest backward"),
    ):
        given = [rank for rank in run.labels(key) if rank is not None]
        if given:
            counts = sorted(((given.count(rank), rank) for rank in set(given)), reverse=True)[:16]
            yield {"title": title, "of": len(given), "ranks": [[rank, count] for count, rank in counts]}


#: The totals of saved tensors in words, as docs/saved-tensors/report.md has them; then those of a place.
_TOTALS = {
    "stored": "stored",
    "moved": "moved",
    "shared": "shared",
    "kept": "kept",
    "recast": "copies of weights dropped, to be cast again",
    "recomputed": "dropped, to be computed again",
    "loaded": "brought back",
    "held": "held now",
    "budget": "budget",
    "peak": "in use at most since the record before",
    "pack_seconds": "forward waited",
    "unpack_seconds": "backward waited",
    "hidden_seconds": "worked while nothing waited",
}
_OF_PLACE = {
    "held": "holds now",
    "peak_held": "held at most since the record before",
    "in_flight": "in flight",
    "written": "wrote",
    "read": "read",
    "write_seconds": "time of writing",
    "read_seconds": "time of reading",
}


def places_of_saved(run: Run, predicted: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """What was predicted of saved tensors beside what was measured, and their totals at the end that are not 0."""
    moved = [each for each in run.column("saved/moved_per_step") if each is not None]
    plan = (predicted or {}).get("plan")
    rows = plan.get("modules") if isinstance(plan, dict) else None
    if moved and isinstance(rows, list):
        told = sum(number(row.get("moved")) or 0.0 for row in rows if isinstance(row, dict))
        text = f"{format_bytes(statistics.median(moved))}, and {format_bytes(told)} were predicted"
        yield {"name": "moved in a step", "text": text, "predicted": True}
    last = run.records[-1]
    for key in (key for key in _names(run) if key.startswith("saved/")):
        value = last.get(key)
        if isinstance(value, (int, float)) and value and not key.endswith("_per_step"):
            yield {"name": _in_words(key.removeprefix("saved/")), "text": figure(key, float(value))}


def _in_words(total: str) -> str:
    """The name of a total of saved tensors in words.

    >>> _in_words("pack_seconds"), _in_words("kept/small"), _in_words("OnDisk('/tmp')/written")
    ('forward waited', 'kept: small', "OnDisk('/tmp') wrote")
    """
    place, _, name = total.rpartition("/")
    if place == "kept":
        return f"kept: {name}"
    return f"{place} {_OF_PLACE.get(name, name)}" if place else _TOTALS.get(name, name)
