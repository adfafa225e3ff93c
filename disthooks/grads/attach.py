"""Rules and statistics at the moment when gradients are final: just before the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._handles import Attachment
from disthooks._tensors import local_part
from disthooks.engines.base import Engine, stepping
from disthooks.engines.find import find
from disthooks.errors import AttachError, UsageError
from disthooks.grads import collect
from disthooks.grads.held import check_step, wanted_of
from disthooks.grads.measures import Local, Measure
from disthooks.grads.plan import Bound, Round, check_stat, labels_of, pick, rounds_of
from disthooks.grads.rules import Rule, as_rule
from disthooks.grads.sinks import Numbers, Sink, add_to, as_numbers, write
from disthooks.grads.stats import Stat

Values = dict[Measure, torch.Tensor]


@dataclass(frozen=True)
class GradientsReport:
    """What an attachment does in every step.

    Attributes:
        engine: which engine was found.
        ranks: the global ranks whose gradients belong together.
        parameters: how many the optimizer holds.
        rounds: how many measurements a step takes; each rule that measures what another one rewrote adds one.
        collectives: all-reduces in a step that is not logged, and in one that is; at most two a round.
        steps: how many steps there have been.
    """

    engine: str
    ranks: tuple[int, ...]
    parameters: int
    rounds: int
    collectives: tuple[int, int]
    steps: int


class _Pending(NamedTuple):
    """The numbers of a logged step on their way to the host."""

    step: int
    merged: list[tuple[torch.Tensor, torch.Tensor]]
    arrived: torch.cuda.Event | None


class Gradients(Attachment):
    """What :func:`gradients` attached.

    Attributes:
        latest: what was logged last, on every rank; one step behind until :meth:`flush`.
        steps: how many steps of the optimizer there have been.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        rules: Sequence[Rule],
        stats: Sequence[Stat],
        sinks: Sequence[Sink],
        every: int,
        also: Sequence[Numbers] = (),
    ) -> None:
        super().__init__()
        self.latest: dict[str, Any] = {}
        self.steps = 0
        self._engine, self._every, self._stats, self._also = engine, every, stats, also
        self._held = engine.held(optimizer)
        self._wanted = wanted_of(engine, self._held)
        self._shards = [engine.shards[i] for i in self._wanted]
        self._rounds = rounds_of(rules, stats, [(shard.name, shard.parameter) for shard in self._shards])
        self._labels = labels_of([bound for step in self._rounds for bound in step.rules])
        self._flags: dict[int, torch.Tensor] = {}
        self._looking = False
        self._pending: _Pending | None = None
        self._group = collect.group_of(engine.ranks)
        self._device = collect.device_for(self._group, self._shards[0].parameter.device)
        self._sinks = self._opened(sinks)
        self._attach(optimizer)

    def report(self) -> GradientsReport:
        """The engine found, and what a step costs."""
        costs = [sum(step.layout(logged).collectives() for step in self._rounds) for logged in (False, True)]
        one = len(self._engine.ranks) == 1
        return GradientsReport(
            engine=self._engine.label,
            ranks=self._engine.ranks,
            parameters=len(self._shards),
            rounds=sum(bool(step.logged.uses) for step in self._rounds),
            collectives=(0, 0) if one else (costs[0], costs[1]),
            steps=self.steps,
        )

    def flush(self) -> None:
        """Read the step that was logged last and give it to the sinks, waiting for the device if need be."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.arrived is not None:
            pending.arrived.synchronize()
        self.latest = self._record(pending)
        self._sinks = write(self._sinks, self.latest)

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        self._looking = any(stat.looks_local for stat in self._stats)
        if self._looking:
            for handle in self._engine.on_local(self._wanted, self._look):
                self.on_remove(handle.remove)
        self.on_remove(self._engine.before_step(optimizer, self._before_step).remove)
        self.on_remove(self.flush)
        self.at_exit(self.flush)

    def _opened(self, sinks: Sequence[Sink]) -> Sequence[Sink]:
        """The sinks on the first rank, none on the others; when it cannot open them every rank raises."""
        mine = sinks if self._engine.position == 0 else ()
        failure: Exception | None = None
        try:
            for sink in mine:
                getattr(sink, "open", lambda: None)()
        except Exception as error:
            failure = error
        failed, alike = collect.agree(self._group, self._device, failure is not None, self._plan())
        if failure is not None:
            raise failure
        if not alike:
            raise AttachError(
                f"the ranks {list(self._engine.ranks)} do not attach the same: they must give the same rules, stats "
                f"and every, for the same parameters; this one has {self._plan()}"
            )
        if failed:
            raise AttachError(f"rank {self._engine.ranks[0]} could not open its sinks; its error says why")
        return mine

    def _plan(self) -> str:
        """What all ranks must have alike, or they would add up different things, or wait for each other."""
        uses = [
            (str(k), v) for step in self._rounds for line in (step.always, step.logged) for k, v in line.uses.items()
        ]
        return f"every={self._every}, {len(self._rounds)} rounds, parameters {self._names()}, measures {uses}"

    def _names(self) -> list[str]:
        return [shard.name for shard in self._shards]

    def _look(self, index: int, grad: torch.Tensor) -> None:
        """On one rank's gradient before its reduction: count on the device, and only for steps to be logged."""
        if self._looking and grad.layout is torch.strided:
            bad = ~torch.isfinite(local_part(grad.detach())).all()
            before = self._flags.get(index)
            self._flags[index] = bad if before is None else bad | before

    @torch.no_grad()
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        check_step(optimizer, args, kwargs)
        self._check_same(optimizer)
        self.flush()
        logged = self.steps % self._every == 0
        grads = [shard.gradient() for shard in self._shards]
        merged = [self._run(step, logged, grads) for step in self._rounds]
        if logged and any(step.logged.uses for step in self._rounds):
            self._pending = self._send(merged)
        self.steps += 1
        self._flags.clear()
        self._looking = self.steps % self._every == 0
        return None

    def _check_same(self, optimizer: torch.optim.Optimizer) -> None:
        held = self._engine.held(optimizer)
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            raise AttachError(
                f"the optimizer holds other parameters ({len(held)}) than when gradients() was attached "
                f"({len(self._held)}): remove() the attachment and attach again after changing parameter groups"
            )
        self._engine.check()

    def _run(
        self, step: Round, logged: bool, grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Measure over all ranks, then rewrite."""
        layout = step.layout(logged)
        merged = collect.reduce(self._group, layout.pack(self._local(grads)))
        values = layout.unpack(merged)
        for bound in step.rules:
            present = [(self._shards[i].name, g) for i in bound.indices if (g := grads[i]) is not None and g.numel()]
            bound.rule.rewrite(present, _values_for(bound, values, layout))
        return merged

    def _local(self, grads: Sequence[torch.Tensor | None]) -> Local:
        return Local(
            grads=[grad if shard.owned else None for grad, shard in zip(grads, self._shards, strict=True)],
            flags=[self._flags.get(i) for i in self._wanted],
            position=self._engine.position,
            world=len(self._engine.ranks),
            device=self._device,
            apart=[
                grad if shard.layout == "apart" and not shard.owned else None
                for grad, shard in zip(grads, self._shards, strict=True)
            ],
        )

    def _send(self, merged: list[tuple[torch.Tensor, torch.Tensor]]) -> _Pending:
        """Start the copies to the host; into pinned memory from CUDA, so that nothing waits."""
        copies = [(sums.to("cpu", non_blocking=True), peaks.to("cpu", non_blocking=True)) for sums, peaks in merged]
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(self._device))
        return _Pending(self.steps, copies, arrived)

    def _record(self, pending: _Pending) -> dict[str, Any]:
        record: dict[str, Any] = {"step": pending.step}
        values = [step.logged.unpack(merged) for step, merged in zip(self._rounds, pending.merged, strict=True)]
        labels = iter(self._labels)
        for step, found in zip(self._rounds, values, strict=True):
            for bound in step.rules:
                label, mine = next(labels), _values_for(bound, found, step.logged)
                if mine is not None:
                    numbers = bound.rule.finish(mine, bound.fresh)
                    record |= {f"{name}{label}": number for name, number in numbers.items()}
        for stat in self._stats:
            record |= stat.finish(
                self._names(), [values[0][measure] for measure in stat.measures()], self._engine.ranks
            )
        self._also = add_to(record, self._also)
        return record


def gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rules: Iterable[Rule | Callable[[str, torch.Tensor], torch.Tensor]] = (),
    stats: Iterable[Stat] = (),
    sinks: Iterable[Sink] = (),
    every: int = 50,
    also: Iterable[Any] = (),
) -> Gradients:
    """Before every step of ``optimizer``, apply ``rules`` to the final gradients; log ``stats`` of some steps.

    The same on a plain module, ``nn.DataParallel``, DDP and ``fully_shard``: every element of every gradient is
    counted once over all ranks, and every rank does the same. Attach after the engine took the model, and call it
    on every rank. A round of measuring is at most two all-reduces on a process group of its own; between logged
    steps nothing waits for the device.

    Args:
        model: what the engine returned; for ``fully_shard`` the model itself.
        optimizer: the one whose steps count; accelerate's wrapper will do. Parameters of the model that it does
            not hold are left alone.
        rules: applied in this order: :class:`~disthooks.ClipValue`, :class:`~disthooks.ClipNorm`,
            :func:`~disthooks.only`, or a function of a name and the local part of a gradient, which returns
            what takes its place.
        stats: of the gradients before any rule: ``stats.Norm()``, ``stats.MaxAbs()``, ``stats.NonFinite()``.
        sinks: called on the first rank with a dict for each logged step.
        every: steps 0, ``every``, ``2 * every`` ... are logged.
        also: what is logged with them: what :func:`~disthooks.save_activations` returned, a wrapper or another object
            whose ``report()`` has a ``record()``, or a function that returns a dict. Each rank asks its own, when the
            step is logged, which is one step late. One that raises, or has a name that is logged already, is named
            in a warning and left out.

    Returns:
        A handle with ``latest``, ``flush()``, ``report()`` and ``remove()``; also a context manager.

    Raises:
        UsageError: when an argument can never work.
        MatchError: when a pattern in ``only`` matches no parameter.
        AttachError: when hooks would not fire: the optimizer holds other parameters than the model, or the engine
            is not supported. Also from ``step()``, if parameters were replaced since.

    >>> from disthooks import ClipNorm
    >>> model = nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, rules=[ClipNorm(1.0)], every=1) as watch:
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...     optimizer.step()
    >>> watch.latest["grad_norm"], model.weight.grad
    (5.0, tensor([[0.6000, 0.8000]]))
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"every={every!r}: log every how many steps? An int of at least 1")
    chosen, watched, targets = [as_rule(rule) for rule in rules], [check_stat(stat) for stat in stats], list(sinks)
    for sink in targets:
        if not callable(sink):
            raise UsageError(f"{sink!r} is no sink: give sinks.Jsonl(path), sinks.Console() or a function of a dict")
    if not chosen and not watched:
        raise UsageError("gradients() without rules and stats would do nothing: give at least one")
    if targets and not watched and not any(rule.measure() for rule in chosen):
        raise UsageError("gradients(): these rules log nothing, so the sinks would never be called; add stats")
    return Gradients(find(model), stepping(optimizer), chosen, watched, targets, every, [as_numbers(it) for it in also])


def _values_for(bound: Bound, values: Values, layout: collect.Layout) -> torch.Tensor | None:
    measure = bound.rule.measure()
    return None if measure is None else pick(values[measure], layout.uses[measure], bound.indices)
