"""``culprits``: what went wrong in a run: the kind, the module or parameter, the rank, the step, and the evidence."""

# [Note: who is to blame]
# One fault moves many numbers, and in the steps that follow it moves more. So the events of one step, and of the steps
# that follow without a pause, are one episode, and the first step of an episode tells the cause:
#
# - outputs of a module jump on one rank, the loss does so or not: a product in forward went wrong there, in the first
#   module that jumped. If the loss of one rank jumps and no output by more than batches do, its batch is bad;
# - the loss and the outputs are as before, and gradients of one rank jump: if it is one parameter, its gradient went
#   wrong; if it is several, a product in backward did, in the module behind the last of them in model order, since a
#   gradient goes from the last module to the first;
# - only updates jump: of all parameters together with the learning rate, it is the learning rate; of one parameter, it
#   is the optimizer's state;
# - copies that should be the same differ: all of them at the first comparison, a rank began with other weights; a few,
#   a weight or a state of the optimizer went wrong on one rank;
# - all outputs of a module become zero, or all its gradients do: the layer is dead;
# - a rank takes much longer than the others, for several steps, while it waits for nobody: it is slow.
#
# Numbers that are not finite are known exactly, and need no history (decision 92).

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from disthooks.grads.stats.base import PHASES
from disthooks.report.log import Run
from disthooks.report.moved import BLOCK, Event, Scores, events, others_of, stops, values_of
from disthooks.report.sentences import nonfinite_entry, nonfinite_words, spike_said

_GAP = 3  # records without an event that end an episode
_CERTAIN = ("nonfinite", "loss", "replicas", "weights", "dead", "learning rate")
# For how many records what is certain explains jumps that follow: ranks that differ do so for ever.
_AFTERWARDS, _ALWAYS = 32, 2**60
#: A rank is slow if its lead in a phase is this share of the step, for so many records in a row.
_SLOW = ((1.0, 5), (0.3, 20))
_BEGUN = 12  # records after which a learning rate is no longer warmed up from zero
_RATE = 1.3
# The gradients that moved with one that jumped: how many decades, how many of those of the one, and usual deviations.
_ALSO = 0.3
_ALSO_SHARE = 0.1
_LARGEST = 1e38  # a factor between two numbers of float32; of one that was zero it is infinite
_ALSO_DEVIATIONS = 4.0
_ALONE = 20.0  # how many times further a gradient jumped than all others, if it is one alone


@dataclass(frozen=True)
class Culprit:
    """What went wrong.

    Attributes:
        kind: "nonfinite", "loss", "replicas", "weights", "batch", "forward", "backward", "gradient", "update",
            "learning rate", "dead", "slow" or "jump".
        step: the first step in which it is seen.
        where: the module or parameter; "" if it is of the whole model.
        rank: the rank; None if it is of all ranks, or not known.
        text: a sentence that says all of it.
        evidence: sentences with the numbers.
        advice: what to do.
    """

    kind: str
    step: int
    where: str
    rank: int | None
    text: str
    evidence: list[str] = field(default_factory=list)
    advice: str = ""

    def document(self) -> dict[str, Any]:
        """The same in plain values."""
        return dict(vars(self))


ADVICE = {
    "nonfinite": "Look at the data of this step and at the module's inputs.",
    "loss": "Look at the batch of this step, and at what the loss divides by or takes the logarithm of.",
    "replicas": "Restart from the last checkpoint. If the same rank is named again, test the memory of its device.",
    "weights": "Give all ranks the same seed before the model is built, or load the same checkpoint on all of them.",
    "batch": "Look at the batch that this rank had in this step.",
    "forward": "Run the step again from a checkpoint. If the jump comes again, look at the batch and at this module; "
    "if not, the rank's device computed wrong once: test it.",
    "backward": "Run the step again from a checkpoint. If the jump comes again, look at this module's backward; if "
    "not, the rank's device computed wrong once: test it.",
    "gradient": "Run the step again from a checkpoint. If the jump does not come again, the rank's device or its "
    "memory went wrong once: test it.",
    "update": "The gradient was as usual, so the optimizer's state of this parameter is wrong: restart from the last "
    "checkpoint, and test the memory of the device if it comes again.",
    "learning rate": "Look at the schedule, or at the checkpoint that the optimizer was restored from.",
    "dead": "Look at the layer's bias and at its learning rate; start it again from an earlier checkpoint.",
    "slow": "",
    "jump": "Look at the data of this step, and at what changed in the run.",
}
# A rule that would have helped; it is named if the run has no such rule.
RULE = {
    "nonfinite": ("SkipNonFinite", "SkipNonFinite leaves such steps out."),
    "batch": ("ClipNorm", "ClipNorm bounds what such a batch does."),
}
SLOW = {
    "input": "Look at this rank's data loader: workers, storage, the CPU cores that it may use.",
    "forward": "Look at this rank's device: clock, temperature, another process on it.",
    "backward": "Look at this rank's device: clock, temperature, another process on it.",
}


