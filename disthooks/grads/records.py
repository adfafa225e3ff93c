"""The records of steps: numbers are copied to the host without waiting, and read one step late."""

# [Note: no host sync]
# The host may be several steps ahead of the device, and a training loop that asks for a number makes it wait. So
# nothing here reads a number in the step that makes it. All numbers of a step that the host wants are one vector
# (`StepNumbers`), which is copied once, into pinned memory. It is read when that costs nothing: as soon as its event
# says that it has arrived; at the start of the next step if the step was logged, or has a `DeferredError`: by that time
# it has almost always arrived. `flush()`, `remove()` and the end of the process wait. Rules keep their state in tensors
# on the device, and decide by `torch.where` and multiplication in place of `if`.

# [Note: which rank began]
# A step whose gradients are not finite is recorded whatever `every` is: logged every 50 steps, a NaN of rank 1 at step
# 37 was found at step 50, when the update had carried it to all ranks, and rank 0 was named. Which rank it was is known
# only before the reduction, so hooks look in every backward (local_hooks.py), and each rank adds a bit of its own to
# one float64 for each parameter (`OwnNonFinite`), in the SUM that the step makes anyway. To gather the ranks afterwards
# would take one more collective, which is lost when training ends there.

# [Note: which parameters are named]
# In backward a NaN spreads from the layer where it begins towards the input of the model. So the first parameters in
# model order that have one are the least telling, and the last ones, with a finite parameter behind them, are the most
# telling: the NaN begins between the two. A record names at most ten, the last of each row of such parameters first,
# and with it the parameter behind it, as `before` (decision 177).

# [Note: recent steps]
# What goes wrong between two logged steps is seen in the next one, when it has spread. So the numbers of the last steps
# that are not logged can stay on the device, merged over the ranks as those of a logged step. Nothing copies them until
# something happens: a step that is not finite, or a norm above the mean of the 128 before by six standard deviations,
# the limit of SkipSpike. Then they become records, and so do those of the next few steps. Every rank measures them
# in every step, so ranks that notice it at different times make the same collectives. A statistic that keeps a state
# from one logged step to the next gets a copy of it for them.

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from disthooks._ranks import global_rank
from disthooks._streams import current_stream, event_on, on_accelerator
from disthooks.grads.loop import LoopFacts
from disthooks.grads.plan import StepPlan, Vectors
from disthooks.grads.rules.history import History
from disthooks.grads.sinks.base import RecordWriter
from disthooks.grads.stats.base import Found, Measure, Stat, State
from disthooks.grads.stats.nonfinite import NonFiniteCount, OwnLead, OwnNonFinite, leader, ranks_in
from disthooks.grads.stats.norms import Power

_MOST_NAMED = 10  # parameters that a record names
_NORMS = History(window=128, least=16, sigmas=6.0)  # see [Note: recent steps]
_AFTER = 8  # steps after one that something happened in


class StepNumbers:
    """The numbers of one step that the host reads later. See [Note: no host sync].

    >>> numbers = StepNumbers()
    >>> numbers.want([torch.tensor(2.0), torch.tensor([3, 4])], print)
    >>> numbers.send()
    >>> numbers.read()
    [tensor([2.], dtype=torch.float64), tensor([3, 4])]
    """

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._readers: list[tuple[int, Callable[[list[torch.Tensor]], object]]] = []
        self.is_sent = False
        self._rows: list[torch.Tensor] = []
        self._events: list[torch.Event] = []

    def want(self, parts: Sequence[torch.Tensor], read: Callable[[list[torch.Tensor]], object]) -> None:
        """Call ``read`` with copies of ``parts``, as rows of float64 or int64, when they are on the host."""
        self._parts += parts
        self._readers.append((len(parts), read))

    def send(self) -> None:
        """Start copying the numbers: one vector from each device, mostly from one."""
        if self.is_sent:
            return
        parts, self._parts, self.is_sent = self._parts, [], True
        rows = [(part if part.dtype is torch.int64 else part.double()).reshape(-1) for part in parts]
        self._rows = list(rows)
        for device in dict.fromkeys(row.device for row in rows):
            places = [i for i, row in enumerate(rows) if row.device == device]
            bits = torch.cat([rows[i].view(torch.int64) for i in places])
            pieces = torch.split(bits.to("cpu", non_blocking=True), [len(rows[i]) for i in places])
            self._events += [event_on(current_stream(device))] if on_accelerator(bits) else []
            for i, piece in zip(places, pieces, strict=True):
                self._rows[i] = piece.view(rows[i].dtype)

    def arrived(self) -> bool:
        """Whether :meth:`read` would wait for nothing."""
        return all(event.query() for event in self._events)

    def read(self) -> None:
        """Call the readers, in the order in which they were given; waits until the numbers have arrived."""
        for event in self._events:
            event.synchronize()
        rows = self._rows
        for count, read in self._readers:
            read(rows[:count])
            rows = rows[count:]


