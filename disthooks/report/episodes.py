"""``episodes``: the jumps of a run that belong together; ``cause_of`` says what each of them comes from."""

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
#   is the optimizer's state.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from disthooks.report.culprit import Culprit, made, module_of, whole
from disthooks.report.log import Run
from disthooks.report.moved import BLOCK, Event, Scores, events, others_of, times, values_of

_GAP = 3  # records without an event that end an episode
# The gradients that moved with one that jumped: how many decades, how many of those of the one, and usual deviations.
_ALSO = 0.3
_ALSO_SHARE = 0.1
_LARGEST = 1e38  # a factor between two numbers of float32; of one that was zero it is infinite
_ALSO_DEVIATIONS = 4.0
_STAYS = 4  # records after which a loss that jumped is no single batch
_LEAD = 1.5  # how many times above the others' a rank's number must be
_ALONE = 20.0  # how many times further a gradient jumped than all others, if it is one alone


def episodes(found: Sequence[Event]) -> list[list[Event]]:
    """The events that belong together, because no more than a few records without any lie between them."""
    parts: list[list[Event]] = []
    for event in found:
        if not parts or event.at > parts[-1][-1].at + _GAP:
            parts.append([])
        parts[-1].append(event)
    return parts


def cause_of(run: Run, episode: Sequence[Event]) -> Culprit:
    """The cause of an episode, by the events of its first record. See [Note: who is to blame]."""
    at = episode[0].at
    now = [event for event in episode if event.at == at]
    modules, of_step, params = ([event for event in now if event.signal.of == of] for of in ("module", "", "param"))
    grads = [event for event in params if event.signal.name.startswith("grad")]
    updates = [event for event in params if event.signal.name.startswith("update")]
    losses = [event for event in of_step if event.signal.name.startswith("loss")]
    found = None
    if modules:
        found = _of_forward(run, modules, losses)
    if found is None and losses:
        found = _of_batch(run, losses)
    if found is None and grads:
        found = _of_backward(run, at, grads)
    if found is None and len(updates) == 1:
        found = _of_update(run, updates[0])
    if found is None:
        event = max(now, key=lambda event: event.factor)
        what = said(run, event, names_rank=False)
        leads = event.signal.name.endswith("/peak") or _leads(run, at, "grad_norm")
        found = made("jump", (event.first, event.step), _name(run, event), event.rank if leads else None, what)
    return replace(found, evidence=[*(_evidence(run, event) for event in _telling(now)), *_then(run, episode, at)])


def of_jump(run: Run, modules: Sequence[Event]) -> Culprit:
    """The first of some modules whose outputs jumped in one step."""
    first = modules[0]
    name = run.names["module"][first.place]
    more = len({event.place for event in modules}) - 1
    tail = f", before those of {more} module{'s' * (more > 1)} behind it" if more else ""
    what = f"the output of {name} jumped to {first.jumped_to}{tail}"
    return made("forward", (first.first, first.step), name, rank_of(run, first), what)


def rank_of(run: Run, event: Event) -> int | None:
    """The rank of a jump: None if the other ranks had the same jump, as they do where a shared weight went wrong."""
    most = values_of(run, "module", "activation_rms/max_rank")
    if event.signal.of != "module" or most is None:
        return event.rank
    others = float(others_of(run, "activation_rms", event.place, "module")[event.at])
    return None if float(most[event.at, event.place]) < _LEAD * others else event.rank


def _of_forward(run: Run, modules: Sequence[Event], losses: Sequence[Event]) -> Culprit | None:
    if losses and modules[0].place == run.order["module"][0]:
        return None  # what the first module returns depends on the batch alone
    return of_jump(run, modules)