def culprits(run: Run) -> list[Culprit]:
    """What went wrong in ``run``, in the order of steps. See [Note: who is to blame]."""
    found = [*_nonfinite(run), *_replicas(run), *_dead(run), *_rates(run), *_slow(run)]
    places = {step: at for at, step in enumerate(run.steps)}
    for episode in episodes(events(run)):
        if not any(_explains(culprit, places.get(culprit.step, 0), episode) for culprit in found):
            found.append(_judge(run, episode))
    has = str(run.about.get("rules"))
    found = [
        replace(each, advice=f"{each.advice} {RULE[each.kind][1]}")
        if each.kind in RULE and RULE[each.kind][0] not in has
        else each
        for each in found
    ]
    found = [
        each
        if "skipped" in each.text
        else replace(each, text=f"{each.text.removesuffix('.')}{spike_said(run, each.step)}.")
        for each in found
    ]
    return sorted(found, key=lambda culprit: culprit.step)


def _explains(culprit: Culprit, at: int, episode: Sequence[Event]) -> bool:
    """Whether what is known for certain, of the record at ``at``, explains the jumps of an episode."""
    if culprit.kind not in _CERTAIN:
        return culprit.kind == "forward" and at == episode[0].at  # an output that overflowed is the jump itself
    lasts = _ALWAYS if culprit.kind in ("replicas", "weights") else _AFTERWARDS
    return episode[0].at - lasts <= at <= episode[-1].at + 1


def episodes(found: Sequence[Event]) -> list[list[Event]]:
    """The events that belong together, because no more than a few records without any lie between them."""
    parts: list[list[Event]] = []
    for event in found:
        if not parts or event.at > parts[-1][-1].at + _GAP:
            parts.append([])
        parts[-1].append(event)
    return parts


# -- episodes


def _judge(run: Run, episode: Sequence[Event]) -> Culprit:
    """The cause of an episode, by the events of its first step."""
    at = episode[0].at
    now = [event for event in episode if event.at == at]
    modules, of_step, params = ([event for event in now if event.signal.of == of] for of in ("module", "", "param"))
    grads = [event for event in params if event.signal.name.startswith("grad")]
    updates = [event for event in params if event.signal.name.startswith("update")]
    losses = [event for event in of_step if event.signal.name.startswith("loss")]
    made = None
    if modules:
        made = _of_forward(run, at, modules, losses)
    if made is None and losses:
        made = _of_batch(run, at, losses)
    if made is None and grads:
        made = _of_backward(run, at, grads)
    if made is None and len(updates) == 1:
        made = _of_update(run, at, updates[0])
    if made is None:
        event = max(now, key=lambda event: event.factor)
        made = _culprit(run, "jump", at, _name(run, event), event.rank, said(run, event, names_rank=False))
    return replace(made, evidence=[*(said(run, event) for event in _telling(now)), *_then(run, episode, at)])


def _culprit(run: Run, kind: str, at: int, where: str, rank: int | None, what: str) -> Culprit:
    step, on = run.steps[at], "" if rank is None else f" on rank {rank}"
    return Culprit(kind, step, where, rank, f"Step {step}{on}: {what}.", [], ADVICE[kind])


