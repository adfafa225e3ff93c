"""The attachments of a session to the models of a script, and their outcomes."""

# [Note: nothing is kept alive]
# A process may train many models, such as the folds of a cross-validation, or the tries of a search for the largest
# batch. The session lives longer than they do, so it holds models, optimizers and hooks weakly. The numbers that its
# closing summary needs are copied into `WatchedOptimizer`. If an attachment is collected before its last record is
# written, the record is written at the session's next event. The destructor cannot write it: a destructor runs at any
# moment, in any thread, and must neither write to a sink nor take a lock.

# [Note: entries of save over several models]
# A script may train several models with one configuration, such as a generator and a discriminator. An entry of `save`
# has to match in one of them. When the last model is called, the session knows whether an entry matches in none: then
# it raises an error. If the session expected one more model that never came, it warns at the end of the script.

from __future__ import annotations

import collections
import copy
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from disthooks._match import match_modules, unwrap_engine
from disthooks._tensors import format_bytes
from disthooks.config import Plan
from disthooks.config.plan import at_line, tell_attached
from disthooks.engines.base import Engine
from disthooks.errors import MatchError
from disthooks.grads.attachment import Gradients
from disthooks.grads.records import UnwrittenRecords
from disthooks.report.watch.watchers import Watchers

_MAX_SINGLE_LINES = 3  # models of one class that have a line each in the summary; more models share one line


class SaveEntries:
    """The entries of a plan's ``save``; see [Note: entries of save over several models]."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._errors: dict[int, MatchError] = {}  # by entry: its error in the last model in which it did not match
        self._matched: set[int] = set()
        self._models: list[weakref.ref[nn.Module]] = []

    def plan_for(self, model: nn.Module, is_last: bool) -> tuple[Plan, bool]:
        """The plan for one model, without ``save`` if none is for it, and whether to attach it ``partly``.

        Raises MatchError if `model` is the last one and an entry matches in none of them.
        """
        if any(unwrap_engine(model) is ref() for ref in self._models):
            return self._without_save(), True
        is_here = False
        for i, (patterns, _) in enumerate(self._plan.saves):
            try:
                with at_line(self._plan.source, ("save", i)):
                    match_modules(model, patterns)
                self._matched.add(i)
                is_here = True
            except MatchError as error:
                self._errors[i] = error.with_traceback(None)  # the frames of its traceback would keep the model
        missing = self.unmatched() if is_last else []
        if missing and self._models:
            raise missing[0]
        self._models.append(weakref.ref(unwrap_engine(model)))
        if missing:  # this is the only model: attaching the whole plan raises the error on every rank
            return self._plan, False
        return (self._plan if is_here else self._without_save()), True

    def unmatched(self) -> list[MatchError]:
        return [error for i, error in self._errors.items() if i not in self._matched]

    def _without_save(self) -> Plan:
        """A copy of the plan without ``save``. It has the same ``watch``, and was read from the same file."""
        part = copy.copy(self._plan)
        object.__setattr__(part, "saves", ())  # a Plan is frozen
        return part


class WatchedOptimizer:
    """The numbers of one optimizer's steps; see [Note: nothing is kept alive]."""

    def __init__(self, gradients: Gradients) -> None:
        report = gradients.report()
        self.engine, self.parameters = report.engine, report.parameters
        self._gradients = weakref.ref(gradients)
        self._first = self._last = gradients.steps
        self._nonfinite = 0
        self._unwritten: collections.deque[UnwrittenRecords] = collections.deque(maxlen=1)
        gradients.leave_to(self._unwritten.append)

    @property
    def gradients(self) -> Gradients | None:
        return self._gradients()

    @property
    def steps(self) -> int:
        """How many steps this process has made, without the steps of a state that was loaded."""
        gradients = self._gradients()
        self._last = gradients.steps if gradients is not None else self._last
        return self._last - self._first

    @property
    def nonfinite(self) -> int:
        """How many steps are known to have had gradients that were not finite."""
        gradients = self._gradients()
        self._nonfinite = gradients.nonfinite_steps if gradients is not None else self._nonfinite
        return self._nonfinite

    def write_left(self) -> bool:
        """Write the record that a collected attachment has left. Returns whether the attachment is collected."""
        while self._unwritten:
            left = self._unwritten.popleft()
            self._last, self._nonfinite = left.steps, left.nonfinite_steps
            left.write()
        return self._gradients() is None

    def remove(self) -> None:
        self.write_left()
        gradients = self._gradients()
        if gradients is not None:
            self._last = gradients.steps
            gradients.remove()
            self._nonfinite = gradients.nonfinite_steps


