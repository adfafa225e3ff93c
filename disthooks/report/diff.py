"""``compare_logs``: the first module, rank and step in which two runs do not compute the same bits."""

# [Note: where a difference begins]
# The weights before the first update come first. Within a step forward comes first, module by module in the order of
# the calls, then the ranks' own gradients from the last parameter to the first, then the final gradients, then the
# parameters after the update. The first of these that is not the same in both runs is where the difference begins. If
# it is a module and its input is the same, the module makes the difference; if its input differs too, code between the
# modules does, or the batch.
#
# [Note: which runs are compared]
# The first run of one log is compared with the first run of the other, the second with the second, and so on. What has
# no counterpart is counted as left out: runs, steps, fingerprints, and what depends on the batch of a rank if the runs
# have other numbers of ranks. Runs are not called the same if nothing of them was compared: that is an error.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from disthooks.errors import UsageError
from disthooks.report.culprit import Culprit
from disthooks.report.log import Log, Run
from disthooks.report.timeline import timeline

_DIGITS = 16
_ALL = 2**60


class FirstDifference(NamedTuple):
    """The first difference of two runs, and what came of it in the same step.

    Attributes:
        what: "start", "input", "output", "own", "grad" or "update".
        rank: the rank, if one rank alone differs; None if several do, or it is not known.
        has_same_input: whether the input of the module is the same; None if it is no module.
        counts: how many inputs, outputs, gradients and parameters differ in this step.
    """

    step: int
    what: str
    where: str
    rank: int | None
    has_same_input: bool | None
    counts: dict[str, int]


class Comparison(NamedTuple):
    """What was compared, and the first difference.

    Attributes:
        steps: the steps that both runs have fingerprints of.
        compared: how many fingerprints were compared.
        left_out: how many of what were not compared. See [Note: which runs are compared].
        culprits: of each of the two runs, what went wrong by its own log, no later than the first difference.
    """

    steps: list[int]
    compared: int
    first: FirstDifference | None
    left_out: Counter[str]
    notes: list[str]
    culprits: tuple[list[Culprit], list[Culprit]] = ([], [])


_WHAT = {
    "start": "{where} at the start",
    "input": "the input of {where}",
    "output": "the output of {where}",
    "own": "the gradient of {where} before its reduction",
    "grad": "the final gradient of {where}",
    "update": "{where} after the update",
}


def compare_logs(one: Log, other: Log) -> dict[str, Any]:
    """What ``disthooks diff`` says of two logs; docs/cli.md has the keys. See [Note: which runs are compared]."""
    found, left_out, errors = dict[int, Comparison](), Counter[str](), []
    for place, pair in enumerate(zip(one.runs, other.runs, strict=False), 1):
        try:
            found[place] = compare(*pair)
            left_out += found[place].left_out
        except UsageError as error:
            errors.append(error)
    if not found:
        raise errors[0] if errors else UsageError("no step is logged there yet")
    alone = len(one.runs) - len(other.runs)
    left_out += Counter({_ALONE[alone < 0].format("runs"): abs(alone), "pairs with nothing in common": len(errors)})
    left_out += Counter({"lines that are no records": sum(log.half + len(log.broken) for log in (one, other))})
    runs = [{"pair": place, **_plain(each)} for place, each in found.items()]
    shown = next((run for run in runs if run["first"] is not None), runs[0])
    return {
        "same": shown["first"] is None,
        "whole": not left_out,
        "steps": shown["steps"],
        "compared": sum(run["compared"] for run in runs),
        "first": shown["first"],
        "left_out": left_out,
        "sentences": list(_sentences(found, left_out)),
        "notes": list(dict.fromkeys(note for run in runs for note in run["notes"])),
        "runs": runs,
    }


def _plain(found: Comparison) -> dict[str, Any]:
    culprits = [[culprit.document() for culprit in each] for each in found.culprits]
    return found._asdict() | {"first": found.first and found.first._asdict(), "culprits": culprits}