def _rates(run: Run) -> Iterator[Culprit]:
    """Jumps of the learning rate that made the updates larger."""
    rates, updates = run.column("lr"), values_of(run, "param", "update_ratio")
    if updates is None:
        return
    for at in range(_BEGUN, len(rates)):
        now, before = rates[at], rates[at - 1]
        if not now or not before or not 0 < _RATE * before <= now:
            continue
        grown = float((updates[at] / updates[at - 1]).nanmedian())
        if grown > (now / before) ** 0.5:
            step = run.steps[at]
            text = (
                f"Step {step}: the learning rate jumped from {before:.3g} to {now:.3g}, and the updates of the "
                f"parameters to {_times(grown)} those of the step before"
            )
            yield Culprit("learning rate", step, "", None, f"{text}.", [], ADVICE["learning rate"])


def _of_forward(run: Run, at: int, modules: Sequence[Event], losses: Sequence[Event]) -> Culprit | None:
    if losses and modules[0].place == run.order["module"][0]:
        return None  # what the first module returns depends on the batch alone
    return _of_jump(run, at, modules)


def _of_jump(run: Run, at: int, modules: Sequence[Event]) -> Culprit:
    first = modules[0]
    name = run.names["module"][first.place]
    more = len({event.place for event in modules}) - 1
    tail = f", before those of {more} modules behind it" if more else ""
    return _culprit(
        run,
        "forward",
        at,
        name,
        first.rank,
        f"the output of {name} jumped to {_times(first.factor)} its usual {_quantity(first)}{tail}",
    )


def _of_batch(run: Run, at: int, losses: Sequence[Event]) -> Culprit:
    event = losses[0]
    rank = event.rank if event.signal.rank else None
    than = "on the other ranks" if rank is not None else "usually"
    what = f"the loss was {event.value:.4g}, {event.usual:.4g} {than}, and no layer's output jumped before it: "
    cause = "the batch of this rank is bad" if rank is not None else "the batch is bad, or the weights are"
    return _culprit(run, "batch", at, "", rank, f"{what}{cause}")


def _of_backward(run: Run, at: int, grads: Sequence[Event]) -> Culprit:
    names, name = run.names["param"], grads[0].signal.name.partition("/")[0]
    worst = max(grads, key=lambda event: event.factor)
    values = values_of(run, "param", grads[0].signal.name)
    assert values is not None
    found = Scores(values)
    begin, row = at - at % BLOCK, at % BLOCK
    distance = found.distance(begin)[row]
    # Those that moved by less moved too, once it is known that something went wrong in this step. In a step in which
    # all gradients are large, those that moved hardly in comparison with the worst did not come of it.
    far = max(_ALSO, _ALSO_SHARE * math.log10(min(worst.factor, _LARGEST)))
    moved = (distance > far) & (found.deviations(begin, torch.arange(len(distance)))[row] > _ALSO_DEVIATIONS)
    order = run.order["param"]
    jumped = {event.place for event in grads if math.log10(event.factor) > far}
    all_moved = jumped | set(moved.nonzero().flatten().tolist())
    places = [place for place in order if place in all_moved]
    last = places[-1]
    is_one = len(places) == 1 or worst.factor > _ALONE * max(
        10 ** float(distance[p]) for p in places if p != worst.place
    )
    place = worst.place if is_one else last
    ranks = values_of(run, "param", f"{name}/argmax_rank")
    rank = _whole(ranks, at, worst.place) if ranks is not None and _leads(run, at, name, worst.place) else None
    if is_one:
        what = f"the gradient of {names[place]} jumped to {_times(worst.factor)} its usual size, and no other did so"
        return _culprit(run, "gradient", at, names[place], rank, what)
    rest = order[order.index(last) + 1 :]
    behind = _module_of(names[rest[0]]) if rest else ""
    where = behind or _module_of(names[last])
    tail = f", and not those behind it: the backward of {where} went wrong" if behind else ""
    what = (
        f"the gradients of {len(places)} parameters up to {names[last]} jumped, the most to {_times(worst.factor)} its "
        f"usual size{tail}"
    )
    return _culprit(run, "backward" if behind else "gradient", at, where, rank, what)


