"""A plan: a checked configuration as objects. It is attached to a model here, and removed again."""

# [Note: all of a plan or nothing]
# `attach` leaves a model either with the whole plan or as it was, on every rank. Whatever can fail on one rank alone
# (reading the file, matching patterns, opening a store, making a rule) comes first, and its error is caught. Then all
# ranks vote once, see [Note: one vote of all ranks], and only if no rank failed they go on to gradients, whose own
# attaching is collective. If an error comes after the vote, hooks that are on the model already are removed.
#
# [Note: one budget]
# `budget` limits the bytes of the weights and of the saved tensors that stay on the device. The weights are counted
# first, and one `OnDevice` with the rest as its limit becomes the first tier of every entry's store. All entries
# share this tier. Entries with equal stores share the tiers below it too, because a store can only push out tensors
# that it holds itself: with one store, the tensors that backward reads last move, whichever entry saved them. With
# different stores a later entry cannot push out what an earlier one holds (decision 65).

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from disthooks._handles import Attachment, check_state
from disthooks._match import as_patterns, unwrap_engine
from disthooks._ranks import describe, launched_rank, world_size
from disthooks._tensors import format_bytes, local_part, parse_bytes
from disthooks.config import dump
from disthooks.config.agree import Team, check_conflicts, check_not_alone
from disthooks.config.build import BuildSpec
from disthooks.config.source import Path, Source
from disthooks.engines.base import Engine
from disthooks.errors import AttachError, ConfigError, MatchError, UsageError
from disthooks.grads.attach import gradients
from disthooks.grads.attachment import Gradients
from disthooks.grads.gradients_report import GradientsReport
from disthooks.grads.sinks import AccelerateTracker
from disthooks.grads.sinks.base import WhenRead
from disthooks.report.watch.watchers import Watchers, say
from disthooks.saved.attach import SavingHandle, save_activations
from disthooks.saved.fit import FREE, STATE, Fitted, as_budget
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.pipeline import pipeline as as_pipeline
from disthooks.saved.report import SavedReport
from disthooks.saved.stores.base import Functions, Store
from disthooks.saved.stores.tiers import OnDevice, Tiered


class SavingPlan(Attachment):
    """The handle that :meth:`Plan.save` returns: one for all entries of ``save``.

    Attributes:
        names: the names of the modules, in the order of the entries.
        missed: for each entry that matched nothing, its number and the error; empty unless ``partly`` was true.
        counts: the number of modules of each entry that matched.
        fitted: the handle that keeps ``budget``, if ``fit`` is true; see :func:`disthooks.fit`.
    """

    def __init__(self, parts: Sequence[SavingHandle], missed: Mapping[int, MatchError] | None = None) -> None:
        super().__init__()
        self._parts, self.missed = parts, dict(missed or {})
        self.fitted: Fitted | None = None
        self.counts = tuple(len(part.names) for part in parts)
        self.names = tuple(name for part in parts for name in part.names)
        for part in parts:
            self.on_remove(part.remove)

    def report(self) -> SavedReport:
        """The sum of the reports of all entries, on this rank."""
        return (
            self.fitted.report().saved if self.fitted else sum((part.report() for part in self._parts), SavedReport())
        )


@dataclass(frozen=True)
class PreparedReport:
    """The report of :meth:`Prepared.report`. ``str()`` of it is text for people.

    Attributes:
        saved: counts and bytes of saved tensors on this rank; None without ``save``.
        gradients: the engine, the ranks, and the rules and statistics of a step; None without ``watch``.
    """

    saved: SavedReport | None
    gradients: GradientsReport | None

    @property
    def moved(self) -> int:
        """Bytes of saved tensors that were moved out of the memory in which they were saved; 0 without ``save``."""
        return self.saved.moved if self.saved else 0

    def __str__(self) -> str:
        return "\n".join(str(part) for part in (self.saved, self.gradients) if part is not None)


