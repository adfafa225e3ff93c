"""``GradientsConfig``: the arguments of :func:`disthooks.gradients`, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disthooks._match import Pattern
from disthooks.grads.rules.base import Rule
from disthooks.grads.sinks.base import AlsoLogged, Sink
from disthooks.grads.stats.base import Stat


@dataclass(frozen=True)
class GradientsConfig:
    """The arguments of :func:`disthooks.gradients`, checked."""

    rules: Sequence[Rule] = ()
    stats: Sequence[Stat] = ()
    sinks: Sequence[Sink] = ()
    every: int = 50
    groups: Mapping[str, Pattern | Iterable[Pattern]] = field(default_factory=dict)
    also: Sequence[AlsoLogged] = ()
    scaler: Any = None
    recent: int = 0
    restore_buffers: bool = True