def _of_update(run: Run, at: int, event: Event) -> Culprit:
    name = run.names["param"][event.place]
    what = f"the update of {name} jumped to {_times(event.factor)} its usual size, and its gradient did not"
    return _culprit(run, "update", at, name, event.rank, f"{what}: the optimizer's state is wrong")


def _leads(run: Run, at: int, name: str, place: int | None = None) -> bool:
    """Whether the largest number of a rank is far above those of the others on average."""
    of = "" if place is None else "param"
    most = values_of(run, of, f"{name}/max_rank")
    if most is None or (run.ranks or 1) < 2:
        return False
    if name not in ("loss", "grad_norm"):  # of the largest elements there is no mean
        return True
    largest = float(most[at, place or 0])
    return largest > (1.1 if name == "loss" else 1.5) * float(others_of(run, name, place)[at])


def _telling(now: Sequence[Event]) -> Iterator[Event]:
    """At most one event of each statistic: the first one."""
    seen = set()
    for event in now:
        if event.signal not in seen:
            seen.add(event.signal)
            yield event


def _then(run: Run, episode: Sequence[Event], at: int) -> Iterator[str]:
    """When the loss followed, if it did so later."""
    loss = next((event for event in episode if event.signal.name.startswith("loss")), None)
    if loss is not None and loss.at > at:
        after = run.steps[loss.at] - run.steps[at]
        later = f"{after} step{'s' if after > 1 else ''} later, at step {run.steps[loss.at]}"
        yield f"The loss jumped {later}: {loss.value:.4g}, usually {loss.usual:.4g}."


def said(run: Run, event: Event, names_rank: bool = True) -> str:
    """An event in words; without a full stop."""
    on = f" on rank {event.rank}" if names_rank and event.rank is not None else ""
    name = event.signal.name.removesuffix("/max_rank")
    of = _name(run, event)
    where = f" of {of}" if of else ""
    return f"{name}{where} was {event.value:.4g}{on}, {_times(event.factor)} its usual {event.usual:.4g}"


def _name(run: Run, event: Event) -> str:
    return run.names[event.signal.of][event.place] if event.signal.of else ""


def _quantity(event: Event) -> str:
    return "largest magnitude" if event.signal.name.startswith("activation_max") else "root mean square"


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def _times(factor: float) -> str:
    return f"{factor:.0e} times" if factor >= 1e7 else f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"


# -- what is known without a history


def _nonfinite(run: Run) -> Iterator[Culprit]:
    """The first step of each row of steps that were not finite, at most three; the same of the loss alone."""
    outputs = values_of(run, "module", "activation_nonfinite")
    was_bad = was_lost = False
    found = lost = 0
    for at, record in enumerate(run.records):
        bad = outputs is not None and bool((outputs[at] > 0).any())
        count, norm = record.get("nonfinite"), record.get("grad_norm")
        is_bad = bad or (count or 0) > 0 or bool(record.get("nonfinite_at"))
        is_bad = is_bad or (count is None and norm is not None and not math.isfinite(norm))
        if is_bad and not was_bad and "nonfinite_since" not in record and found < 3:
            found += 1
            yield _of_nonfinite(run, at, record, outputs)
        loss = record.get("loss")
        is_lost = was_lost if loss is None else not math.isfinite(loss)
        if is_lost and not (was_lost or is_bad or was_bad) and lost < 3:
            lost += 1
            yield _of_loss(run, at, record)
        was_bad, was_lost = is_bad, is_lost


def _of_loss(run: Run, at: int, record: dict[str, Any]) -> Culprit:
    """A loss that is not finite, where nothing says so of gradients and outputs."""
    jumped = [event for event in events(run) if event.at == at and event.signal.of == "module"]
    if jumped:
        return _overflowed(run, at, jumped, "the loss", [])
    became = "NaN" if math.isnan(record["loss"]) else "infinite"
    largest = record.get("loss/max_rank")
    rank = None if largest is None or math.isfinite(largest) else record.get("loss/argmax_rank")
    is_known = record.get("nonfinite") == 0 or record.get("grad_norm") is not None
    finite = ", and the gradients of this step were finite" if is_known else ""
    return _culprit(run, "loss", at, "", rank, f"the loss became {became}{finite}")