class Prepared(Attachment):
    """The handle that :func:`disthooks.prepare` returns. It is also a context manager.

    Attributes:
        saving: the handle of ``save``; None when the configuration has no ``save``.
        gradients: the handle of ``watch``; None when the configuration has no ``watch``.
        watchers: the handle of ``blame`` and ``check_replicas``; None when the configuration has neither of them and
            no ``watch``.
    """

    def __init__(
        self, saving: SavingPlan | None, gradients: Gradients | None, watchers: Watchers | None = None
    ) -> None:
        super().__init__()
        self.saving, self.gradients, self.watchers = saving, gradients, watchers
        # The last one added is removed first. That must be `gradients`: when it is removed it writes its last record,
        # which has the numbers of the other two.
        for part in (saving, watchers, gradients):
            if part is not None:
                self.on_remove(part.remove)

    def report(self) -> PreparedReport:
        """A report of everything so far, on this rank."""
        saved = self.saving.report() if self.saving else None
        return PreparedReport(saved, self.gradients.report() if self.gradients else None)

    def state_dict(self) -> dict[str, Any]:
        """The state of ``gradients`` and what ``fit`` has learnt; an empty dict without ``watch`` and ``fit``.

        Save it beside the optimizer's state.
        """
        state = self.gradients.state_dict() if self.gradients else {}
        fitted = self.saving.fitted if self.saving else None
        return state if fitted is None else {**state, "fit": fitted.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned. Call it on every rank.

        Raises:
            UsageError: when ``state`` is no such state, or of another configuration; nothing is changed then.
        """
        check_state(state)
        watched = {key: value for key, value in state.items() if key != "fit"}
        fitted = self.saving.fitted if self.saving is not None and "fit" in state else None
        if fitted is not None:
            check_state(state["fit"], like=STATE)  # before anything changes
        if self.gradients is not None:
            self.gradients.load_state_dict(watched)
        elif watched:
            raise UsageError("the state is of a configuration with 'watch', and this one has none")
        if fitted is not None:
            fitted.load_state_dict(state["fit"])


_NOWHERE = Source("the plan", {})


@dataclass(frozen=True, eq=False)
class PlanSource:
    """The configuration from which a plan was read, and its run directory; None if nothing is written there."""

    source: Source
    run: str | None = None


@dataclass(frozen=True)
class Plan:
    """A checked configuration. :func:`from_config` makes one from a file; one made from objects can be written.

    Args:
        saves: pairs: patterns of modules, and the store or pipeline for the tensors that these modules save.
        watches: arguments of :func:`disthooks.gradients`. In a plan that was read from a file, rules, stats and sinks
            are functions that make them, so that a sink opens its file when it is attached, not when it is read.
        budget: the limit of weights and saved tensors on the device, in bytes or as text such as "20 GiB"; see
            :doc:`/config`.
        exact: whether a lossy codec is an error.
        strict: whether it is an error, under :mod:`disthooks.run`, when nothing can be attached to a model.
        blame: whether to name the first module whose output is not finite; see :func:`disthooks.blame`.
        check_replicas: the number of steps between two comparisons of the ranks' copies; see
            :func:`disthooks.check_replicas`.
        fit: whether ``budget`` is for all that a training step has in use on the device; see :func:`disthooks.fit`.

    Raises:
        ConfigError: when a codec is lossy and ``exact`` is true.

    >>> from disthooks import ClipNorm, OnCpu
    >>> plan = Plan(saves=[("blocks.*", OnCpu())], watches={"rules": [ClipNorm(1.0)]})
    >>> print(plan.to_yaml(), end="")
    save:
    - modules: blocks.*
      store:
        kind: OnCpu
    watch:
      rules:
      - kind: ClipNorm
        max_norm: 1.0
    """

    saves: Sequence[tuple[Any, Any]] = ()
    watches: Mapping[str, Any] = field(default_factory=dict)
    budget: int | str | None = None
    exact: bool = False
    strict: bool = False
    blame: bool = False
    check_replicas: int | None = None
    fit: bool = False
    _written: PlanSource | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "saves", tuple((as_patterns(patterns), as_pipeline(to)) for patterns, to in self.saves)
        )
        lossy = [codec for _, pipeline in self.saves for codec in pipeline.codecs if codec.lossy]
        if self.exact and lossy:
            raise ConfigError(f"{lossy[0]!r} loses digits, and exact=True forbids that; Compact does not")
        if self.fit and (self.budget is None or not self.saves):
            raise ConfigError("fit=True keeps 'budget' by moving what 'saves' says, and one of them is missing")
        if self.budget == FREE and not self.fit:
            raise ConfigError(f"a budget of {FREE!r} is measured in training, by 'fit': set it to true, or give bytes")

    @classmethod
    def read(cls, saves: Any, watches: Any, checked: Mapping[str, Any], written: PlanSource) -> Plan:
        """The plan of a configuration that was read; its errors have the lines of the file."""
        keys = ("budget", "exact", "strict", "blame", "check_replicas", "fit")
        plan = cls(saves, watches, **{key: checked[key] for key in keys})
        # The dataclass is frozen. `_written` is no argument, since only a plan that was read has it.
        object.__setattr__(plan, "_written", written)
        return plan

    @property
    def source(self) -> Source:
        """The configuration from which the plan was read; an empty one named "the plan" if it was made of objects."""
        return self._written.source if self._written else _NOWHERE

    @property
    def run(self) -> str | None:
        """The run directory; None if no path of the plan is in one."""
        return self._written.run if self._written else None

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, which :func:`from_config` takes. A plan that was read has the values of its file.

        Raises:
            ConfigError: when an object cannot be written: a function, or an object that does not keep its arguments.
        """
        if self._written:
            return copy.deepcopy(dict(self._written.source.document))
        values: dict[str, Any] = {
            "budget": self.budget,
            "fit": self.fit or None,
            "exact": self.exact or None,
            "strict": self.strict or None,
            "blame": self.blame or None,
            "check_replicas": self.check_replicas,
            "save": [dump.saved(patterns, pipeline) for patterns, pipeline in self.saves] or None,
            "watch": dump.watched(self.watches) if self.watches else None,
        }
        return {key: value for key, value in values.items() if value is not None}

    def to_yaml(self) -> str:
        """The plan as the text of a YAML file; see :meth:`to_dict` for errors."""
        return dump.yaml_of(self.to_dict())

    def save(self, model: nn.Module, *, partly: bool = False) -> SavingPlan:
        """Attach ``save`` to ``model``. If one entry fails, no entry is attached.

        Args:
            model: the model, before or after an engine has wrapped it.
            partly: True if this is one of several models. An entry that matches nothing here is then left out, because
                it is meant for another model; it is in ``missed`` of the handle. ``budget`` holds for each model.

        Raises:
            ConfigError: when two entries match the same module, or the weights alone are larger than ``budget``.
            MatchError, AttachError: see :func:`disthooks.save_activations`.
        """
        make_run(self._written)  # a store may open its file there
        missed = check_conflicts(model, [patterns for patterns, _ in self.saves], self.source, partly)
        attached: list[Any] = []
        if len(missed) == len(self.saves):
            return SavingPlan(attached, missed)
        placed = stores_within(self.budget, model, self.saves, self.source)
        tiers = [cast(Tiered, pipeline.store) for _, pipeline in placed] if self.fit else []
        with at_line(self.source, ("fit",)):
            fits = as_budget(model, cast("int | str", self.budget), tiers) if self.fit else None
        try:
            for number, (patterns, pipeline) in enumerate(placed):
                if number in missed:
                    continue
                with at_line(self.source, ("save", number)):
                    attached.append(save_activations(model, patterns, pipeline))
        except BaseException:
            for part in attached:
                part.remove()
            raise
        saving = SavingPlan(attached, missed)
        if fits is not None:
            saving.fitted = Fitted(model, attached, tiers, *fits)
            saving.on_remove(saving.fitted.remove)
            saving.on_remove(functools.partial(tell_kept, saving.fitted))
        return saving

    def watch(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        also: Iterable[Any] = (),
        *,
        sinks: Iterable[Any] = (),
        _made: Mapping[str, Any] | None = None,
        _engine: Engine | None = None,
    ) -> Gradients:
        """Attach ``watch``. See :func:`disthooks.gradients` for the arguments and the other errors.

        Args:
            model: the object that the engine returned.
            optimizer: the optimizer whose ``step`` is called.
            also: handles whose numbers are logged too, such as the one that :meth:`save` returned.
            sinks: further sinks, which no file can hold: ``AccelerateTracker(accelerator)``.

        Raises:
            ConfigError: when the plan has no ``watch``.
            AttachError: also when a launcher started several processes and this process knows of no other.
        """
        check_not_alone()
        made = dict(self._made(model, sinks) if _made is None else _made)
        rerun, capture = made.pop("rerun", False), made.pop("capture", None)
        with at_line(self.source, ("watch",)):
            attached = gradients(model, optimizer, also=also, **made, _engine=_engine)
        if rerun or capture is not None:
            attached.want_rerun(capture)
        return attached

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sinks: Iterable[Any] = (),
        partly: bool = False,
        _engine: Engine | None = None,
    ) -> Prepared:
        """Attach ``save`` and ``watch``, as far as the plan has them. If one fails on any rank, all ranks have none.

        Args:
            model: the object that the engine returned.
            optimizer: the optimizer whose ``step`` is called.
            sinks: further sinks, as for :meth:`watch`.
            partly: True if this is one of several models, as for :meth:`save`.

        Raises:
            AttachError: also when the ranks have different plans.
        """
        check_not_alone()
        return attach(lambda: self, model, optimizer, sinks, partly, _engine)

    def look(self, model: nn.Module, optimizer: Any = None, _engine: Engine | None = None) -> Watchers | None:
        """Attach ``blame`` and ``check_replicas``; None when the plan has neither of them and no ``watch``."""
        if not (self.blame or self.check_replicas or self.watches):
            return None
        with at_line(self.source, ("check_replicas",)):
            watchers = Watchers(model, self.blame)
            try:
                if self.check_replicas is not None:
                    watchers.compare_every(self.check_replicas, model, optimizer, _engine)
            except BaseException:
                watchers.remove()
                raise
            return watchers

    def described(self) -> str:
        """The text that must be the same on all ranks; see [Note: one vote of all ranks]."""
        try:
            return str(self.to_dict())
        except ConfigError:  # an object cannot be written; see [Note: what ranks compare]
            return describe(self)

    def _made(self, model: nn.Module, sinks: Iterable[Any]) -> dict[str, Any]:
        """The arguments of :func:`disthooks.gradients`, with the objects made."""
        if not self.watches:
            raise ConfigError("the configuration has no 'watch': add rules or stats to it, or leave out plan.watch()")
        make_run(self._written)
        made: dict[str, Any] = {}
        for key, value in self.watches.items():
            # A plan that was read has specs in its lists; a plan of objects has the objects.
            if isinstance(value, list):
                value = [each(model) if isinstance(each, BuildSpec) else each for each in value]
            made[key] = value
        made.pop("optimizers", None)  # for disthooks run; here the caller gives one optimizer or several
        own = list(made.get("sinks", []))
        # An integration adds a tracker for its accelerator. If the file has one already, each record would be logged
        # twice, so the integration's is left out.
        named = [sink.accelerator for sink in own if isinstance(sink, AccelerateTracker)]
        more = [sink for sink in sinks if not any(getattr(sink, "accelerator", None) is one for one in named)]
        return made | {"sinks": [*own, *more]}


