"""``known``: what went wrong in a run for certain: NaN, copies that differ, dead layers, slow ranks."""

# [Note: which step it was]
# A statistic of logged steps shows that something has begun since the record before. Steps that are not finite have
# records of their own, whatever `every` is, if a rule or a statistic looks in each step; and a comparison of copies
# shows that a copy changed since the comparison before.
#
# [Note: a rank that is slow]
# On a machine that does other work too, now one rank and now another waits for a core, for some records in a row. So a
# rank is slow if it leads in so many records in a row that ranks which are alike would do so less than once in 100,000
# records. How often a rank leads by chance is counted in the records outside of the row in which another rank led; four
# more records count, as if another rank had led in one of them. As many records as the longest row of another rank has
# count as one, since they are not independent. What the rank takes more than the others must also sum up to a time
# that a user would notice.

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from disthooks.grads.stats.base import PHASES
from disthooks.report.culprit import Culprit, made, module_of, whole
from disthooks.report.episodes import of_jump
from disthooks.report.log import Run
from disthooks.report.moved import Event, begun, events, others_of, stops, times, values_of
from disthooks.report.record import Record
from disthooks.report.sentences import nonfinite_entry, nonfinite_words, seconds

#: A rank is slow if its lead in a phase is this share of the step, for so many records in a row.
_SLOW = ((1.0, 5), (0.3, 20))
_BY_CHANCE, _BEFORE = 1e-5, 4  # see [Note: a rank that is slow]
_NOTICED = 0.5  # seconds
_BEGUN = 3  # records before a learning rate is looked at
_RATE = 1.3
#: For a slow rank, by the phase.
_ADVICE = {
    "input": "Look at this rank's data loader: workers, storage, the CPU cores that it may use.",
    "forward": "Look at this rank's device: clock, temperature, another process on it.",
    "backward": "Look at this rank's device: clock, temperature, another process on it.",
}
_ROWS = 3  # rows of steps that are not finite, each of which is one thing


def known(run: Run) -> list[Culprit]:
    """What went wrong in ``run`` for certain, in the order of steps."""
    found = [*_nonfinite(run), *_replicas(run), *_dead(run), *_rates(run), *_slow(run)]
    return sorted(found, key=lambda culprit: culprit.step)


# -- numbers that are not finite


def _nonfinite(run: Run) -> Iterator[Culprit]:
    """The first step of each row of steps that were not finite, at most three; the same of the loss alone."""
    outputs = values_of(run, "module", "activation_nonfinite")
    if outputs is not None:
        outputs, noted = _faulty(run, outputs)
        yield from noted
    was_bad = was_lost = False
    found = lost = 0
    for at, record in enumerate(run.records):
        bad = outputs is not None and bool((outputs[at] > 0).any())
        count, norm = record.nonfinite, record.grad_norm
        is_bad = bad or (count or 0) > 0 or bool(record.nonfinite_at)
        is_bad = is_bad or (count is None and norm is not None and not math.isfinite(norm))
        if is_bad and not was_bad and record.nonfinite_since is None and found < _ROWS:
            found += 1
            yield _of_nonfinite(run, at, record, outputs)
        loss = record.loss
        is_lost = was_lost if loss is None else not math.isfinite(loss)
        if is_lost and not (was_lost or is_bad or was_bad) and lost < _ROWS:
            lost += 1
            yield _of_loss(run, at, record, math.nan if loss is None else loss)
        was_bad, was_lost = is_bad, is_lost


def _faulty(run: Run, outputs: torch.Tensor) -> tuple[torch.Tensor, list[Culprit]]:
    """The counts of elements that are not finite without those that are no fault, and what is noted of the latter.

    A module may return -inf as a mask, and has done so since its first record; or all gradients are finite beside it.
    """
    known = ~outputs.isnan()
    first = outputs.gather(0, known.int().argmax(0)[None])[0] > 0
    harmless = [record.nonfinite == 0 and math.isfinite(record.loss or 0.0) for record in run.records]
    noted = (outputs > 0) & (first | torch.tensor(harmless)[:, None])
    told, places = [], [place for place in run.order["module"] if noted[:, place].any()]
    masks = [run.names["module"][place] for place in places if first[place]]
    if masks:
        whose = f"the output of {masks[0]} has" if len(masks) == 1 else f"the outputs of {len(masks)} modules have"
        names = "" if len(masks) == 1 else f" ({', '.join(masks[:_ROWS])}{', ...' if len(masks) > _ROWS else ''})"
        what = f"{whose} infinite or NaN elements from the first record on, as masks do{names}"
        told.append(made("noted", (run.steps[0],) * 2, masks[0], None, what))
    for place in [place for place in places if not first[place]][:_ROWS]:
        name, at = run.names["module"][place], int(noted[:, place].int().argmax())
        count = f"{float(outputs[at, place]):,.0f} elements of the output of {name} are infinite or NaN"
        told.append(made("noted", (run.steps[at],) * 2, name, None, f"{count}, and the gradients are finite"))
    return outputs.masked_fill(noted, 0.0), told