def _of_nonfinite(run: Run, at: int, record: dict[str, Any], outputs: torch.Tensor | None) -> Culprit:
    step = run.steps[at]
    evidence = [f"blame found: {text}" for text in record.get("blame", ())]
    entry = nonfinite_entry(record)
    if entry is not None:
        evidence.insert(0, nonfinite_words(entry)[:1].upper() + nonfinite_words(entry)[1:] + ".")
    jumped = [event for event in events(run) if event.at == at and event.signal.of == "module"]
    if outputs is not None and (outputs[at] > 0).any():
        order = run.order["module"]
        place = next(place for place in order if outputs[at, place] > 0)
        name, rank = (
            run.names["module"][place],
            _whole(values_of(run, "module", "activation_rms/argmax_rank"), at, place),
        )
        if jumped and order.index(jumped[0].place) < order.index(place):  # it overflowed further on
            return _overflowed(run, at, jumped, f"the output of {name}", evidence)
        count = float(outputs[at, place])
        some = f"{count:,.0f} elements" if count > 1 else "an element"
        text = f"{some} of the output of {name} became infinite or NaN"
        return replace(_culprit(run, "nonfinite", at, name, rank, text), evidence=evidence)
    if jumped:
        return _overflowed(run, at, jumped, "gradients", evidence)
    ranks: list[int] = record.get("nonfinite_ranks", [])
    first: dict[str, Any] = next(iter(record.get("nonfinite_at", ())), {})
    rank = ranks[0] if len(ranks) == 1 else first.get("rank")
    name = first.get("param", "")
    if record.get("nonfinite_params", 2) > 1 and first.get("before"):  # backward goes from the last one to the first
        name = _module_of(first["before"])
    words = nonfinite_words(entry) if entry is not None else "the gradient norm was not finite"
    return Culprit("nonfinite", step, name, rank, f"Step {step}: {words}.", evidence[1:], ADVICE["nonfinite"])


def _overflowed(run: Run, at: int, jumped: Sequence[Event], what: str, evidence: list[str]) -> Culprit:
    """An output jumped in the step in which something else became infinite or NaN: that came of it."""
    made = _of_jump(run, at, jumped)
    text = f"{made.text.removesuffix('.')}; {what} then became infinite or NaN."
    return replace(made, text=text, evidence=evidence)


def _whole(values: torch.Tensor | None, at: int, place: int) -> int | None:
    found = math.nan if values is None else float(values[at, place])
    return int(found) if math.isfinite(found) else None


def _replicas(run: Run) -> Iterator[Culprit]:
    """The first comparison that found copies that differ."""
    record = next((record for record in run.records if record.get("replicas/differ")), None)
    if record is None:
        return
    differ, compared = (record.get(f"replicas/{name}") or 0.0 for name in ("differ", "compared"))
    after = record.get("replicas/steps")
    step = record["step"] if after is None else after - 1
    found = f"found after {after} steps" if after is not None else f"by step {step}"
    names, ranks = record.get("replicas/names", []), record.get("replicas/ranks", [])
    rank = ranks[0] if len(ranks) == 1 else _other_copy(run, step, names, ranks)
    on = "" if rank is None else f" on rank {rank}"
    what = f"The ranks no longer have the same model, {found}: {differ:.0f} of {compared:.0f} tensors differ"
    said = "".join(f"; {text}" for text in record.get("replicas/at", ()))
    is_first = record is next(record for record in run.records if "replicas/differ" in record)
    if is_first and len({name.partition(": ")[0] for name in names}) > 1:
        text = f"Step {step}: {differ:.0f} of {compared:.0f} tensors differ{on} at the first comparison: other weights"
        yield Culprit("weights", step, "", _leaver(ranks, rank), f"{text}.", [f"{what}{said}."], ADVICE["weights"])
        return
    where = names[0].partition(": ")[0] if names else ""
    state = f", the optimizer's {names[0].partition(': ')[2]}," if names and ": " in names[0] else ""
    equal = [each["step"] for each in run.records if each.get("replicas/differ") == 0 and each["step"] < step]
    when = f"Between steps {equal[-1]} and {step}" if equal and equal[-1] < step - 1 else f"Step {step}"
    text = f"{when}: {where or 'a tensor'}{state} differs{on} from the copies on other ranks"
    yield Culprit("replicas", step, where, rank, f"{text}.", [f"{what}{said}."], ADVICE["replicas"])