def weights_of(model: nn.Module) -> int:
    """Bytes of the parameters and buffers of ``model`` on this rank, of each shared tensor once.

    Of a sharded tensor the local shard counts; a tensor on "meta" counts as if it were allocated.

    >>> weights_of(nn.Linear(10, 10, device="meta"))
    440
    """
    own = unwrap_engine(model)
    total = 0
    for tensor in {id(tensor): tensor for tensor in itertools.chain(own.parameters(), own.buffers())}.values():
        shard = getattr(tensor, "ds_tensor", None)  # under DeepSpeed's ZeRO 3 the parameter itself is empty
        total += local_part(tensor if shard is None else shard).nbytes
    return total


def stores_within(
    budget: int | str | None, model: nn.Module, saves: Iterable[tuple[Any, Pipeline]], source: Source
) -> Sequence[tuple[Any, Pipeline]]:
    """``saves`` with a first tier on the device in front of every store; see [Note: one budget]."""
    saves = list(saves)
    if budget is None:
        return saves
    weights = weights_of(model)
    limit = weights if budget == FREE else parse_bytes(budget, "budget")  # `fit` finds it; until then nothing stays
    if weights > limit:
        source.fail(
            ("budget",),
            f": {format_bytes(limit)} ({limit} bytes) are less than the parameters and buffers of the model take on "
            f"this rank, {format_bytes(weights)} ({weights} bytes)",
        )
    device = OnDevice(limit - weights)
    tiers: list[tuple[Store, Tiered]] = []  # a list and not a dict: a user's store may have no hash
    found = []
    for number, (patterns, pipeline) in enumerate(saves):
        # Entries with equal stores share one `Tiered`.
        tiered = next((made for store, made in tiers if store == pipeline.store), None)
        if tiered is None:
            below = pipeline.store.stores if isinstance(pipeline.store, Tiered) else (pipeline.store,)
            path = ("save", number, "store")
            if any(isinstance(tier, OnDevice) for tier in below):
                source.fail(
                    path, ": 'budget' says how much stays on the device, and OnDevice says it too: leave out one"
                )
            if any(isinstance(tier, Functions) for tier in below):
                source.fail(
                    path, ": Functions cannot be a tier, so 'budget' cannot be kept: leave it out, or use a store"
                )
            tiered = Tiered(device, *below)
            tiers.append((pipeline.store, tiered))
        found.append((patterns, replace(pipeline, store=tiered)))
    return found