def _of_loss(run: Run, at: int, record: Record, loss: float) -> Culprit:
    """A loss that is not finite, where nothing says so of gradients and outputs."""
    jumped = _jumped(run, at)
    if jumped:
        return _of_jump(run, jumped, "the loss then became infinite or NaN", [])
    became = "NaN" if math.isnan(loss) else "infinite"
    largest = record.loss_max_rank
    rank = None if largest is None or math.isfinite(largest) else record.loss_argmax_rank
    is_known = record.nonfinite == 0 or record.grad_norm is not None
    finite = ", and the gradients of this step were finite" if is_known else ""
    values = values_of(run, "", "loss")
    assert values is not None
    return made("loss", (begun(run, values, at), run.steps[at]), "", rank, f"the loss became {became}{finite}")


def _jumped(run: Run, at: int) -> list[Event]:
    return [event for event in events(run) if event.at == at and event.signal.of == "module"]


def _of_nonfinite(run: Run, at: int, record: Record, outputs: torch.Tensor | None) -> Culprit:
    evidence = [f"blame found: {text}" for text in record.blame]
    entry = nonfinite_entry(record)
    if entry is not None:
        evidence.insert(0, nonfinite_words(entry)[:1].upper() + nonfinite_words(entry)[1:] + ".")
    jumped = _jumped(run, at)
    steps = _steps_of_nonfinite(run, at)
    if outputs is not None and (outputs[at] > 0).any():
        order = run.order["module"]
        place = next(place for place in order if outputs[at, place] > 0)
        name = run.names["module"][place]
        rank = whole(values_of(run, "module", "activation_rms/argmax_rank"), at, place)
        if jumped and order.index(jumped[0].place) < order.index(place):  # it overflowed further on
            return _of_jump(run, jumped, f"the output of {name} then became infinite or NaN", evidence)
        count = float(outputs[at, place])
        some = f"{count:,.0f} elements" if count > 1 else "an element"
        return made("nonfinite", steps, name, rank, f"{some} of the output of {name} became infinite or NaN", evidence)
    if jumped:
        return _of_jump(run, jumped, "gradients then became infinite or NaN", evidence)
    ranks = record.nonfinite_ranks
    first: dict[str, Any] = next(iter(record.nonfinite_at), {})
    rank = first.get("rank") if not ranks else ranks[0] if len(ranks) == 1 else None
    name = first.get("param", "")
    if record.nonfinite_params != 1 and first.get("before"):  # backward goes from the last one to the first
        name = module_of(first["before"])
    words = nonfinite_words(entry) if entry is not None else "the gradient norm was not finite"
    return made("nonfinite", steps, name, rank, words, evidence[1:])


def _steps_of_nonfinite(run: Run, at: int) -> tuple[int, int]:
    """See [Note: which step it was]."""
    step = run.steps[at]
    if not at or any(name in run.records[at] for name in ("nonfinite", "nonfinite_steps", "skipped")):
        return step, step
    return run.steps[at - 1] + 1, step


def _of_jump(run: Run, jumped: Sequence[Event], then: str, evidence: list[str]) -> Culprit:
    """An output jumped in the step in which something else became infinite, NaN or zero: that came of it."""
    jump = of_jump(run, jumped)
    return made(
        "forward",
        (jump.first, jump.step),
        jump.where,
        jump.rank,
        f"{jump.what}; {then}",
        evidence,
    )


# -- copies


def _replicas(run: Run) -> Iterator[Culprit]:
    """The first comparison that found copies that differ."""
    compared = run.comparisons()
    place = next((place for place, (_, record) in enumerate(compared) if record.replicas_differ), None)
    if place is None:
        return
    after, record = compared[place]
    before = compared[place - 1][0] if place else 0
    steps = (min(before, after - 1), after - 1)
    names, ranks = record.replicas_names, record.replicas_ranks
    rank = ranks[0] if len(ranks) == 1 else None
    said = "".join(f"; {text}" for text in record.replicas_at)
    count = f"{record.replicas_differ:.0f} of {record.replicas_compared or 0:.0f} tensors"
    evidence = [f"The ranks no longer have the same model, found after {after} steps: {count} differ{said}."]
    if not place and len({name.partition(": ")[0] for name in names}) > 1:
        what = f"{count} differ at the first comparison, after {after} step{'s' if after > 1 else ''}"
        yield made("weights", steps, "", rank, f"{what}: other weights from the beginning, or other updates", evidence)
        return
    where, _, state = names[0].partition(": ") if names else ("", "", "")
    state = f", the optimizer's {state}," if state else ""
    yield made(
        "replicas", steps, where, rank, f"{where or 'a tensor'}{state} differs from the copies on other ranks", evidence
    )


