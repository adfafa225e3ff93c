"""``compare``: the first module, rank and step in which two runs do not compute the same bits."""

# [Note: where a difference begins]
# Within a step forward comes first, module by module in the order of the calls, then the ranks' own gradients from the
# last parameter to the first, then the final gradients, then the parameters after the update. The first of these that
# is not the same in both runs is where the difference begins. If it is a module and its input is the same, the module
# makes the difference; if its input differs too, code between the modules does, or the batch.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from disthooks.errors import UsageError
from disthooks.report.log import Run, number

_DIGITS = 16


class Difference(NamedTuple):
    """The first difference of two runs, and what came of it in the same step.

    Attributes:
        step: the step.
        what: "input", "output", "own", "grad" or "update".
        where: the module or the parameter.
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
        first: the first difference; None if all are the same.
        notes: what could not be compared.
    """

    steps: list[int]
    compared: int
    first: Difference | None
    notes: list[str]


_WHAT = {
    "input": "the input of {where}",
    "output": "the output of {where}",
    "own": "the gradient of {where} before its reduction",
    "grad": "the final gradient of {where}",
    "update": "{where} after the update",
}


def compare(one: Run, other: Run) -> Comparison:
    """Compare the fingerprints of two runs, step by step. See [Note: where a difference begins].

    Raises:
        UsageError: when there is nothing to compare.
    """
    tables = [run.texts for run in (one, other)]
    shared = [(of, kind) for of, kind in _KINDS if all((of, f"fingerprint/{kind}") in table for table in tables)]
    places = [{step: at for at, step in enumerate(run.steps)} for run in (one, other)]
    steps = [
        step for step in one.steps if step in places[1] and _has(one, places[0][step]) and _has(other, places[1][step])
    ]
    if not shared or not steps:
        raise UsageError(
            "the runs have no fingerprints of the same steps: give stats.Fingerprints() to gradients(stats=[...]) in "
            "both, in YAML {kind: Fingerprints}"
        )
    notes = list(_notes(one, other, shared))
    has_ranks = one.about.get("ranks") == other.about.get("ranks")
    # Which parts or copies of a parameter a rank has depends on the engine.
    has_copies = has_ranks and one.about.get("engine") == other.about.get("engine")
    compared, first = 0, None
    for step in steps:
        found = []
        for of, kind in shared:
            if not has_ranks and kind in _OF_RANKS:
                continue
            for name, mine, theirs in _pairs(one, other, places, step, of, kind):
                compared += 1
                if kind == "update" and not has_copies:
                    mine, theirs = mine[:_DIGITS], theirs[:_DIGITS]
                if mine != theirs:
                    found.append((of, kind, name, mine, theirs))
        if found:
            first = _first(one, step, found)
            break
    return Comparison(steps, compared, first, notes)


#: In the order of [Note: where a difference begins].
_KINDS = (("module", "input"), ("module", "output"), ("param", "own"), ("param", "grad"), ("param", "update"))
_OF_RANKS = ("input", "output", "own")  # they depend on the batch of a rank
_Found = tuple[str, str, str, str, str]


def _has(run: Run, at: int) -> bool:
    return any(column[at] is not None for (_, name), column in run.texts.items() if name.startswith("fingerprint/"))


def _pairs(
    one: Run, other: Run, places: Sequence[dict[int, int]], step: int, of: str, kind: str
) -> Iterator[tuple[str, str, str]]:
    key = of, f"fingerprint/{kind}"
    mine, theirs = (run.texts[key][at[step]] for run, at in zip((one, other), places, strict=True))
    if mine is None or theirs is None:
        return
    there = dict(zip(other.names[of], theirs, strict=True))
    order = one.order[of] if of == "module" else one.order[of][::-1]
    for place in order:
        name = one.names[of][place]
        if isinstance(mine[place], str) and isinstance(there.get(name), str):
            yield name, mine[place], there[name]


