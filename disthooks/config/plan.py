"""What a plan attached.

What a configuration says, as objects, and how it is attached.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from disthooks._handles import Attachment
from disthooks._match import as_patterns, unwrap_engine
from disthooks._ranks import describe, launched_rank
from disthooks._tensors import format_bytes, local_part, parse_bytes
from disthooks.config import dump
from disthooks.config.agree import Team, check_conflicts, check_not_alone
from disthooks.config.build import BuildSpec
from disthooks.config.source import Path, Source
from disthooks.errors import AttachError, ConfigError, MatchError, UsageError
from disthooks.grads.attach import Gradients, GradientsReport, gradients
from disthooks.grads.sinks import AccelerateTracker
from disthooks.saved.attach import Saving, save_activations
from disthooks.saved.pipeline import Pipeline, pipeline
from disthooks.saved.report import SavedReport
from disthooks.saved.stores.base import Functions, Store
from disthooks.saved.stores.tiers import OnDevice, Tiered
from disthooks.watch.watchers import Watchers, attach_watchers, say


class SavingPlan(Attachment):
    """What :meth:`Plan.save` attached: one handle for all entries of ``save``.

    Attributes:
        names: the modules, in the order of the entries.
        missed: the numbers of the entries that did not match, and why; empty unless ``partly`` was asked for.
        counts: how many modules each entry that matches has.
    """

    def __init__(self, parts: Sequence[Saving], missed: Mapping[int, MatchError] | None = None) -> None:
        super().__init__()
        self._parts, self.missed = parts, dict(missed or {})
        self.counts = tuple(len(part.names) for part in parts)
        self.names = tuple(name for part in parts for name in part.names)
        for part in parts:
            self.on_remove(part.remove)

    def report(self) -> SavedReport:
        """The sum over all entries, on this rank."""
        return sum((part.report() for part in self._parts), SavedReport())


@dataclass(frozen=True)
class PreparedReport:
    """What :meth:`Prepared.report` gives.

    Attributes:
        saved: what happened to saved tensors on this rank; None without ``save``.
        gradients: what a step does with gradients; None without ``watch``.
    """

    saved: SavedReport | None
    gradients: GradientsReport | None

    @property
    def moved(self) -> int:
        """Bytes of saved tensors that were taken out of the memory they were in."""
        return self.saved.moved if self.saved else 0

    def __str__(self) -> str:
        return "\n".join(str(part) for part in (self.saved, self.gradients) if part is not None)


class Prepared(Attachment):
    """What :func:`disthooks.prepare` attached.

    Attributes:
        saving: what ``save`` attached; None when the configuration has no ``save``.
        gradients: what ``watch`` attached; None when it has no ``watch``.
        watchers: what ``blame`` and ``check_replicas`` attached; None without ``watch`` and them.
    """

    def __init__(
        self, saving: SavingPlan | None, gradients: Gradients | None, watchers: Watchers | None = None
    ) -> None:
        super().__init__()
        self.saving, self.gradients, self.watchers = saving, gradients, watchers
        for part in (saving, watchers, gradients):  # gradients last, so removed first: its last record asks the others
            if part is not None:
                self.on_remove(part.remove)

    def report(self) -> PreparedReport:
        """What happened so far, on this rank."""
        saved = self.saving.report() if self.saving else None
        return PreparedReport(saved, self.gradients.report() if self.gradients else None)

    def state_dict(self) -> dict[str, Any]:
        """That of the gradients, to be saved beside the optimizer's; empty without ``watch``."""
        return self.gradients.state_dict() if self.gradients else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; call it on every rank.

        Raises:
            UsageError: when it is of another configuration; nothing is changed then.
        """
        if self.gradients is not None:
            self.gradients.load_state_dict(state)
        elif state:
            raise UsageError("the state is of a configuration with 'watch', and this one has none")


_NOWHERE = Source("the plan", {})


@dataclass(frozen=True, eq=False)
class PlanSource:
    """Where a plan was read, and its run directory; None when nothing is in one."""

    source: Source
    run: str | None = None


@dataclass(frozen=True)
class Plan:
    """What to save and what to watch, checked; made by :func:`from_config`, or of objects, and then to be written.

    Args:
        saves: pairs of patterns of modules, and a store or a pipeline for what they save.
        watches: arguments of :func:`disthooks.gradients`. Of a plan that was read, rules, stats and sinks are functions
            that make them: a sink opens its file when it is attached, not when the file is read.
        budget: see :doc:`config`; bytes, or text such as "20 GiB".
        exact: whether a lossy codec is an error.
        strict: whether it is an error, under :mod:`disthooks.run`, when nothing can be attached to a model.
        blame: whether to name the first module whose output is not finite; see :func:`disthooks.blame`.
        check_replicas: after how many steps to compare copies; see :func:`disthooks.check_replicas`.

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
    _written: PlanSource | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "saves", tuple((as_patterns(patterns), pipeline(to)) for patterns, to in self.saves))
        lossy = [codec for _, line in self.saves for codec in line.codecs if codec.lossy]
        if self.exact and lossy:
            raise ConfigError(f"{lossy[0]!r} loses digits, and exact=True forbids that; Compact and Compress do not")

    @classmethod
    def read(cls, saves: Any, watches: Any, checked: Mapping[str, Any], written: PlanSource) -> Plan:
        """The plan of a configuration that was read; it knows the lines of what it has."""
        plan = cls(
            saves,
            watches,
            checked["budget"],
            checked["exact"],
            checked["strict"],
            checked["blame"],
            checked["check_replicas"],
        )
        object.__setattr__(plan, "_written", written)
        return plan

    @property
    def source(self) -> Source:
        """Where it was read."""
        return self._written.source if self._written else _NOWHERE

    @property
    def run(self) -> str | None:
        """The run directory, where anything is in one."""
        return self._written.run if self._written else None

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, which :func:`from_config` takes: as it was written, if it was read.

        Raises:
            ConfigError: when an object cannot be written: a function, or a class whose arguments cannot be read back.
        """
        if self._written:
            return dump.copied(self._written.source.document)
        values: dict[str, Any] = {
            "budget": self.budget,
            "exact": self.exact or None,
            "strict": self.strict or None,
            "blame": self.blame or None,
            "check_replicas": self.check_replicas,
            "save": [dump.saved(patterns, line) for patterns, line in self.saves] or None,
            "watch": dump.watched(self.watches) if self.watches else None,
        }
        return {key: value for key, value in values.items() if value is not None}

    def to_yaml(self) -> str:
        """:meth:`to_dict` as the text of a file."""
        return dump.yaml_of(self.to_dict())

    def save(self, model: nn.Module, *, partly: bool = False) -> SavingPlan:
        """Attach ``save`` to ``model``; when an entry cannot be, none is.

        Args:
            model: the model, before or after an engine took it.
            partly: whether this is one of several models, and entries that do not match here are for another one: they
                are left out, and are in ``missed`` of what is returned. ``budget`` is for each model.

        Raises:
            ConfigError: when two entries take the same module, or the weights alone are more than ``budget``.
            MatchError, AttachError: see :func:`disthooks.save_activations`.
        """
        make_run(self._written)
        missed = check_conflicts(model, [patterns for patterns, _ in self.saves], self.source, partly)
        attached: list[Any] = []
        if len(missed) == len(self.saves):
            return SavingPlan(attached, missed)
        try:
            for number, (patterns, line) in enumerate(stores_within(self.budget, model, self.saves, self.source)):
                if number in missed:
                    continue
                with at_line(self.source, ("save", number)):
                    attached.append(save_activations(model, patterns, line))
        except BaseException:
            for part in attached:
                part.remove()
            raise
        return SavingPlan(attached, missed)

    def watch(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        also: Iterable[Any] = (),
        *,
        sinks: Iterable[Any] = (),
        _made: Mapping[str, Any] | None = None,
    ) -> Gradients:
        """Attach ``watch``; see :func:`disthooks.gradients` for ``also`` (what ``save`` returned), and the errors.

        Args:
            model: what the engine returned; see :func:`disthooks.gradients`.
            optimizer: the one that steps.
            also: what is logged too: what :meth:`save` returned.
            sinks: more of them, for those that hold objects: ``AccelerateTracker(accelerator)``.

        Raises:
            ConfigError: when there is no ``watch``.
            AttachError: also when this process believes to be alone, and its launcher started several.
        """
        check_not_alone()
        made = self._made(model, sinks) if _made is None else _made
        with at_line(self.source, ("watch",)):
            return gradients(model, optimizer, also=also, **made)

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sinks: Iterable[Any] = (),
        partly: bool = False,
    ) -> Prepared:
        """Attach ``save`` and ``watch``, whichever there are; if one fails, on any rank, neither is, on all of them.

        Args:
            model: what the engine returned.
            optimizer: the one that steps.
            sinks: more of them, as for :meth:`watch`.
            partly: whether this is one of several models, as for :meth:`save`.

        Raises:
            AttachError: also when the ranks have different plans.
        """
        check_not_alone()
        return attach(lambda: self, model, optimizer, sinks, partly)

    def look(self, model: nn.Module, optimizer: Any = None) -> Watchers | None:
        """Attach ``blame`` and ``check_replicas``; None when there is neither of them nor ``watch``.

        Args:
            model: what the engine returned.
            optimizer: the one whose steps count, for ``check_replicas``.
        """
        if not (self.blame or self.check_replicas or self.watches):
            return None
        with at_line(self.source, ("check_replicas",)):
            return attach_watchers(model, optimizer, self.blame, self.check_replicas)

    def described(self) -> str:
        """What all ranks must have alike."""
        try:
            return str(self.to_dict())
        except ConfigError:  # objects that cannot be written
            return describe(self)

    def _made(self, model: nn.Module, sinks: Iterable[Any]) -> dict[str, Any]:
        """The arguments of ``gradients()``."""
        if not self.watches:
            raise ConfigError("the configuration has no 'watch': add rules or stats to it, or leave out plan.watch()")
        make_run(self._written)
        made = {key: _all_made(value, model) for key, value in self.watches.items()}
        own = list(made.get("sinks", []))
        named = [
            sink.accelerator for sink in own if isinstance(sink, AccelerateTracker)
        ]  # an integration's is one more
        more = [sink for sink in sinks if not any(getattr(sink, "accelerator", None) is one for one in named)]
        return made | {"sinks": [*own, *more]}


def weights_of(model: nn.Module) -> int:
    """Bytes of parameters and buffers on this rank as the model is now: local shards; on "meta" as if allocated.

    >>> weights_of(nn.Linear(10, 10, device="meta"))
    440
    """
    tensors = itertools.chain(unwrap_engine(model).parameters(), unwrap_engine(model).buffers())
    return sum(_nbytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _nbytes(tensor: torch.Tensor) -> int:
    sharded = getattr(tensor, "ds_tensor", None)  # DeepSpeed's ZeRO 3: the parameter itself is empty
    return local_part(tensor if sharded is None else sharded).nbytes


def stores_within(
    budget: int | str | None, model: nn.Module, saves: Iterable[tuple[Any, Pipeline]], source: Source
) -> Sequence[tuple[Any, Pipeline]]:
    """``saves`` with a first tier on the device in front of every store: what ``budget`` leaves beside the weights.

    All share its limit. Entries with the same store share the tiers too, so that the tensors that are wanted last move.

    Raises:
        ConfigError: when the weights alone are more, or a store cannot be a tier.
    """
    saves = list(saves)
    if budget is None:
        return saves
    device = OnDevice(_left(parse_bytes(budget, "budget"), weights_of(model), source))
    tiers: list[tuple[Store, Tiered]] = []
    found = []
    for number, (patterns, line) in enumerate(saves):
        tiered = next((made for store, made in tiers if store == line.store), None)
        if tiered is None:
            tiered = _tiered(device, line.store, number, source)
            tiers.append((line.store, tiered))
        found.append((patterns, replace(line, store=tiered)))
    return found


def _left(budget: int, weights: int, source: Source) -> int:
    if weights > budget:
        source.fail(
            ("budget",),
            f": {format_bytes(budget)} ({budget} bytes) are less than the parameters and buffers of the model take on "
            f"this rank, {format_bytes(weights)} ({weights} bytes)",
        )
    return budget - weights


def _tiered(device: OnDevice, store: Store, number: int, source: Source) -> Tiered:
    below = store.stores if isinstance(store, Tiered) else (store,)
    path = ("save", number, "store")
    if any(isinstance(tier, OnDevice) for tier in below):
        source.fail(path, ": OnDevice and 'budget' both say how much stays on the device: leave out one of them")
    if any(isinstance(tier, Functions) for tier in below):
        source.fail(path, ": Functions cannot be a tier, so 'budget' cannot be kept: leave it out, or use a store")
    return Tiered(device, *below)


def attach(read: Any, model: nn.Module, optimizer: Any, sinks: Iterable[Any] = (), partly: bool = False) -> Prepared:
    """Attach the plan that ``read()`` returns; what fails on one rank fails on all that train ``model`` together."""
    team = Team.of(model)
    plan: Plan | None = None
    saving: SavingPlan | None = None
    watchers: Watchers | None = None
    made: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        plan = read()
        saving = plan.save(model, partly=partly) if plan.saves else None
        made = plan._made(model, sinks) if plan.watches else {}
    except Exception as error:
        failure = error
    try:
        team.agree(failure, plan.described() if plan else "", plan.source.name if plan else "")
        known = cast(Plan, plan)
        watchers = known.look(model, optimizer)
        also: list[Any] = [saving] if saving else []
        also += [watchers.numbers] if watchers else []
        watching = known.watch(model, optimizer, also, _made=made) if made else None
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
    """Say on the first rank's stderr what is attached now, and which file says so."""
    if launched_rank() != 0:
        return
    parts = []
    entries = [entry for i, entry in enumerate(plan.saves) if saving is None or i not in saving.missed]
    for (patterns, line), count in zip(entries, saving.counts if saving else (), strict=False):
        shown = ", ".join(repr(pattern) for pattern in patterns)
        parts.append(f"save {shown}: {count} module{'s' if count != 1 else ''} to {type(line.store).__name__}")
    if watching is not None:
        report = watching.report()
        ranks = f" on {report.engine}, {len(report.ranks)} ranks" if len(report.ranks) > 1 else f" on {report.engine}"
        parts.append(f"watch {report.parameters} parameters{ranks}, logged every {plan.watches.get('every', 50)} steps")
    parts += ["blame"] if plan.blame else []
    parts += [f"check_replicas every {plan.check_replicas} steps"] if plan.check_replicas else []
    say(f"{plan.source.name}: attached to {type(unwrap_engine(model)).__name__}: {'; '.join(parts)}")