def attach(
    read: Callable[[], Plan],
    model: nn.Module,
    optimizer: Any,
    sinks: Iterable[Any] = (),
    partly: bool = False,
    engine: Engine | None = None,
) -> Prepared:
    """Attach the plan that ``read()`` returns; see [Note: all of a plan or nothing]."""
    # The engine is detected once, and passed on to each part that needs it.
    team = Team.of(model, engine)
    plan: Plan | None = None
    saving: SavingPlan | None = None
    watchers: Watchers | None = None
    made: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        plan = read()
        saving = plan.save(model, partly=partly) if plan.saves else None
        made = plan._made(model, sinks) if plan.watches else {}
    except Exception as error:  # kept until all ranks have voted
        failure = error
    try:
        team.agree(failure, plan.described() if plan else "", plan.source.name if plan else "")
        known = cast(Plan, plan)
        watchers = known.look(model, optimizer, team.engine)
        also: list[Any] = [saving.fitted or saving] if saving else []
        also += [WhenRead(watchers.numbers)] if watchers else []
        watching = known.watch(model, optimizer, also, _made=made, _engine=team.engine) if made else None
    except BaseException:
        for part in (saving, watchers):
            if part is not None:
                part.remove()
        raise
    if watchers is not None and watching is not None:
        watchers.tell_nonfinite(watching)
    tell_attached(known, model, saving, watching)
    return Prepared(saving, watching, watchers)


