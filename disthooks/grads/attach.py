"""``gradients()``: rules and statistics at the moment when gradients are final, just before the optimizer steps."""

# [Note: the life of a step]
# At attach, `gradients` checks its arguments and `_attach` finds everything that does not change: the engine, the
# parameters, which rule, statistic and group is for which of them, and how many collectives a step takes (plan.py).
# In backward, hooks look at this rank's own gradients and rules at "local" rewrite them (local_hooks.py).
# At the step, `Gradients._before_step` runs. The engine calls it when gradients are final, or `begin_step` does so
# earlier, before a loop clips by itself. It checks that the step is one to measure (`StepChecks`), reads the record of
# the step before, and measures and rewrites round after round (`StepRunner`). It returns the decision to leave the step
# out.
# After the update, `Gradients._after_step` measures how far it moved the parameters, if a statistic asks for it.
# At logging, which is at the next step, in `flush()` and in `remove()`, the numbers are on the host. They become a
# record (records.py), and the first rank gives it to the sinks (`RecordWriter` in sinks/base.py).

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from disthooks._handles import first_names
from disthooks._hashing import Checksums
from disthooks._match import Pattern
from disthooks._ranks import describe, global_rank, has_several_ranks
from disthooks.engines.base import Engine, Shard
from disthooks.engines.detect import detect_engine, refuse_replicate
from disthooks.engines.joined import Joined, copies_of, experts_of, ranks_of_group
from disthooks.engines.step import Step, parameters_of
from disthooks.errors import AttachError, UsageError
from disthooks.grads import collectives
from disthooks.grads.attachment import Gradients
from disthooks.grads.collectives import StepCounts
from disthooks.grads.forward_hooks import ForwardHooks
from disthooks.grads.local_hooks import LocalGradientHooks, LocalNeeds, LocalRules
from disthooks.grads.loop import LoopFacts
from disthooks.grads.options import GradientsConfig
from disthooks.grads.plan import StepPlan, groups_of, optimized_shards
from disthooks.grads.records import StepRecords
from disthooks.grads.rules.base import Only, Rule, as_rule, named
from disthooks.grads.sinks.base import RecordWriter, Sink, as_also_logged
from disthooks.grads.stats.base import Stat
from disthooks.grads.step import StepChecks, StepRunner