# -- layers, learning rates, times


def _dead(run: Run) -> Iterator[Culprit]:
    """The first layer whose outputs, or whose gradients, became all zero."""
    gone = []
    for statistic in ("activation_rms", "activation_zeros"):
        values = values_of(run, "module", statistic)
        if values is not None:
            found = stops(1.0 - values if statistic == "activation_zeros" else values)
            gone += [(at, place, begun(run, values, at)) for at, place in found]
    order = run.order["module"]
    for at, place, first in sorted(gone, key=lambda found: (found[0], order.index(found[1])))[:1]:
        name = run.names["module"][place]
        what = f"all outputs of {name} became zero, and stay so: the layer is dead"
        yield made("dead", (first, run.steps[at]), name, None, what)
        return
    norms, updates = values_of(run, "param", "grad_norm"), values_of(run, "param", "update_ratio")
    if norms is not None:
        if updates is not None:  # a parameter that has no update does not train
            norms = norms.masked_fill((norms == 0) & (updates == 0), math.nan)
        for at, place in stops(norms)[:1]:
            name = run.names["param"][place]
            steps = (begun(run, norms, at), run.steps[at])
            what = f"the gradient of {name} became zero, and stays so"
            jumped = _jumped(run, at)  # in forward, which comes before the gradient
            yield _of_jump(run, jumped, what, []) if jumped else made("dead", steps, module_of(name), None, what)


def _rates(run: Run) -> Iterator[Culprit]:
    """Jumps of the learning rate that made the updates larger."""
    rates, updates = run.column("lr"), values_of(run, "param", "update_ratio")
    if updates is None:
        return
    for at in range(_BEGUN, len(rates)):
        now, before, earlier = rates[at], rates[at - 1], rates[at - 2]
        if not now or not before or not earlier or now < _RATE * max(before, before * before / earlier):
            continue  # a rate that is warmed up grows by less and less
        if now < _RATE * max(rate or 0.0 for rate in rates[:at]):
            continue  # a schedule that begins again
        grown = float((updates[at] / updates[at - 1]).nanmedian())
        if grown > (now / before) ** 0.5:
            what = (
                f"the learning rate jumped from {before:.3g} to {now:.3g}, and the updates of the parameters to "
                f"{times(grown)} those of the logged step before"
            )
            yield made("learning rate", (run.steps[at - 1] + 1, run.steps[at]), "", None, what)


def _slow(run: Run) -> Iterator[Culprit]:
    """The first rank that took much longer than the others for several records in a row, in one phase.

    See [Note: a rank that is slow].
    """
    if (run.ranks or 1) < 2:
        return
    others = {phase: others_of(run, f"{phase}_seconds")[:, 0] for phase in PHASES}
    step = torch.stack(list(others.values())).sum(0)  # the step of a rank that is not slow
    for phase, (share, many) in itertools.product(PHASES, _SLOW):
        most = values_of(run, "", f"{phase}_seconds/max_rank")
        if most is None:
            continue
        gaps = most[:, 0] - others[phase]
        leads = (gaps / step).tolist()
        ranks = run.labels(f"{phase}_seconds/argmax_rank")
        who = [rank if lead > share else None for rank, lead in zip(ranks, leads, strict=True)]
        rows = [(rank, list(group)) for rank, group in itertools.groupby(range(len(who)), key=who.__getitem__)]
        for rank, places in rows:
            if not isinstance(rank, int) or len(places) < many:
                continue
            of_others = [len(row) for each, row in rows if each not in (None, rank)]
            often = (1 + sum(of_others)) / (_BEFORE + len(who) - len(places)) / ((run.ranks or 2) - 1)
            by_chance = often ** (len(places) / max(of_others, default=1))
            # A record stands for its own step and for those since the record before.
            lost = sum(float(gaps[at]) * (run.steps[at] - run.steps[at - 1] if at else 1) for at in places)
            if by_chance < _BY_CHANCE and lost > _NOTICED:
                early = places[0]  # it may have begun with a smaller lead, in longer steps, or led by chance
                usual = float(gaps[places].median())
                while early and ranks[early - 1] == rank:
                    if leads[early - 1] < _SLOW[-1][0] and float(gaps[early - 1]) < usual / 2:
                        break
                    early -= 1
                takes, rest = (statistics.median(column[places].tolist()) for column in (most[:, 0], others[phase]))
                what = (
                    f"its {phase} takes {seconds(takes)}, that of the other ranks {seconds(rest)}, for {len(places)} "
                    "logged steps: the rank is slow"
                )
                found = made("slow", (begun(run, most, early), run.steps[places[0]]), phase, rank, what)
                yield replace(found, advice=_ADVICE[phase])
                return