def _first(run: Run, step: int, found: Sequence[_Found]) -> Difference:
    counts = {kind: sum(each[1] == kind for each in found) for _, kind in _KINDS}
    modules = [each for each in found if each[0] == "module"]
    if modules:
        names = run.names["module"]
        when = {names[place]: at for at, place in enumerate(run.order["module"])}
        # Of one module the input comes first.
        _, kind, name, mine, theirs = min(modules, key=lambda each: (when[each[2]], each[1] == "output"))
        has_same_input = kind == "output"
    else:
        _, kind, name, mine, theirs = found[0]
        has_same_input = None
    return Difference(step, kind, name, _rank(mine, theirs, run, kind), has_same_input, counts)


def _rank(mine: str, theirs: str, run: Run, kind: str) -> int | None:
    """The one rank that differs. See [Note: three sums tell a rank] in grads/stats/fingerprints.py."""
    ranks = int(number(run.about.get("ranks")) or 1)
    a, b = ([int(text[at : at + _DIGITS], 16) for at in range(0, len(text), _DIGITS)] for text in (mine, theirs))
    sums = [(y - x) % 2**64 for x, y in zip(a, b, strict=False)]
    if kind == "update":
        sums = sums[1:]  # the first is the sum over the elements' owners
    if len(sums) < 3:
        return None
    fits = [p for p in range(1, ranks + 1) if sums[1] == sums[0] * p % 2**64 and sums[2] == sums[0] * p * p % 2**64]
    return fits[0] - 1 if len(fits) == 1 else None


def _notes(one: Run, other: Run, shared: Sequence[tuple[str, str]]) -> Iterator[str]:
    ranks = [run.about.get("ranks") for run in (one, other)]
    if ranks[0] != ranks[1]:
        yield (
            f"The runs have {ranks[0]} and {ranks[1]} ranks, so their batches differ from rank to rank: only final "
            "gradients and parameters were compared."
        )
    for of, what in (("module", "modules"), ("param", "parameters")):
        alone = [len(set(a.names[of]) - set(b.names[of])) for a, b in ((one, other), (other, one))]
        if any(alone) and any(kind == of for kind, _ in shared):
            yield f"{alone[0]} {what} are only in the first run, and {alone[1]} only in the second."


def sentences(found: Comparison) -> list[str]:
    """What was found, in words.

    >>> sentences(Comparison([0, 10], 40, None, []))
    ['The runs are the same bit for bit: 40 fingerprints of 2 steps, 0 to 10, are the same.']
    """
    first, steps = found.first, found.steps
    if first is None:
        many = f"{len(steps)} step{'s' if len(steps) > 1 else ''}, {steps[0]} to {steps[-1]}, are the same"
        return [f"The runs are the same bit for bit: {found.compared:,} fingerprints of {many}.", *found.notes]
    on = "" if first.rank is None else f" on rank {first.rank}"
    told = [f"Step {first.step}{on}: {_WHAT[first.what].format(where=first.where)} differs."]
    if first.has_same_input:
        told[0] = told[0].removesuffix(".") + ", and its input is the same: the difference begins in this module."
    elif first.what == "input":
        told[0] = told[0].removesuffix(".") + ": the difference begins in the code before this module, or in the batch."
    else:
        told[0] = told[0].removesuffix(".") + ", and all that comes before it is the same."
    before = [step for step in steps if step < first.step]
    if before:
        told.append(f"{len(before)} compared steps before it are the same, {before[0]} to {before[-1]}.")
    names = {
        "input": "inputs",
        "output": "outputs",
        "own": "own gradients",
        "grad": "gradients",
        "update": "parameters",
    }
    told.append(f"In this step differ: {', '.join(f'{n} {names[kind]}' for kind, n in first.counts.items() if n)}.")
    return [*told, *found.notes]


def document(found: Comparison) -> dict[str, Any]:
    """The same in plain values."""
    return {
        "same": found.first is None,
        "steps": found.steps,
        "compared": found.compared,
        "first": None if found.first is None else found.first._asdict(),
        "sentences": sentences(found),
        "notes": found.notes,
    }