def gradients(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    rules: Iterable[Rule | Callable[[str, torch.Tensor], torch.Tensor]] = (),
    stats: Iterable[Stat] = (),
    sinks: Iterable[Sink] = (),
    every: int = 50,
    recent: int = 0,
    groups: Mapping[str, Pattern | Iterable[Pattern]] | None = None,
    also: Iterable[Any] = (),
    scaler: Any = None,
    process_group: Any = None,
    experts: Any = None,
    copies: Any = None,
    restore_buffers: bool = True,
    _engine: Engine | None = None,
) -> Gradients:
    """Before every step of ``optimizer``, apply ``rules`` to the final gradients; log ``stats`` of some steps.

    The same on a plain module, ``nn.DataParallel``, DDP, ``fully_shard`` and DeepSpeed's ZeRO: every element of
    every gradient is counted once over all ranks, and every rank does the same. Attach after the engine took the
    model, and call it on every rank. A round of measuring is at most two all-reduces on a process group of its own;
    between logged steps nothing waits for the device.

    Several optimizers, models and stages of a pipeline make one step together: one norm of all gradients, one decision
    whether to skip, and one record.

    Args:
        model: the model that the engine returned; for ``fully_shard`` the model itself. A list of models for those
            that step together, such as the chunks of a pipeline on this rank.
        optimizer: the optimizer whose steps count, or accelerate's wrapper around it. A list of those that step
            together, after one backward: ``[muon, adamw]``. Parameters of the model that they do not hold are not
            changed and not measured. A DeepSpeed engine has an optimizer of its own, so none is needed there.
        rules: applied in this order: :class:`~disthooks.ClipValue`, :class:`~disthooks.ClipNorm`,
            :func:`~disthooks.only`, or a function of a name and the local part of a gradient, which returns
            the new gradient.
        stats: of the gradients before any rule: :mod:`disthooks.stats` has them.
        sinks: called on the first rank with a dict for each logged step.
        every: steps 0, ``every``, ``2 * every`` ... are logged.
        recent: of so many steps that are not logged the statistics stay on the device, and are logged if something
            happens in one of them: a gradient that is not finite, or a norm that is a spike. The steps around it are
            then in the log, with ``recent``. Every step costs what a logged one does on the device.
        groups: names of groups of parameters and the patterns of each; statistics are logged of each group too, as
            ``grad_norm/group/<name>``. A parameter may be in several.
        also: objects whose numbers are logged too: the handle of :func:`~disthooks.save_activations`, a wrapper or
            another object whose ``report()`` has a ``record()``, or a function that returns a dict. Each rank asks its
            own objects in the step that is logged, when its backwards are done. If one raises, or has a name that is
            logged already, a warning names it, and it is left out.
        scaler: the ``GradScaler``, which rules at "local" need to work in your units. Statistics find it.
        process_group: the ranks whose gradients belong together, if a model is on some of them only: each rank of a
            pipeline gives its own stage, and the group of all stages and their copies. It is a process group, a
            ``DeviceMesh`` of one dimension, or "world".
        experts: patterns of the parameters of which each rank has its own, which FSDP or DDP was told to ignore; or a
            dict that has for each pattern the group, each of whose ranks has other experts. All of them count then.
            Without a group these are all ranks.
        copies: patterns of the parameters that several ranks have alike without an engine that knows it: a weight that
            two stages of a pipeline share, or the router beside experts on plain modules. Average their gradients over
            these ranks yourself; they count once. Or a dict that has for each pattern, or tuple of patterns if ranks
            have it under different names, the group. ``()`` says that no parameter is such a copy, although ranks begin
            with the same values.
        restore_buffers: whether what the forwards of a skipped step wrote into buffers, such as the running statistics
            of a batch norm, is put back. Otherwise a warning says at the first such step that it stays.

    Returns:
        A handle with ``latest``, ``flush()``, ``report()`` and ``remove()``; also a context manager. A script may drop
        it: what is attached lives as long as the optimizer, and the end of the process writes the last record.

    Raises:
        UsageError: when an argument can never work.
        MatchError: when a pattern in ``only`` matches no parameter.
        AttachError: when hooks would not fire: the optimizer holds other parameters than the model, or the engine
            is not supported; and when ranks have different values of a parameter that nobody reduces, which ``experts``
            does not name. Also from ``step()``, if parameters were replaced since.

    >>> from disthooks import ClipNorm
    >>> model = nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, rules=[ClipNorm(1.0)], every=1) as watch:
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...     optimizer.step()
    >>> watch.latest["grad_norm"], model.weight.grad
    (5.0, tensor([[0.6000, 0.8000]]))
    """
    config = _checked(rules, stats, sinks, every, recent, groups, also, scaler, restore_buffers)
    models: list[Any] = [*model] if isinstance(model, (list, tuple)) else [model]
    if not models:
        raise UsageError("model=[]: give the models of the optimizer")
    # A configuration's plan has detected the engine already.
    engines = [_engine] if _engine is not None else [detect_engine(each) for each in models]
    for engine in engines:
        refuse_replicate(engine)
    step = engines[0].step_of(optimizer)
    if process_group is None and (experts or copies) and all(engine.trains_alone for engine in engines):
        process_group = "world" if has_several_ranks() else None
    if len(engines) == 1 and process_group is None and not experts and not copies:
        return _attach(engines[0], models, step, config)
    return _attach(_joined(engines, step, process_group, experts, copies, scaler), models, step, config)


def note_loss(loss: torch.Tensor | float) -> None:
    """Hand in the loss of a micro-batch, on each rank that has one, to what is attached; nothing waits for it.

    This is ``watch.note_loss(loss)`` for a script that has no ``watch`` at hand, because a file attaches. Call it after
    forward, before the step. If nothing is attached, it does nothing, and says so once.

    Args:
        loss: a number, or a tensor of one element, on any device.

    Raises:
        UsageError: when it is no single number, or attachments to different models ask for a loss.

    >>> model = nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> from disthooks import stats
    >>> with gradients(model, optimizer, stats=[stats.Loss()]) as watch:
    ...     loss = model(torch.ones(4, 1)).square().mean()
    ...     note_loss(loss)
    ...     loss.backward()
    ...     optimizer.step()
    >>> watch.latest["loss"] == loss.item()
    True
    """
    attached = [each for each in list(_attached) if each.asks_for_loss] or list(_attached)
    if len({tuple(map(id, each.models)) for each in attached}) > 1:
        raise UsageError(
            f"note_loss(): {len(attached)} attachments to different models are there, and nothing tells whose loss it "
            "is: call note_loss of the one that gradients() or prepare().gradients gave for this model"
        )
    if not attached:
        warnings.warn("note_loss(): nothing is attached, so nobody takes the loss. This is said once", stacklevel=2)
    for each in attached:
        each.note_loss(loss)