class ModelAttachment:
    """The attachments to one model, none of which keeps the model alive.

    Attributes:
        number: how many models the session had attached to before this one.
        watched: one object for each optimizer whose gradients are watched.
        optimizers: how many optimizers hold the model's parameters.
    """

    def __init__(self, model: nn.Module, number: int, on_attached: Callable[[nn.Module, Gradients], None]) -> None:
        self.number = number
        self.saving: Any = None
        self.watched: list[WatchedOptimizer] = []
        self.optimizers = 0
        self._model, self._class_name = weakref.ref(model), type(unwrap_engine(model)).__name__
        self._on_attached = on_attached
        self._watchers: Callable[[], Watchers | None] = lambda: None  # a weak reference, once there are some

    def attach(
        self, plan: Plan, is_partial: bool, optimizers: Sequence[Any], number: int, engine: Engine | None = None
    ) -> None:
        """Attach what :meth:`SaveEntries.plan_for` gave to the model and ``optimizers``, ``[None]`` for DeepSpeed's.

        ``number`` optimizers are watched already. Records of the second one and of later ones name their number,
        because all write into one log.
        """
        model: Any = self._model()
        if plan.watches.get("optimizers") == "together" and len(optimizers) > 1:
            optimizers = [list(optimizers)]
        rest, self.optimizers = list(optimizers), len(optimizers)
        is_first = not number and bool(rest)
        gradients: Gradients | None = None
        if is_first:  # `prepare` compares the plan over the ranks, so all ranks come here, or none
            prepared = plan.prepare(model, rest.pop(0), partly=is_partial, _engine=engine)
            self.saving, watchers, gradients = prepared.saving, prepared.watchers, prepared.gradients
        else:
            self.saving = plan.save(model, partly=is_partial) if plan.saves else None
            watchers = plan.look(model, rest[0], engine) if rest else None
        if watchers is not None:  # from here on `remove` takes them off, also if the next lines raise
            self._watchers = weakref.ref(watchers)
        if gradients is not None:
            self._add(model, gradients)
        if self.saving and not is_first and not (plan.watches and rest):
            tell_attached(plan, model, self.saving, None)
        for i, optimizer in enumerate(rest, max(number, 1)) if plan.watches else ():
            sources: list[Any] = [functools.partial(dict, optimizer=i), *([self.saving] if self.saving else [])]
            # An engine remembers the last backward, so each further optimizer gets an engine of its own here.
            gradients = plan.watch(model, optimizer, sources)
            if watchers is not None:
                watchers.tell_nonfinite(gradients)
            tell_attached(plan, model, None if self.watched else self.saving, gradients)
            self._add(model, gradients)

    def _add(self, model: nn.Module, gradients: Gradients) -> None:
        self._on_attached(model, gradients)
        self.watched.append(WatchedOptimizer(gradients))

    @property
    def is_empty(self) -> bool:
        """Whether the plan had nothing for this model: no entry of ``save``, no gradients, no watcher."""
        return not self.saving and not self.watched and self._watchers() is None

    def is_collected(self) -> bool:
        """Whether the model and all its attachments are collected. Writes the records that they have left."""
        collected = [watched.write_left() for watched in self.watched]
        return all(collected) and self._model() is None

    def outcome(self) -> dict[str, Any]:
        """The numbers of the attachments so far on this rank, for its record and the summary. Writes the last step."""
        for gradients in [each.gradients for each in self.watched]:
            if gradients is not None:
                gradients.flush()
        report = self.saving.report() if self.saving else None
        watched = self.watched
        steps, parameters = max((one.steps for one in watched), default=0), sum(one.parameters for one in watched)
        nonfinite = max((one.nonfinite for one in watched), default=0)
        return {
            "model": self._class_name,
            "engine": watched[0].engine if watched else None,
            "saved": {"stored": report.stored, "moved": report.moved, "calls": report.calls} if report else None,
            "watched": {"steps": steps, "parameters": parameters, "nonfinite": nonfinite} if watched else None,
        }

    def remove(self) -> None:
        """Take the hooks off. This writes the last records."""
        for watched in self.watched:
            watched.remove()
        for attached in (self._watchers(), self.saving):
            if attached:
                attached.remove()