#: A number that all ranks have alike, and the function that raises if the number says so.
DeferredError = tuple[torch.Tensor, Callable[[float], None]]


#: A bool on the device, and the numbers that are recorded of the step if it is true, whatever ``every`` is.
Event = tuple[torch.Tensor, Mapping[str, torch.Tensor]]


class NonFiniteStep(NamedTuple):
    """A step that is known to have had gradients that were not finite.

    Attributes:
        step: the number of the step.
        fields: the names and values for the log that tell which of its gradients were not finite.
        is_first: whether it is the first of several in a row, so that it gets a record even if it is not logged.
    """

    step: int
    fields: dict[str, Any]
    is_first: bool


class _Peak(NamedTuple):
    """The largest norm since the last record, its step, and the rank that led in it, if one did."""

    norm: float
    step: int
    rank: int | None


class _NonFiniteRow(NamedTuple):
    """Steps in a row whose gradients were not finite; the last of them is the step that was read last."""

    since: int
    is_skipped: bool
    where: tuple[Any, ...]


class WatchedSteps:
    """Finds the steps that are not finite, and the largest norm, from numbers that are copied in every step.

    See [Note: which rank began]. Nothing waits for these numbers: the host may be several steps ahead, and reads them
    some steps later. A step that an optimizer makes with such gradients spoils the parameters, so that the steps that
    follow are not finite either: they count, and get no record of their own. After a step that was left out
    (:class:`~disthooks.SkipNonFinite`) the parameters are as they were, so the next such step gets a record, unless the
    same parameters and ranks fail again.

    Attributes:
        count: how many of the steps that were read so far were not finite.
        found: steps that were not finite, until somebody takes them.
        has_norm: whether the norm of each step is known.
        spikes: steps whose norm was a spike, until somebody takes them.
    """

    def __init__(self, plan: StepPlan, ranks: Sequence[int], finds_spikes: bool = False) -> None:
        self._plan, self._ranks, self._finds_spikes = plan, ranks, finds_spikes
        # The first round that measures in every step which ranks had non-finite gradients, and of which parameters.
        uses = [part.always.uses.get(OwnNonFinite(), ()) for part in plan.rounds]
        self._round = next((i for i, indices in enumerate(uses) if indices), 0)
        self._indices = uses[self._round]
        # The norm of the gradients before any rule, and the rank that leads, if every step measures them.
        first = plan.rounds[0].always.uses
        self.has_norm = len(first.get(Power(2.0), ())) == len(plan.shards) > 0
        self._has_lead = OwnLead() in first and len(ranks) > 1
        self._peak: _Peak | None = None
        self._norms: dict[str, torch.Tensor] = {}
        self.spikes: list[int] = []
        self._unlogged = 0  # steps since the last record
        self.count = 0
        self.found: list[NonFiniteStep] = []
        self._row: _NonFiniteRow | None = None

    @property
    def sees_every_step(self) -> bool:
        """Whether each step tells if it was finite; if not, only a norm in the log can tell it."""
        return bool(self._indices)

    def watch(
        self,
        step: int,
        merged: Sequence[Vectors],
        decision: torch.Tensor | None,
        is_logged: bool,
        numbers: StepNumbers,
    ) -> None:
        """Ask for the numbers that tell whether this step is finite, and its norm.

        These are the "sizes" of gradients (counts of non-finite elements, or norms) and the "marks" of ranks, one for
        each parameter; the "decision" about leaving the step out, if a rule decides; the sum of "squares" of all
        gradients; whether their norm is a "spike"; and the sums that tell the rank that "leads".
        """
        wanted: dict[str, torch.Tensor] = {}
        if self._indices:
            layout = self._plan.rounds[self._round].layout(is_logged)
            values = layout.unpack(merged[self._round])
            counts_or_norms: Measure = NonFiniteCount() if NonFiniteCount() in layout.uses else Power(2.0)
            wanted["sizes"] = layout.pick(values, counts_or_norms, self._indices)
            wanted["marks"] = layout.pick(values, OwnNonFinite(), self._indices)
            if decision is not None:
                wanted["decision"] = decision
        if self.has_norm:
            values = self._plan.rounds[0].layout(is_logged).unpack(merged[0])
            wanted["squares"] = values[Power(2.0)].sum()
            if self._finds_spikes:
                wanted["spike"] = self._is_spike(wanted["squares"].reshape(1).sqrt())
            if self._has_lead:
                wanted["leads"] = values[OwnLead()][:3]  # of the first scope, which is all parameters
        if wanted:
            numbers.want(list(wanted.values()), lambda rows: self._read(step, dict(zip(wanted, rows, strict=True))))

    def _read(self, step: int, numbers: Mapping[str, torch.Tensor]) -> None:
        if self.has_norm:
            self._keep_peak(step, numbers)
        found = self._judge(step, numbers) if self._indices else None
        self.found += [] if found is None else [found]

    def _keep_peak(self, step: int, numbers: Mapping[str, torch.Tensor]) -> None:
        """Keep the norm of this step if it is the largest since the last record."""
        norm = math.sqrt(float(numbers["squares"]))
        self._unlogged += 1
        self.spikes += [step] if bool(numbers.get("spike", 0.0)) else []
        if math.isfinite(norm) and (self._peak is None or norm > self._peak.norm):
            rank = leader(numbers["leads"].tolist(), self._ranks) if self._has_lead else None
            self._peak = _Peak(norm, step, rank)

    def _is_spike(self, norm: torch.Tensor) -> torch.Tensor:
        self._norms = self._norms or _NORMS.start("norm", (1,), norm.device)
        is_spike = norm > _NORMS.limit(self._norms, "norm")
        # A norm of 0 says nothing about how large gradients are.
        _NORMS.push(self._norms, "norm", norm, norm.isfinite() & (norm > 0))
        return is_spike

    def take_peak(self, least: int = 2) -> dict[str, Any]:
        """The largest norm since the last call, for the record of the step that was read last; {} for fewer steps.

        Steps that were not logged may have had a larger norm than those that were.
        """
        peak, many, self._peak, self._unlogged = self._peak, self._unlogged, None, 0
        if peak is None or many < least:
            return {}
        rank = {} if peak.rank is None else {"grad_norm/peak_rank": peak.rank}
        return {"grad_norm/peak": peak.norm, "grad_norm/peak_step": peak.step} | rank

    def _judge(self, at_step: int, numbers: Mapping[str, torch.Tensor]) -> NonFiniteStep | None:
        sizes, marks, decision = numbers["sizes"], numbers["marks"], numbers.get("decision")
        has_counts = NonFiniteCount() in self._plan.rounds[self._round].always.uses
        is_skipped = decision is not None and bool(decision)
        is_bad = sizes > 0 if has_counts else ~torch.isfinite(sizes)
        if is_skipped:  # a gradient that nobody reduces may be bad on one rank alone
            is_bad = is_bad | (marks > 0)
        if not bool(is_bad.any()):
            self._row = None
            return None
        if not has_counts and bool((marks > 0).any()):
            is_bad = marks > 0  # the norm is measured after earlier rules, and one may have made every gradient NaN
        places = is_bad.nonzero().flatten().tolist()
        where = (tuple(places), tuple(marks.tolist()))
        row = self._row
        is_first = row is None or (row.is_skipped and where != row.where)
        since = at_step if row is None or is_first else row.since
        self._row = _NonFiniteRow(since, is_skipped, where)
        self.count += 1
        fields = self._fields(places, sizes.tolist() if has_counts else None, marks.tolist())
        fields |= {} if decision is None else {"skipped": float(is_skipped)}
        fields |= {"nonfinite_steps": self.count} | ({} if is_first else {"nonfinite_since": since})
        return NonFiniteStep(at_step, fields, is_first)

    def _fields(self, places: Sequence[int], counts: Sequence[float] | None, marks: Sequence[float]) -> dict[str, Any]:
        # See [Note: which parameters are named].
        names, places_set = [self._plan.shards[i].name for i in self._indices], set(places)
        failed: set[int] = set()
        at: dict[int, dict[str, Any]] = {}
        for place in places:
            ranks = ranks_in(marks[place], self._ranks)
            failed |= set(ranks or ())
            count = {} if counts is None else {"count": int(counts[place])}
            rank = {} if ranks is None else {"rank": min(ranks, default=None)}
            is_last = place + 1 not in places_set and place + 1 < len(names)
            at[place] = {"param": names[place], **count, **rank} | ({"before": names[place + 1]} if is_last else {})
        order = sorted(places, key=lambda place: (place + 1 in places_set, -place))
        total = {} if counts is None else {"nonfinite": int(sum(counts))}
        return total | {
            "nonfinite_params": len(places),
            "nonfinite_at": [at[place] for place in order[:_MOST_NAMED]],
            "nonfinite_ranks": sorted(failed),
        }