def _leaver(ranks: Sequence[Any], rank: int | None) -> int | None:
    """Of two ranks that began with other weights, the one that is not the first: the first one writes checkpoints."""
    return ranks[1] if rank is None and len(ranks) == 2 else rank


def _other_copy(run: Run, step: int, names: Sequence[str], ranks: Sequence[Any]) -> int | None:
    """Which of two copies went wrong; None if nothing tells it.

    Of two copies one is measured. If its update jumped, it is that one. If the momentum differs, the update of the
    wrong copy has jumped, and if it is not that of the measured one, it is the other one's.
    """
    if len(ranks) != 2 or not names or step not in run.steps:
        return None
    name = names[0].partition(": ")[0]
    leads = values_of(run, "param", "update_norm/lead_rank")
    if leads is None or name not in run.names["param"]:
        return None
    at, place = run.steps.index(step), run.names["param"].index(name)
    owner = _whole(leads, at, place)
    if owner is None or owner not in ranks:
        return None
    if any(e.at == at and e.place == place and e.signal.name.startswith("update") for e in events(run)):
        return owner
    has_momentum = any(name.partition(": ")[2] in ("exp_avg", "momentum_buffer") for name in names)
    return next(rank for rank in ranks if rank != owner) if has_momentum else None


def _dead(run: Run) -> Iterator[Culprit]:
    """The first layer whose outputs, or whose gradients, became all zero."""
    gone = []
    for statistic in ("activation_rms", "activation_zeros"):
        values = values_of(run, "module", statistic)
        if values is not None:
            gone += stops(1.0 - values if statistic == "activation_zeros" else values)
    order = run.order["module"]
    for at, place in sorted(gone, key=lambda found: (found[0], order.index(found[1])))[:1]:
        name = run.names["module"][place]
        text = f"Step {run.steps[at]}: all outputs of {name} became zero, and stay so: the layer is dead."
        yield Culprit("dead", run.steps[at], name, None, text, [], ADVICE["dead"])
        return
    norms = values_of(run, "param", "grad_norm")
    if norms is not None:
        for at, place in stops(norms)[:1]:
            name = run.names["param"][place]
            text = f"Step {run.steps[at]}: the gradient of {name} became zero, and stays so."
            yield Culprit("dead", run.steps[at], _module_of(name), None, text, [], ADVICE["dead"])


def _slow(run: Run) -> Iterator[Culprit]:
    """The first rank that took much longer than the others for several records in a row, in one phase."""
    if values_of(run, "", "input_seconds/max_rank") is None or (run.ranks or 1) < 2:
        return
    others = {phase: others_of(run, f"{phase}_seconds")[:, 0] for phase in PHASES}
    whole = torch.stack(list(others.values())).sum(0)  # the step of a rank that is not slow
    for phase, (share, many) in itertools.product(PHASES, _SLOW):
        most = values_of(run, "", f"{phase}_seconds/max_rank")
        assert most is not None
        is_slow = (most[:, 0] - others[phase] > share * whole).tolist()
        who = [
            rank if far else None for rank, far in zip(run.labels(f"{phase}_seconds/argmax_rank"), is_slow, strict=True)
        ]
        for rank, group in itertools.groupby(range(len(who)), key=who.__getitem__):
            places = list(group)
            if isinstance(rank, int) and len(places) >= many:
                takes, rest = (statistics.median(column[places].tolist()) for column in (most[:, 0], others[phase]))
                step = run.steps[places[0]]
                text = (
                    f"Step {step} on rank {rank}: its {phase} takes {_seconds(takes)}, that of the other ranks "
                    f"{_seconds(rest)}, for {len(places)} logged steps: the rank is slow"
                )
                yield Culprit("slow", step, phase, rank, f"{text}.", [], SLOW[phase])
                return


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