class Attachments:
    """All attachments of a session, in the order in which their models were called."""

    def __init__(self) -> None:
        self._alive: list[ModelAttachment] = []
        self._outcomes: list[tuple[int, dict[str, Any]]] = []  # number and outcome of models that are collected
        self._count = self._optimizers = 0

    def __bool__(self) -> bool:
        return bool(self._alive)

    def attach(
        self,
        model: nn.Module,
        plan: Plan,
        is_partial: bool,
        optimizers: Sequence[Any],
        on_attached: Callable[[nn.Module, Gradients], None],
        engine: Engine,
    ) -> None:
        """Attach `plan` to one more model; see :meth:`ModelAttachment.attach`."""
        attachment = ModelAttachment(model, self._count, on_attached)
        self._count += 1
        # This comes first: if attaching raises, `remove_all` takes off the part that was attached.
        self._alive.append(attachment)
        # Those of collected models count too: their last records may be written later, under their numbers.
        attachment.attach(plan, is_partial, optimizers, self._optimizers, engine)
        self._optimizers += attachment.optimizers
        if attachment.is_empty:
            self._alive.remove(attachment)

    def gradients_of(self, optimizer: Any) -> Gradients | None:
        inner = getattr(optimizer, "optimizer", optimizer)
        every = (watched.gradients for each in self._alive for watched in each.watched)
        return next((one for one in every if one is not None and any(o is inner for o in one.optimizers)), None)

    def release_collected(self) -> None:
        """Replace the attachments of collected models by their outcomes. See [Note: nothing is kept alive]."""
        collected = [each for each in self._alive if each.is_collected()]
        self._alive = [each for each in self._alive if each not in collected]
        for attachment in collected:
            self._outcomes.append((attachment.number, attachment.outcome()))
            attachment.remove()

    def remove_all(self, on_error: Callable[[Exception], None]) -> list[dict[str, Any]]:
        """Take all attachments off, and return the outcome of each model; ``on_error`` gets errors."""
        self.release_collected()
        outcomes = [*self._outcomes, *((each.number, each.outcome()) for each in self._alive)]
        while self._alive:
            try:
                self._alive.pop(0).remove()
            except Exception as error:
                on_error(error)
        return [outcome for _, outcome in sorted(outcomes, key=operator.itemgetter(0))]


def summary_lines(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the summary: one for each model. Many models of one class share a line, also those without steps."""
    used = [one for one in outcomes if not one["watched"] or one["watched"]["steps"]]
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in used:
        parameters = one["watched"]["parameters"] if one["watched"] else None
        alike.setdefault((one["model"], one["engine"], parameters), []).append(one)
    lines = []
    for ones in alike.values():
        lines += [_summary_line(ones)] if len(ones) > _MAX_SINGLE_LINES else [_summary_line([one]) for one in ones]
    idle = collections.Counter(one["model"] for one in outcomes if one not in used)
    for name, count in idle.items():
        times = f" ({count} of them)" if count > 1 else ""
        lines.append(f"{name}{times}: watched 0 steps, since its optimizer made none")
    return lines


def _summary_line(outcomes: Sequence[dict[str, Any]]) -> str:
    first = outcomes[0]
    parts = [f"{first['model']} on {first['engine']}" if first["engine"] else first["model"]]  # of a watched one
    parts[0] += f", {len(outcomes)} models" if len(outcomes) > 1 else ""
    if first["saved"]:
        stored, moved = (format_bytes(sum(one["saved"][name] for one in outcomes)) for name in ("stored", "moved"))
        parts.append(f"saved {stored} of tensors for backward, moved {moved} (this rank, in all)")
    if not first["saved"] and not first["watched"]:
        parts.append("the outputs of its modules, or their copies on other ranks, were looked at")
    if first["watched"]:
        steps = sum(one["watched"]["steps"] for one in outcomes)
        parts.append(f"watched {steps} steps of {first['watched']['parameters']} parameters")
        nonfinite = sum(one["watched"]["nonfinite"] for one in outcomes)
        if nonfinite:
            parts[-1] += f", {nonfinite} of them with gradients that were NOT FINITE"
    return "; ".join(parts)