class StepRecord(NamedTuple):
    """A record, ready for the sinks.

    Attributes:
        fields: the names and values that are written.
        is_logged: whether its step was to be logged; otherwise it is recorded because it was not finite.
        is_first_nonfinite: whether its step is the first of several in a row that were not finite.
    """

    fields: dict[str, Any]
    is_logged: bool
    is_first_nonfinite: bool


class MeasuredStep(NamedTuple):
    """The numbers of a step of which a record is made, or may be made. See [Note: recent steps].

    Attributes:
        step: the number of the step.
        merged: the merged vectors of each round, then those measured after the update.
        log: the numbers that rules logged, by name.
    """

    step: int
    merged: Sequence[Vectors]
    log: Mapping[str, torch.Tensor]

    def ask(self, numbers: StepNumbers, read: Callable[[MeasuredStep], object]) -> None:
        """Let ``read`` be called with this step, when its numbers are on the host."""
        parts = [*(vector for pair in self.merged for vector in pair), *self.log.values()]
        numbers.want(parts, lambda rows: read(self._of(rows)))

    def _of(self, rows: Sequence[torch.Tensor]) -> MeasuredStep:
        vectors, values = rows[: 2 * len(self.merged)], rows[2 * len(self.merged) :]
        return MeasuredStep(
            self.step,
            list(zip(vectors[::2], vectors[1::2], strict=True)),
            dict(zip(self.log, values, strict=True)),
        )

    def record(
        self, plan: StepPlan, stats: Sequence[tuple[Stat, State]], ranks: Sequence[int], said: set[Stat]
    ) -> dict[str, Any]:
        """Make the record of the step; each statistic changes the state that it keeps from step to step."""
        record: dict[str, Any] = {"step": self.step} | {name: float(value) for name, value in self.log.items()}
        # Statistics are measured in the first round, and after the update; other rounds are for rules alone.
        measured = [(plan.rounds[0].logged, self.merged[0])]
        if plan.after.logged.uses:
            measured.append((plan.after.logged, self.merged[len(plan.rounds)]))
        wanted = {measure for stat, _ in stats for measure in stat.measures()}
        rows: dict[Measure, torch.Tensor] = {}
        for layout, vector_pair in measured:
            values = layout.unpack(vector_pair)
            rows |= {m: values[m].view(len(layout.sizes[m]), -1) for m in layout.uses if m in wanted}
        found = Found([shard.name for shard in plan.shards], plan.groups, rows, ranks, plan.modules, self.step)
        for stat, state in stats:
            entries = stat.record(found, state)
            record |= entries
            if not entries and stat.why_empty and stat not in said and global_rank() == ranks[0]:
                said.add(stat)
                what = f"{type(stat).__name__} has no numbers in step {self.step}: {stat.why_empty}"
                warnings.warn(f"{what}. This is said once", stacklevel=2)
        return record