def _checked(
    rules: Any,
    stats: Any,
    sinks: Any,
    every: Any,
    recent: Any,
    groups: Any,
    also: Any,
    scaler: Any,
    restore_buffers: Any,
) -> GradientsConfig:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"every={every!r}: log every how many steps? An int of at least 1")
    if not isinstance(recent, int) or isinstance(recent, bool) or recent < 0:
        raise UsageError(f"recent={recent!r}: how many steps stay on the device? An int of at least 0")
    chosen = [as_rule(rule) for rule in _listed("rules", rules)]
    watched = list(_listed("stats", stats))
    for stat in watched:
        if not isinstance(stat, Stat):
            raise UsageError(
                f"{stat!r} is no statistic: give stats.Norm(), stats.NonFinite() or another one of disthooks.stats"
            )
    targets, grouped = list(_listed("sinks", sinks)), _grouped(groups)
    for sink in targets:
        if not callable(sink):
            raise UsageError(f"{sink!r} is no sink: give sinks.Jsonl(path), sinks.Console() or a function of a dict")
    if not chosen and not watched:
        raise UsageError("gradients() without rules and stats would do nothing: give at least one")
    asked = [sink for sink in targets if not getattr(sink, "may_wait", False)]  # an integration's own is no error
    if asked and not watched and not any(rule.logs() for rule in chosen):
        raise UsageError("gradients(): these rules log nothing, so the sinks would never be called; add stats")
    others = [as_also_logged(it) for it in _listed("also", also)]
    return GradientsConfig(chosen, watched, targets, every, grouped, others, scaler, recent, bool(restore_buffers))


def _joined(
    engines: Sequence[Engine], step: Step, process_group: Any, experts: Any, copies: Any, scaler: Any
) -> Joined:
    """The engines of several models or ranks as one; all ranks call it."""
    ranks = engines[0].ranks if process_group is None else ranks_of_group("process_group", process_group)
    if process_group is None and any(engine.ranks != ranks for engine in engines):
        on = ", ".join(f"{engine.label} on {list(engine.ranks)}" for engine in engines)
        raise AttachError(f"the models are on different ranks ({on}): give process_group=, the group of all of them")
    if global_rank() not in ranks:
        raise UsageError(f"process_group={process_group!r} has the ranks {list(ranks)}, and this is {global_rank()}")
    group = collectives.group_of(ranks)
    parameters = parameters_of(step)
    device = collectives.device_for(group, parameters[0].device if parameters else torch.device("cpu"))
    gather = functools.partial(collectives.gather_distinct, group, device)
    joined = Joined(engines, ranks, parameters, experts_of(experts, ranks), copies_of(copies, ranks), gather, scaler)
    if joined.has_stages:
        _refuse_wrong_copies(joined, gather, copies is None)
    has_group = isinstance(experts, Mapping) and None not in experts.values()
    if experts and not has_group:
        _refuse_copies_of_experts(experts, joined, group, device)
    return joined


def _refuse_wrong_copies(joined: Joined, gather: Any, should_find: bool) -> None:
    """Raise AttachError, on every rank, if ``copies`` differ, or if ``should_find`` and a copy is not named.

    A parameter whose elements are all the same (zeros, ones) tells nothing.
    """
    checksums = Checksums()
    mine = [
        (described.part, described.copy[:2], shard.name, tuple(shard.shape), int(checksums(shard.values().detach())))
        for described, shard in joined.whole
        if shard.values().numel() and bool((shard.values() != shard.values().flatten()[0]).any())
    ]
    seen: dict[Any, Any] = {}
    for part, copy, name, shape, checksum in sorted({row for told in gather(mine) for row in told}):
        key = ("copy", *copy) if copy else (shape, checksum)
        first_part, first_name, first_sum = seen.setdefault(key, (part, name, checksum))
        where = f"{first_name!r} on the ranks {list(first_part[0])} and {name!r} on the ranks {list(part[0])}"
        if copy and checksum != first_sum:
            raise AttachError(f"copies: {where} have different values: give them the same values before attaching")
        if should_find and not copy and part[0] != first_part[0]:
            raise AttachError(
                f"{where} have the same values. If they are copies (a weight that two stages share), each would count: "
                f"name them, copies={{({first_name!r}, {name!r}): group}}, or copies={name!r} if they have one name on "
                "all ranks, and average their gradients. If they are different parameters that begin alike, say "
                "copies=()"
            )