def _sentences(pairs: dict[int, Comparison], left_out: Counter[str]) -> Iterator[str]:
    for place, found in pairs.items():
        if place > 1 or len(pairs) > 1:
            yield f"Run {place} of both logs:"
        yield from sentences(found)
    if left_out:
        yield f"Not compared: {_said(left_out)}. The runs of the two logs are paired by their order."


def compare(one: Run, other: Run) -> Comparison:
    """Compare the fingerprints of two runs, step by step. See [Note: where a difference begins]."""
    printed = [{step: at for at, step in enumerate(run.steps) if _has(run, at)} for run in (one, other)]
    steps = [step for step in printed[0] if step in printed[1]]
    if not steps:
        raise UsageError(
            "the runs have no fingerprints of the same steps: give stats.Fingerprints() to gradients(stats=[...]) in "
            "both, in YAML {kind: Fingerprints}"
        )
    left_out = Counter({_ALONE[i].format("steps"): len(printed[i]) - len(steps) for i in range(2)})
    compared, first = 0, None
    for step in steps:
        found: list[_Found] = []
        for of, kind in _KINDS:
            mine, theirs = (_prints(run, at[step], of, kind) for run, at in zip((one, other), printed, strict=True))
            names, digits = [name for name in mine if name in theirs], _digits(one, other, kind)
            left_out += Counter(
                {_ALONE[i].format("fingerprints"): len(x) - len(names) for i, x in enumerate((mine, theirs))}
            )
            left_out[_OF_BATCH] += 0 if digits else len(names)
            compared += len(names) if digits else 0
            pairs = [(of, kind, name, mine[name][:digits], theirs[name][:digits]) for name in names]
            found += [each for each in pairs if each[3] != each[4]]
        if found:
            first = _first(one, step, found)
            break
    if not compared:
        raise UsageError(f"the runs have nothing in common that can be compared: {_said(left_out)}")
    # What a run's own log tells of a difference is in its timeline: a jump in the step of the difference, say.
    until = -1 if first is None else first.step
    culprits = [[culprit for culprit in timeline(run).culprits if culprit.first <= until] for run in (one, other)]
    return Comparison(steps, compared, first, +left_out, list(_notes(one, other)), (culprits[0], culprits[1]))


#: The names of what only one of the two runs has: of the first run and of the second.
_ALONE = ("{} only in the first", "{} only in the second")
_OF_BATCH = "fingerprints that depend on the batch of a rank"
#: In the order of [Note: where a difference begins].
_KINDS = (
    ("param", "start"),
    ("module", "input"),
    ("module", "output"),
    ("param", "own"),
    ("param", "grad"),
    ("param", "update"),
)
_OF_RANKS = ("input", "output", "own")  # they depend on the batch of a rank
_Found = tuple[str, str, str, str, str]


def _has(run: Run, at: int) -> bool:
    return any(column[at] is not None for (_, name), column in run.texts.items() if name.startswith("fingerprint/"))


def _digits(one: Run, other: Run, kind: str) -> int:
    """How many digits of a fingerprint depend on nothing in which the runs may differ."""
    if one.ranks != other.ranks:
        return 0 if kind in _OF_RANKS else _DIGITS if kind == "update" else _ALL
    # Which parts or copies of a parameter a rank has depends on the engine.
    return _DIGITS if kind == "update" and one.about.get("engine") != other.about.get("engine") else _ALL


def _prints(run: Run, at: int, of: str, kind: str) -> dict[str, str]:
    """The fingerprints of one kind in one record, in the order of [Note: where a difference begins]."""
    column = run.texts.get((of, f"fingerprint/{kind}"), {at: None})[at] or [None] * len(run.names[of])
    order = run.order[of] if of == "module" else run.order[of][::-1]
    return {run.names[of][place]: column[place] for place in order if isinstance(column[place], str)}