@contextlib.contextmanager
def at_line(source: Source, path: Path) -> Iterator[None]:
    """Errors of what is attached get a line: of the pattern that they name, else of ``path``."""
    try:
        yield
    except UsageError as error:
        where = source.of_text(str(error), path) or _sink_of(str(error), source, path) or path
        if source is _NOWHERE or str(error).startswith(source.name):
            raise
        kind = next(each for each in (MatchError, AttachError, ConfigError, UsageError) if isinstance(error, each))
        raise kind(f"{source.at(where)}: {error}") from None


def _sink_of(message: str, source: Source, path: Path) -> Path | None:
    """The sink that ``message`` begins with the name of."""
    if path != ("watch",):
        return None
    if "could not open its sinks" in message:
        return ("watch", "sinks")
    sinks = source.document["watch"].get("sinks", [])
    return next((("watch", "sinks", i) for i, sink in enumerate(sinks) if message.startswith(str(sink["kind"]))), None)


def make_run(written: PlanSource | None) -> None:
    """Make the run directory, if anything is in one.

    Raises:
        ConfigError: when it cannot be made.
    """
    if written is None or written.run is None:
        return
    try:
        os.makedirs(written.run, exist_ok=True)
    except OSError as error:
        written.source.fail(("run",), f": the directory {written.run!r} cannot be made: {error.strerror}")
    if not os.access(written.run, os.W_OK | os.X_OK):
        written.source.fail(("run",), f": the directory {written.run!r} cannot be written")


def _all_made(value: Any, model: nn.Module) -> Any:
    """Of a list of recipes what they make; anything else as it is."""
    return (
        [each(model) if isinstance(each, BuildSpec) else each for each in value] if isinstance(value, list) else value
    )
