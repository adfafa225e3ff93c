"""``timeline``: what went wrong in a run, each cause with what came of it, and what the log cannot show.

The terminal, ``--json``, the page and ``disthooks watch`` say what is in this one list.
"""

# [Note: cause and consequence]
# What is known for certain (known.py) and the jumps (episodes.py) are events with a range of steps in which they can
# have begun. Of events that belong together the earliest is the cause, and the others are told as its consequences:
#
# - a jump that begins with something certain, or in the records after it, came of it. If the step was skipped, only a
#   jump in the same step did. Copies that differ and other weights explain all jumps after them;
# - numbers that become infinite or NaN, and layers that die, while a jump lasts came of the jump;
# - if copies differ, one changed between two comparisons. An output of its module or an update of the parameter that
#   jumped between them tells in which step, and on which of two ranks;
# - three jumps or more on one rank are one thing, with the steps;
# - a slow rank and a learning rate are things by themselves.

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from disthooks.report.culprit import Culprit, Timeline, module_of, whole
from disthooks.report.episodes import cause_of, episodes, rank_of
from disthooks.report.known import known
from disthooks.report.log import Run
from disthooks.report.moved import Event, events, values_of
from disthooks.report.sentences import spike_said
from disthooks.report.unseen import looked_at, unseen

_CERTAIN = ("nonfinite", "loss", "replicas", "weights", "dead", "learning rate")
_CONSEQUENCES = ("nonfinite", "loss", "dead")
_DEVICE = ("forward", "backward", "gradient")
_JUMPS = (*_DEVICE, "batch", "jump")
_SEVERAL, _NAMED = 3, 5  # jumps of one rank that are one thing; steps that are named of it
_AFTERWARDS = 32  # for how many records what is certain explains jumps that follow
# A rule that would have helped; it is named if the run has no such rule.
_RULE = {
    "nonfinite": ("SkipNonFinite", "SkipNonFinite leaves such steps out."),
    "batch": ("ClipNorm", "ClipNorm bounds what such a batch does."),
}


@functools.lru_cache(maxsize=2)
def timeline(run: Run) -> Timeline:
    """What went wrong in ``run``, and what its log cannot show. See [Note: cause and consequence]."""
    found = [_placed(run, culprit) if culprit.kind == "replicas" else culprit for culprit in known(run)]
    place = functools.partial(bisect.bisect_left, run.steps)  # of the first record from a step on
    for episode in episodes(events(run)):
        if any(_explains(run, culprit, place(culprit.step), episode) for culprit in found):
            continue
        cause = cause_of(run, episode)
        # Something certain may have come of the jumps of an episode, which began before.
        may_come = [each for each in found if each.kind in _CONSEQUENCES]
        for culprit in [each for each in may_come if episode[0].at < place(each.step) <= episode[-1].at + 1]:
            found.remove(culprit)
            cause = replace(cause, evidence=[*cause.evidence, f"Then: {culprit.text}"])
        found.append(cause)
    found = list(_once(run, sorted(_with_consequences(found, place), key=lambda culprit: culprit.step)))
    has = str(run.about.get("rules"))
    may_test = not any(culprit.kind in ("replicas", "weights") for culprit in found)
    found = [_finished(run, culprit, has, may_test) for culprit in found]
    found = sorted(found, key=lambda culprit: (culprit.kind == "noted", culprit.step))
    return Timeline(found, list(looked_at(run)), list(unseen(run)))


def _with_consequences(found: Sequence[Culprit], place: Callable[[int], int]) -> Iterator[Culprit]:
    """The culprits, without those that came of copies that differ or of a learning rate, which are told with these."""

    def comes_of(effect: Culprit, cause: Culprit) -> bool:
        after = place(effect.step) - place(cause.step)
        is_there = cause.kind in ("replicas", "weights", "learning rate") and 0 <= after <= _AFTERWARDS
        is_rank = effect.rank is None or cause.rank in (None, effect.rank)
        return is_there and is_rank and effect.kind in (*_CONSEQUENCES, "forward")

    for culprit in found:
        if not any(comes_of(culprit, other) for other in found):
            then = [f"Then: {other.text}" for other in found if comes_of(other, culprit)]
            yield replace(culprit, evidence=[*culprit.evidence, *then])


def _explains(run: Run, culprit: Culprit, at: int, episode: Sequence[Event]) -> bool:
    """Whether what is known for certain, of record ``at``, explains the jumps of an episode."""
    begin = episode[0]
    if culprit.kind in ("replicas", "weights"):
        return culprit.step <= begin.step
    if culprit.kind == "forward":
        return at == begin.at  # an output that overflowed is the jump itself
    after = 0 if run.records[min(at, len(run.records) - 1)].skipped else _AFTERWARDS  # a skipped step changes nothing
    return culprit.kind in _CERTAIN and at <= begin.at <= at + after