def _refuse_copies_of_experts(experts: Any, joined: Joined, group: Any, device: torch.device) -> None:
    """Raise AttachError, on every rank, if two ranks have the same experts and no group was given."""
    if collectives.is_alone(group):
        return
    checksums = Checksums()
    values = [int(checksums(shard.values().detach())) for shard in joined.experts]
    digest = hashlib.blake2b(repr(values).encode(), digest_size=7).digest()
    mark = int.from_bytes(digest, "little") if values else -1
    marks = [int(each[0]) for each in collectives.gather(group, torch.tensor([mark], device=device))]
    found = {mark: [rank for rank, each in zip(joined.ranks, marks, strict=True) if each == mark] for mark in marks}
    alike = next((ranks for mark, ranks in found.items() if mark != -1 and len(ranks) > 1), [])
    if alike:
        raise AttachError(
            f"experts={experts!r}: the ranks {alike} have the same values of these parameters. If they have copies of "
            "the same experts, each copy would count: give the group whose ranks have different experts, "
            "experts={pattern: group}. If they are different experts that begin alike, give all ranks: "
            "experts={pattern: 'world'}"
        )


def _listed(what: str, given: Any) -> Iterable[Any]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(f"{what}={given!r}: give a list, [...], of them (stats.standard() is one already)")
    return given


def _grouped(groups: Any) -> dict[str, Any]:
    if groups is None:
        return {}
    if not isinstance(groups, Mapping):
        raise UsageError(f"groups={groups!r}: give a dict of names and patterns, {{'attention': '*.attn.*'}}")
    for name, pattern in groups.items():
        if not isinstance(name, str) or not name or (not pattern and not callable(pattern)):
            raise UsageError(f"groups: {name!r}: {pattern!r} is no name with a pattern or a list of them")
    return dict(groups)


def _attach(engine: Engine, models: Sequence[nn.Module], step: Step, config: GradientsConfig) -> Gradients:
    """Find what every step needs, once; agree with the other ranks; then put the hooks on."""
    local = [rule for rule in config.rules if _is_local(rule)]
    final = [rule for rule in config.rules if not _is_local(rule)]
    parameters = engine.optimizer_parameters(step)
    indices = optimized_shards(engine, parameters)
    shards = [engine.shards[i] for i in indices]
    needs_of_forward = [stat.forward_needs() for stat in config.stats] + [rule.forward_needs() for rule in final]
    forward_hooks = ForwardHooks(engine, models, needs_of_forward)
    plan = StepPlan(final, config.stats, shards, groups_of(config.groups, shards), forward_hooks.names)
    for i, stat in enumerate(config.stats):
        if stat.alone and any(type(other) is type(stat) for other in config.stats[:i]):
            raise UsageError(f"two {type(stat).__name__} would write the same names into the log: give one")
        stat.check(engine, shards)
    # Each statistic with the state that it keeps from one logged step to the next.
    stats = [(stat, stat.start(len(plan.scopes) + len(shards) * stat.per_parameter)) for stat in config.stats]
    group = collectives.group_of(engine.ranks)
    device = collectives.device_for(group, shards[0].parameter.device)
    _refuse_different_copies(engine, shards, group, device)
    local_rules = LocalRules(engine, local, indices, config.scaler)
    needs = LocalNeeds.of(plan, config.stats, indices)
    local_hooks = LocalGradientHooks(engine, indices, needs, local_rules)
    runner = StepRunner(engine, plan, local_hooks, forward_hooks, config.scaler, group, device)
    counts = StepCounts(engine.ranks, engine.ranks[engine.position], collectives.seconds_to_wait(group))
    checks = StepChecks(engine, step, parameters, counts, has_rules=bool(plan.rules))
    is_first = engine.position == 0 and bool(config.stats or any(rule.logs() for rule in config.rules))
    loop = LoopFacts(engine, step, shards, models[0], config, is_first)
    records = StepRecords(plan, stats, engine.ranks, loop, config.recent)
    if config.recent and not records.sees_every_step:
        raise UsageError(
            f"recent={config.recent}: nothing tells in which step something happens: add stats.NonFinite(), "
            "SkipNonFinite or ClipNorm, which look at every step"
        )
    shards = [plan.shards[i] for i in plan.rewritten] + [engine.shards[i] for s in local_rules.scopes for i in s]
    changed = {id(shard.parameter): shard.name for shard in shards}
    _refuse_twice(changed)
    attached = Gradients(config, checks, runner, records, _open_sinks(config, engine, step, runner))
    _attached[attached] = changed
    attached.on_remove(functools.partial(_attached.pop, attached, None))
    return attached