def tell_attached(plan: Plan, model: nn.Module, saving: SavingPlan | None, watching: Gradients | None) -> None:
    """Print on stderr of the first rank which hooks are attached, on how many ranks, and by which configuration."""
    if launched_rank() != 0:
        return
    parts = []
    entries = [entry for i, entry in enumerate(plan.saves) if saving is None or i not in saving.missed]
    for (patterns, pipeline), count in zip(entries, saving.counts if saving else (), strict=False):
        shown = ", ".join(repr(pattern) for pattern in patterns)
        parts.append(f"save {shown}: {count} module{'s' if count != 1 else ''} to {type(pipeline.store).__name__}")
    if watching is not None:
        report = watching.report()
        every = plan.watches.get("every", 50)
        parts.append(f"watch {report.parameters} parameters on {report.engine}, logged every {every} steps")
    parts += ["blame"] if plan.blame else []
    parts += [f"check_replicas every {plan.check_replicas} steps"] if plan.check_replicas else []
    ranks = f"{world_size()} rank{'s' if world_size() > 1 else ''}"
    say(f"{plan.source.name}: attached to {type(unwrap_engine(model)).__name__} on {ranks}: {'; '.join(parts)}")


def tell_kept(fitted: Fitted) -> None:
    """Print on stderr whether the budget was kept: on the first rank, and on each whose steps needed more."""
    kept = fitted.report().saved.budget
    if kept and kept.rounds and (kept.over or launched_rank() == 0):
        say(str(kept))


@contextlib.contextmanager
def at_line(source: Source, path: Path) -> Iterator[None]:
    """Inside, each UsageError gets a line of the configuration: that of the pattern it names, else that of ``path``."""
    try:
        yield
    except UsageError as error:
        where = source.of_text(str(error), path) or _sink_of(str(error), source, path) or path
        # A plan of objects has no lines, and an error that begins with the name of the file has its line already.
        if source is _NOWHERE or str(error).startswith(source.name):
            raise
        kind = next(each for each in (MatchError, AttachError, ConfigError, UsageError) if isinstance(error, each))
        raise kind(f"{source.at(where)}: {error}") from None


def _sink_of(message: str, source: Source, path: Path) -> Path | None:
    """The path of the sink whose name ``message`` begins with, or of all sinks; None if it is about something else."""
    if path != ("watch",):
        return None
    if "could not open its sinks" in message:
        return ("watch", "sinks")
    sinks = source.document["watch"].get("sinks", [])
    return next((("watch", "sinks", i) for i, sink in enumerate(sinks) if message.startswith(str(sink["kind"]))), None)


def make_run(written: PlanSource | None) -> None:
    """Make the run directory, if a path of the plan is in one; ConfigError if that fails."""
    if written is None or written.run is None:
        return
    try:
        os.makedirs(written.run, exist_ok=True)
    except OSError as error:
        written.source.fail(("run",), f": the directory {written.run!r} cannot be made: {error.strerror}")
    if not os.access(written.run, os.W_OK | os.X_OK):
        written.source.fail(("run",), f": the directory {written.run!r} cannot be written")