def _first(run: Run, step: int, found: Sequence[_Found]) -> FirstDifference:
    counts = {kind: sum(each[1] == kind for each in found) for _, kind in _KINDS}
    modules = [each for each in found if each[0] == "module"]
    starts = [each for each in found if each[1] == "start"]
    if starts:
        _, kind, name, mine, theirs = starts[-1]  # the first in the order of the model
        has_same_input = None
    elif modules:
        names = run.names["module"]
        when = {names[place]: at for at, place in enumerate(run.order["module"])}
        # Of one module the input comes first.
        _, kind, name, mine, theirs = min(modules, key=lambda each: (when[each[2]], each[1] == "output"))
        has_same_input = kind == "output"
    else:
        _, kind, name, mine, theirs = found[0]
        has_same_input = None
    return FirstDifference(step, kind, name, _rank(mine, theirs, run, kind), has_same_input, counts)


def _rank(mine: str, theirs: str, run: Run, kind: str) -> int | None:
    """The one rank that differs. See [Note: three sums tell a rank] in grads/stats/fingerprints.py."""
    ranks = run.ranks or 1
    a, b = ([int(text[at : at + _DIGITS], 16) for at in range(0, len(text), _DIGITS)] for text in (mine, theirs))
    sums = [(y - x) % 2**64 for x, y in zip(a, b, strict=False)]
    if kind == "update":
        sums = sums[1:]  # the first is the sum over the elements' owners
    if len(sums) < 3:
        return None
    fits = [p for p in range(1, ranks + 1) if sums[1] == sums[0] * p % 2**64 and sums[2] == sums[0] * p * p % 2**64]
    return fits[0] - 1 if len(fits) == 1 else None


def _notes(one: Run, other: Run) -> Iterator[str]:
    ranks = [run.ranks for run in (one, other)]
    if ranks[0] != ranks[1]:
        yield (
            f"The runs have {ranks[0]} and {ranks[1]} ranks, so their batches differ from rank to rank: only final "
            "gradients and parameters were compared."
        )


def _said(left_out: Counter[str]) -> str:
    return ", ".join(f"{what}: {many:,}" for what, many in left_out.items() if many)


def sentences(found: Comparison) -> list[str]:
    """Sentences about a pair of runs, without what was left out.

    >>> sentences(Comparison([0, 10], 40, None, Counter(), []))
    ['The runs are the same bit for bit: 40 fingerprints of 2 steps, 0 to 10, are the same.']
    >>> sentences(Comparison([0], 1, None, Counter({"steps only in the first": 3}), []))
    ['What was compared is the same bit for bit: 1 fingerprint of 1 step, 0 to 0, is the same.']
    """
    first, steps = found.first, found.steps
    if first is None:
        are = "is" if found.compared == 1 else "are"
        many = f"{len(steps)} step{'s' if len(steps) > 1 else ''}, {steps[0]} to {steps[-1]}, {are} the same"
        what = "What was compared is" if found.left_out else "The runs are"
        prints = "1 fingerprint" if found.compared == 1 else f"{found.compared:,} fingerprints"
        return [f"{what} the same bit for bit: {prints} of {many}.", *found.notes]
    on = "" if first.rank is None else f" on rank {first.rank}"
    told = [f"Step {first.step}{on}: {_WHAT[first.what].format(where=first.where)} differs."]
    if first.what == "start":
        told[0] = f"{first.where} differs at the start: the runs began with other weights."
    elif first.has_same_input:
        told[0] = told[0].removesuffix(".") + ", and its input is the same: the difference begins in this module."
    elif first.what == "input":
        told[0] = told[0].removesuffix(".") + ": the difference begins in the code before this module, or in the batch."
    else:
        told[0] = told[0].removesuffix(".") + ", and all that comes before it is the same."
    before = [step for step in steps if step < first.step]
    if before:
        told.append(f"{len(before)} compared steps before it are the same, {before[0]} to {before[-1]}.")
    names = {
        "start": "parameters at the start",
        "input": "inputs",
        "output": "outputs",
        "own": "own gradients",
        "grad": "gradients",
        "update": "parameters",
    }
    told.append(f"In this step differ: {', '.join(f'{n} {names[kind]}' for kind, n in first.counts.items() if n)}.")
    for which, culprits in zip(("first", "second"), found.culprits, strict=True):
        told += [f"By its own log, the {which} run: {culprit.text}" for culprit in culprits]
    return [*told, *found.notes]