#: For each attachment the parameters whose gradients its rules may change: the name of each, by the identity.
_attached: WeakKeyDictionary[Gradients, dict[int, str]] = WeakKeyDictionary()


def _refuse_twice(changed: Mapping[int, str]) -> None:
    """Raise UsageError if the rules of another attachment change the same gradients: both would act."""
    for other, theirs in list(_attached.items()):
        if shared := [name for key, name in changed.items() if key in theirs]:
            raise UsageError(
                f"gradients(): another attachment, {other!r}, has rules that change the gradients of "
                f"{first_names(shared)}, and both would act, one after the other: give all rules in one list, or "
                "remove() the other attachment first"
            )


def _refuse_different_copies(engine: Engine, shards: Sequence[Shard], group: Any, device: torch.device) -> None:
    """Raise AttachError if ranks have different values of a parameter whose gradient nobody reduces."""
    trained = [shard for shard in shards if shard.parameter.requires_grad and shard.name not in engine.copied]
    apart = [shard for shard in trained if shard.sharding == "unreduced"]
    if not apart or group is None:
        return
    checksums = Checksums()
    values = [int(checksums(shard.values().detach())) for shard in apart]
    has_own, is_alike = collectives.agree(
        group, device, any(len(shard.replica_ranks) == 1 for shard in apart), str(values)
    )
    if has_own or not is_alike:
        raise AttachError(
            f"{named(apart)}: {engine.label} ignores these parameters, so nobody reduces their gradients, and each "
            "rank has its own: of one rank alone a norm would be wrong. If these are experts, name them: "
            "gradients(..., experts='*.experts.*'), or experts={pattern: group} if several ranks have the same ones; "
            "otherwise let the engine reduce them"
        )


def _is_local(rule: Rule) -> bool:
    return isinstance(rule, Only) and rule.at == "local"


def _open_sinks(config: GradientsConfig, engine: Engine, step: Step, runner: StepRunner) -> RecordWriter:
    """Open the sinks on the first rank, and agree that all ranks attach the same: one collective.

    Ranks that attach different rules or statistics would add up different numbers, or wait for each other for ever. If
    the first rank cannot open its sinks, every rank raises.
    """
    writer = RecordWriter(config.also)
    failure: Exception | None = None
    about = {
        "engine": engine.label,
        "ranks": len(engine.ranks),
        "parameters": len(runner.plan.shards),
        "every": config.every,
        "rules": [describe(rule) for rule in config.rules],
        "stats": [describe(stat) for stat in config.stats],
        "versions": {
            "disthooks": sys.modules["disthooks"].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    names = [shard.name for shard in runner.plan.shards]
    try:
        columns = {"param": names, "module": runner.plan.modules, "called": runner.forward_hooks.called}
        of_group = {id(each): i for i, group in enumerate(step.param_groups) for each in group["params"]}
        groups = [of_group.get(id(shard.parameter), -1) for shard in runner.plan.shards]
        columns |= {"group": groups} if len(set(groups)) > 1 else {}
        writer.open(config.sinks if engine.position == 0 else (), about, columns)
    except Exception as error:
        failure = error
    scopes = [bound.indices for bound in runner.plan.rules], [sorted(s) for s in runner.local_hooks.rules.scopes]
    asked = (
        f"every={config.every}, recent={config.recent}, rules={describe(config.rules)}, stats={describe(config.stats)}"
    )
    mine = (
        f"{asked}, groups={runner.plan.groups}, for the parameters {scopes} of {names}, modules {runner.plan.modules}"
    )
    has_failed, is_alike = collectives.agree(runner.group, runner.device, failure is not None, mine)
    if not has_failed and is_alike:
        return writer
    writer.close()
    if failure is not None:
        raise failure
    if not is_alike:
        raise AttachError(
            f"the ranks {list(engine.ranks)} do not attach the same: they must give the same rules, stats, groups and "
            f"every, for the same parameters; this one has {mine}"
        )
    raise AttachError(f"rank {engine.ranks[0]} could not open its sinks; its error says why")