class StepRecords:
    """Makes the records of one attachment, on every rank the same.

    Attributes:
        stats: the statistics and their states.
        loop: what the loop set in each step, which is in each record that is written.
        must_be_read: whether the next step waits for the numbers of the last one: it was logged, or they may make the
            next step raise.
    """

    def __init__(
        self,
        plan: StepPlan,
        stats: Sequence[tuple[Stat, State]],
        ranks: Sequence[int],
        loop: LoopFacts,
        recent: int = 0,
    ) -> None:
        self.stats, self.loop = stats, loop
        self._recent: deque[MeasuredStep] = deque(maxlen=recent)
        self._until = -1  # steps that are not logged become records up to this one
        self._plan, self._ranks = plan, ranks
        self._watched = WatchedSteps(plan, ranks, finds_spikes=recent > 0)
        self._said: set[Stat] = set()  # the statistics of which it has been said that they have no numbers
        self._was_norm_nonfinite = False  # in the step that was logged last
        self._on_way: deque[StepNumbers] = deque()  # the numbers of steps; the last ones may not be sent yet
        self.must_be_read = False
        self._happened: dict[int, dict[str, float]] = {}  # the events of the steps that were read
        self._logged: MeasuredStep | None = None  # that was read
        self._errors: list[Callable[[], None]] = []  # that were read

    @property
    def sees_every_step(self) -> bool:
        """Whether something tells of each step if its gradients were finite, or their norm."""
        return self._watched.sees_every_step or self._watched.has_norm

    def begin(
        self,
        step: int,
        merged: Sequence[Vectors],
        decision: torch.Tensor | None,
        is_measured: bool,
        errors: Sequence[DeferredError],
        events: Sequence[Event],
    ) -> None:
        """Ask for the numbers that are read of every step."""
        self.expect(errors)
        numbers = self._on_way[-1]
        self._watched.watch(step, merged, decision, is_measured, numbers)
        for is_true, fields in events:
            numbers.want([is_true, *fields.values()], partial(self._note_event, step, list(fields)))

    def expect(self, errors: Sequence[DeferredError]) -> None:
        """Ask for the numbers that may make the next step raise: see :meth:`raise_errors`."""
        self._on_way.append(StepNumbers())
        self.must_be_read = bool(errors)
        for number, check in errors:
            self._on_way[-1].want([number], partial(self._note_error, check))

    def _note_error(self, check: Callable[[float], None], rows: Sequence[torch.Tensor]) -> None:
        self._errors.append(partial(check, float(rows[0])))

    def _note_event(self, step: int, names: Sequence[str], rows: Sequence[torch.Tensor]) -> None:
        is_true, *values = map(float, rows)
        if is_true:
            self._happened[step] = self._happened.get(step, {}) | dict(zip(names, values, strict=True))

    def raise_errors(self) -> None:
        """Raise what the numbers of the step before say. Every rank reads the same ones, so all ranks raise or none."""
        errors, self._errors = self._errors, []
        for raise_if_so in errors:
            raise_if_so()

    def log(self, step: MeasuredStep) -> None:
        """Ask for the numbers of a step that is logged; :meth:`begin` was called for it."""
        if not self._on_way or self._on_way[-1].is_sent:
            self._on_way.append(StepNumbers())
        self.must_be_read = True
        step.ask(self._on_way[-1], partial(setattr, self, "_logged"))

    def send(self) -> None:
        """Start copying the numbers of the step that was begun last."""
        if self._on_way:
            self._on_way[-1].send()

    def keep(self, recent: MeasuredStep) -> None:
        """Keep the numbers of a step that is not logged. See [Note: recent steps]."""
        self._recent.append(recent)

    def forget_recent(self) -> None:
        """Forget the steps that are kept, because a state of other steps was loaded."""
        self._recent.clear()
        self._until = -1

    def _recent_records(self, happened: Sequence[int], known: Mapping[int, Mapping[str, Any]]) -> Iterator[StepRecord]:
        """The records of recent steps, if something has happened in one of them or shortly before."""
        if happened:
            self._until = max(self._until, max(happened) + _AFTER)
        while self._recent and self._recent[0].step <= self._until:
            recent = self._recent.popleft()
            step, numbers = recent.step, StepNumbers()
            found: list[MeasuredStep] = []
            recent.ask(numbers, found.append)
            numbers.send()
            numbers.read()
            copies = [(stat, {name: value.clone() for name, value in state.items()}) for stat, state in self.stats]
            fields = found[0].record(self._plan, copies, self._ranks, self._said) | self.loop.settings(step)
            fields = {**fields, **known.get(step, {}), "recent": True}
            yield StepRecord(fields, is_logged=False, is_first_nonfinite="nonfinite_params" in known.get(step, {}))

    def read(self, wait: bool) -> tuple[int, list[StepRecord]]:
        """Make the records that can be made now; with ``wait`` all of them.

        Returns:
            How many of the steps that were read had gradients that were not finite; and the records, in the order of
            steps. If there is a record of the logged step, it is the last.
        """
        self.send()
        while self._on_way and (wait or self._on_way[0].arrived()):
            self._on_way.popleft().read()
        self.must_be_read = self.must_be_read and bool(self._on_way)
        nonfinite, self._watched.found = self._watched.found, []
        spikes, self._watched.spikes = self._watched.spikes, []
        events, self._happened = self._happened, {}
        logged, self._logged = self._logged, None
        step = None if logged is None else logged.step
        first = {each.step: each.fields for each in nonfinite if each.is_first}
        # The record of the logged step has both anyway.
        happened = {at: {**events.get(at, {}), **first.get(at, {})} for at in sorted({*events, *first}) if at != step}
        records = list(self._recent_records([*happened, *spikes], happened))
        written = {record.fields["step"] for record in records}
        records += [
            StepRecord({"step": at, **fields}, is_logged=False, is_first_nonfinite=at in first)
            for at, fields in happened.items()
            if at not in written
        ]
        if logged is not None:
            fields, is_first = logged.record(self._plan, self.stats, self._ranks, self._said), False
            fields |= self.loop.settings(logged.step)
            for each in nonfinite:
                if each.step == step:
                    ranks = {place["param"]: place for place in fields.get("nonfinite_at", ())}
                    at = [ranks.get(place["param"], {}) | place for place in each.fields["nonfinite_at"]]
                    fields = {"step": step, **each.fields, **fields, "nonfinite_at": at}
                    is_first = each.is_first
            fields |= self._watched.take_peak()
            if self._watched.count:  # so the log tells how many unlogged steps were not finite
                fields["nonfinite_steps"] = self._watched.count
            records.append(StepRecord(fields, is_logged=True, is_first_nonfinite=is_first))
        return len(nonfinite), records

    def rest(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the loop set in ``step``, the last one, and what was read of the steps since the last record."""
        return {"step": step} | self.loop.of(step), self._watched.take_peak(least=1)

    def judge_norm(self, fields: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether the norm in a logged record is not finite, and whether it is the first of several in a row.

        Both are False if each step tells whether it was finite: :meth:`read` counts such steps then.
        """
        if self._watched.sees_every_step:
            return False, False
        was, self._was_norm_nonfinite = self._was_norm_nonfinite, not math.isfinite(fields.get("grad_norm", 0.0))
        return self._was_norm_nonfinite, self._was_norm_nonfinite and not was


@dataclass(frozen=True)
class UnwrittenRecords:
    """The records that an attachment had not written yet when it was collected.

    Attributes:
        steps: how many steps there had been.
        nonfinite_steps: how many of them are known to have had gradients that were not finite.
        records: the records; that of a logged step gets the values of ``also``.
        rest: what the loop set in the last step, with its number; and what is known of the steps since the last record.
        writer: the open sinks.
    """

    steps: int
    nonfinite_steps: int
    records: Sequence[dict[str, Any]]
    rest: tuple[Mapping[str, Any], Mapping[str, Any]]
    writer: RecordWriter

    def write(self) -> None:
        for record in self.records:
            self.writer.add_also(record)
            self.writer.write(record)
        self.writer.write_rest(*self.rest)
        self.writer.close()
