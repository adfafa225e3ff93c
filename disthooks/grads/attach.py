"""Rules and statistics at the moment when gradients are final: just before the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from disthooks._match import Pattern
from disthooks.engines.base import refuse_replicate
from disthooks.engines.detect import detect_engine
from disthooks.errors import UsageError
from disthooks.grads.attachment import Gradients, GradientsConfig
from disthooks.grads.plan import check_stat
from disthooks.grads.rules.base import Rule, as_rule
from disthooks.grads.sinks.base import Sink, as_numbers
from disthooks.grads.stats.base import Stat


def gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rules: Iterable[Rule | Callable[[str, torch.Tensor], torch.Tensor]] = (),
    stats: Iterable[Stat] = (),
    sinks: Iterable[Sink] = (),
    every: int = 50,
    groups: Mapping[str, Pattern | Iterable[Pattern]] | None = None,
    also: Iterable[Any] = (),
    scaler: Any = None,
) -> Gradients:
    """Before every step of ``optimizer``, apply ``rules`` to the final gradients; log ``stats`` of some steps.

    The same on a plain module, ``nn.DataParallel``, DDP, ``fully_shard`` and DeepSpeed's ZeRO: every element of
    every gradient is counted once over all ranks, and every rank does the same. Attach after the engine took the
    model, and call it on every rank. A round of measuring is at most two all-reduces on a process group of its own;
    between logged steps nothing waits for the device.

    Args:
        model: what the engine returned; for ``fully_shard`` the model itself.
        optimizer: the one whose steps count; accelerate's wrapper will do. Parameters of the model that it does
            not hold are left alone. A DeepSpeed engine has its own, and none need be given.
        rules: applied in this order: :class:`~disthooks.ClipValue`, :class:`~disthooks.ClipNorm`,
            :func:`~disthooks.only`, or a function of a name and the local part of a gradient, which returns
            what takes its place.
        stats: of the gradients before any rule: :mod:`disthooks.stats` has them.
        sinks: called on the first rank with a dict for each logged step.
        every: steps 0, ``every``, ``2 * every`` ... are logged.
        groups: names of groups of parameters and the patterns of each; statistics are logged of each group too, as
            ``grad_norm/group/<name>``. A parameter may be in several.
        also: what is logged with them: what :func:`~disthooks.save_activations` returned, a wrapper or another object
            whose ``report()`` has a ``record()``, or a function that returns a dict. Each rank asks its own, when the
            step is logged, which is one step late. One that raises, or has a name that is logged already, is named
            in a warning and left out.
        scaler: the ``GradScaler``, which rules at "local" need to work in your units. Statistics find it.

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
    chosen = [as_rule(rule) for rule in _listed("rules", rules)]
    watched = [check_stat(stat) for stat in _listed("stats", stats)]
    targets, named = list(_listed("sinks", sinks)), _grouped(groups)
    for sink in targets:
        if not callable(sink):
            raise UsageError(f"{sink!r} is no sink: give sinks.Jsonl(path), sinks.Console() or a function of a dict")
    if not chosen and not watched:
        raise UsageError("gradients() without rules and stats would do nothing: give at least one")
    asked = [sink for sink in targets if not getattr(sink, "may_wait", False)]  # an integration's own is no error
    if asked and not watched and not any(rule.logs() for rule in chosen):
        raise UsageError("gradients(): these rules log nothing, so the sinks would never be called; add stats")
    engine = detect_engine(model)
    refuse_replicate(engine)
    numbers = [as_numbers(it) for it in _listed("also", also)]
    config = GradientsConfig(chosen, watched, targets, every, named, numbers, scaler)
    return Gradients(engine, engine.inner_optimizer(optimizer), config)


def _listed(what: str, given: Any) -> Iterable[Any]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(f"{what}={given!r}: give a list, [...], of them (stats.standard() is one already)")
    return given


def _grouped(groups: Any) -> dict[str, Any]:
    """The groups, checked."""
    if groups is None:
        return {}
    if not isinstance(groups, Mapping):
        raise UsageError(f"groups={groups!r}: give a dict of names and patterns, {{'attention': '*.attn.*'}}")
    for name, pattern in groups.items():
        if not isinstance(name, str) or not name or (not pattern and not callable(pattern)):
            raise UsageError(f"groups: {name!r}: {pattern!r} is no name with a pattern or a list of them")
    return dict(groups)