def _of_batch(run: Run, losses: Sequence[Event]) -> Culprit:
    event, steps = losses[0], (losses[0].first, losses[0].step)
    rank = event.rank if event.signal.rank and math.isnan(event.most) else None
    than = "on the other ranks" if rank is not None else "usually"
    what = f"the loss was {event.value:.4g}, {event.usual:.4g} {than}"
    after = [loss for loss in run.column("loss")[event.at + 1 :] if loss is not None][:_STAYS]
    if rank is None and len(after) == _STAYS and min(after) > (event.value + event.usual) / 2:
        return made("noted", steps, "", None, f"{what}, and stayed there")  # what is summed up may be another thing
    if run.names["module"]:
        cause = "the batch of this rank is bad" if rank is not None else "the batch is bad, or the weights are"
        what = f"{what}, and no layer's output jumped before it: {cause}"
    return made("batch", steps, "", rank, what)


def _of_backward(run: Run, at: int, grads: Sequence[Event]) -> Culprit:
    names, name = run.names["param"], grads[0].signal.name.partition("/")[0]
    steps = (grads[0].first, grads[0].step)
    worst = max(grads, key=lambda event: event.factor)
    values = values_of(run, "param", grads[0].signal.name)
    assert values is not None
    found = Scores(values)
    begin, row = at - at % BLOCK, at % BLOCK
    distance = found.distance(begin)[row]
    # Gradients that jumped by less count too, once it is known that something went wrong in this step. In a step in
    # which all gradients are large, those that hardly moved in comparison with the worst do not count.
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
    rank = whole(ranks, at, worst.place) if ranks is not None and _leads(run, at, name, worst.place) else None
    if is_one:
        what = f"the gradient of {names[place]} jumped to {worst.jumped_to}, and no other did so"
        return made("gradient", steps, names[place], rank, what)
    rest = order[order.index(last) + 1 :]
    behind = module_of(names[rest[0]]) if rest else ""
    where = behind or module_of(names[last])
    tail = f", and not those behind it: the backward of {where} went wrong" if behind else ""
    what = f"the gradients of {len(places)} parameters up to {names[last]} jumped, the most to {worst.jumped_to}{tail}"
    return made("backward" if behind else "gradient", steps, where, rank, what)


def _of_update(run: Run, event: Event) -> Culprit:
    name = run.names["param"][event.place]
    measured = "" if event.rank is None else f", measured on rank {event.rank},"  # one copy is measured of several
    what = f"the update of {name}{measured} jumped to {event.jumped_to}, and its gradient did not"
    return made("update", (event.first, event.step), name, None, f"{what}: the optimizer's state is wrong")


def _leads(run: Run, at: int, name: str, place: int | None = None) -> bool:
    """Whether the largest number of a rank is far above those of the others on average."""
    of = "" if place is None else "param"
    most = values_of(run, of, f"{name}/max_rank")
    if most is None or (run.ranks or 2) < 2:
        return False
    if name not in ("loss", "grad_norm"):  # of the largest elements there is no mean
        return True
    largest = float(most[at, place or 0])
    return largest > (1.1 if name == "loss" else _LEAD) * float(others_of(run, name, place)[at])


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


def _evidence(run: Run, event: Event) -> str:
    """An event in words, with the usual range, and how often there was one of the same number."""
    alike = [each for each in events(run) if (each.signal, each.place) == (event.signal, event.place)]
    before = (
        f" ({event.least:.4g} to {event.most:.4g} before)" if event.has_ratio and not math.isnan(event.most) else ""
    )
    return f"{said(run, event)}{before}; it jumped in {len(alike)} of {len(run.records)} logged steps"


def said(run: Run, event: Event, names_rank: bool = True) -> str:
    """An event in words; without a full stop."""
    on = f" on rank {event.rank}" if names_rank and event.rank is not None else ""
    name = event.signal.name.removesuffix("/max_rank").removesuffix("/peak")
    of = _name(run, event)
    where = f" of {of}" if of else ""
    whose = "that of the other ranks," if math.isnan(event.most) else "its usual"
    usual = f"{times(event.factor)} {whose} {event.usual:.4g}"
    if not event.has_ratio:
        usual = f"{whose} {event.usual:.4g}" if math.isnan(event.most) else f"at most {event.most:.4g} before"
    return f"{name}{where} was {event.value:.4g}{on}, {usual}"


def _name(run: Run, event: Event) -> str:
    return run.names[event.signal.of][event.place] if event.signal.of else ""