def _once(run: Run, found: Sequence[Culprit]) -> Iterator[Culprit]:
    """The culprits, where three jumps or more on one rank are one, with their pattern."""
    jumps = [culprit for culprit in found if culprit.kind in _JUMPS and culprit.rank is not None]
    several = {jump.rank: [each for each in jumps if each.rank == jump.rank] for jump in jumps}
    several = {rank: group for rank, group in several.items() if len(group) >= _SEVERAL}
    entrance = [run.names["module"][place] for place in run.order["module"][:1]]
    for culprit in found:
        group = several.get(culprit.rank, []) if culprit in jumps else []
        if not group:
            yield culprit
        elif culprit is group[0]:
            steps = [each.step for each in group]
            gaps = {later - earlier for earlier, later in itertools.pairwise(steps)}
            is_input = all(each.kind == "batch" or each.where in entrance for each in group)
            named = ", ".join(map(str, steps[:_NAMED])) + (", ..." if len(steps) > _NAMED else "")
            pattern = f", every {gaps.pop()} steps" if len(gaps) == 1 else ""
            always = f", always on rank {culprit.rank}" if len(group) == len(jumps) else f", on rank {culprit.rank}"
            first = culprit.what
            if is_input:
                first = "already in the first module: its input was bad" if culprit.where else "its batch was bad"
            yield replace(
                culprit,
                kind="batch" if is_input else culprit.kind,
                where="" if is_input else culprit.where,
                what=f"{len(group)} times{pattern}{always}, {first}",
                evidence=[each.text for each in group],
                advice=f"Look at the data of rank {culprit.rank} in steps {named}.",
            )


def _finished(run: Run, culprit: Culprit, rules: str, may_test: bool) -> Culprit:
    """The culprit with what rules did about it, and with the rule that would have helped.

    A device is suspected only if one rank had a jump once, and no copies differ.
    """
    if (
        may_test
        and culprit.rank is not None
        and culprit.kind in _DEVICE
        and "run the step again" in culprit.advice.lower()
    ):
        culprit = replace(culprit, advice=f"{culprit.advice} If not, test the device of rank {culprit.rank}.")
    if culprit.kind in _RULE and _RULE[culprit.kind][0] not in rules:
        culprit = replace(culprit, advice=f"{culprit.advice} {_RULE[culprit.kind][1]}")
    if "skipped" not in culprit.what:
        culprit = replace(culprit, what=f"{culprit.what}{spike_said(run, culprit.step)}")
    return culprit


# -- copies that differ: in which step, and on which rank


def _placed(run: Run, culprit: Culprit) -> Culprit:
    """Copies that differ, with the jump that tells the step and the rank. See [Note: cause and consequence]."""
    jump = next((event for event in events(run) if _is_of(run, event, culprit)), None)
    if jump is None:
        return replace(culprit, rank=_other_copy(run, culprit) if culprit.rank is None else culprit.rank)
    kind = "output" if jump.signal.of == "module" else "update"
    name = run.names[jump.signal.of][jump.place]
    found = f"the comparison after step {culprit.step}" if jump.step < culprit.step else "the comparison after it"
    what = f"the {kind} of {name} jumped to {jump.jumped_to}, and {found} showed that {culprit.what}"
    rank = rank_of(run, jump) if culprit.rank is None else culprit.rank
    return replace(culprit, first=jump.first, step=jump.step, rank=rank, what=what)


def _is_of(run: Run, event: Event, culprit: Culprit) -> bool:
    """Whether a jump came with the change of a copy: of its module's output or one behind, or of its update."""
    is_other = event.rank is not None and culprit.rank not in (None, event.rank)
    if not event.signal.of or is_other or not culprit.first <= event.step <= culprit.step:
        return False
    # What a batch or a learning rate did moves other modules before this one, and other updates.
    same = [each for each in events(run) if each.at == event.at and each.signal.of == event.signal.of]
    if event.signal.of == "module":
        names = run.names["module"]
        order = [names[place] for place in run.order["module"]]
        module = module_of(culprit.where)
        first = min(order.index(names[each.place]) for each in same)
        return module in order and first >= order.index(module)
    updates = {run.names["param"][each.place] for each in same if each.signal == event.signal}
    return event.signal.name.startswith("update") and updates == {culprit.where}


def _other_copy(run: Run, culprit: Culprit) -> int | None:
    """Which of two copies went wrong; None if nothing tells it.

    Of two copies one is measured, and no update of it jumped. If the momentum differs, the update of the wrong copy has
    jumped, so it is the other one.
    """
    record = next(record for record in run.records if record.replicas_differ)
    names, ranks = record.replicas_names, record.replicas_ranks
    leads = values_of(run, "param", "update_norm/lead_rank")
    has_momentum = any(name.partition(": ")[2] in ("exp_avg", "momentum_buffer") for name in names)
    if len(ranks) != 2 or not has_momentum or leads is None or culprit.where not in run.names["param"]:
        return None
    owner = whole(leads, run.records.index(record), run.names["param"].index(culprit.where))
    was_measured = culprit.step in run.steps
    return next(rank for rank in ranks if rank != owner) if owner in ranks and was_measured else None
