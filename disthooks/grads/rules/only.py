"""``only()``: a rule for some parameters, or for the gradients at "local"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from disthooks._match import Pattern, as_patterns, match
from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.rules.base import MicroBatch, Rule, State, Work, as_rule
from disthooks.grads.stats.base import Measure


@dataclass(frozen=True)
class Only(Rule):
    """A rule for some parameters, or at another moment; made by :func:`only`."""

    patterns: tuple[Pattern, ...]
    rule: Rule
    at: Literal["final", "local"] = "final"

    @property
    def pattern(self) -> Pattern | tuple[Pattern, ...]:
        """What :func:`only` was given."""
        return self.patterns[0] if len(self.patterns) == 1 else self.patterns

    @property
    def rewrites(self) -> bool:  # type: ignore[override]
        return self.rule.rewrites

    @property
    def excludes(self) -> bool:  # type: ignore[override]
        return self.rule.excludes

    def measures(self) -> tuple[Measure, ...]:
        return self.rule.measures()

    def scope(self, shards: Sequence[Shard]) -> list[int]:
        inner = self.rule.scope(shards)
        wanted = {
            name for name, _ in match([(s.name, s.as_full_parameter()) for s in shards], self.patterns, "parameter")
        }
        return [i for i in inner if shards[i].name in wanted]

    def label(self) -> str:
        shown = ",".join(p if isinstance(p, str) else getattr(p, "__name__", repr(p)) for p in self.patterns)
        return "&".join(part for part in (shown, self.rule.label()) if part)

    def logs(self) -> frozenset[str]:
        return self.rule.logs()

    def check(self, shards: Sequence[Shard]) -> None:
        self.rule.check(shards)

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        return self.rule.start(shards, device)

    def rewrite(self, work: Work) -> None:
        self.rule.rewrite(work)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.rule.rewrite_local(shard, grad, batch)

    def local_error(self) -> str:
        return self.rule.local_error()


@register("rule", made=Only)
def only(
    pattern: Pattern | Iterable[Pattern],
    rule: Rule | Callable[[str, torch.Tensor], torch.Tensor],
    at: Literal["final", "local"] = "final",
) -> Rule:
    """``rule`` for the parameters that match, which it then measures alone.

    Args:
        pattern: one or several of: a glob over the parameter's name (``*`` crosses dots), a type, a predicate of
            name and parameter.
        rule: any rule, or a function of name and gradient.
        at: "final", or "local": on this rank's own gradient of every micro-batch, before it is accumulated or
            reduced. Rules at "local" come before all others, and take one gradient at a time.

    Raises:
        UsageError: when ``rule`` is neither, or cannot be applied at "local".
        MatchError: from :func:`~disthooks.gradients`, when a pattern matches no parameter.

    >>> from disthooks import ClipValue
    >>> only("*.bias", ClipValue(0.1)).label()
    '*.bias'
    """
    patterns: Any = as_patterns(pattern)
    if at not in ("final", "local"):
        raise UsageError(f"only(at={at!r}): 'final' (what the optimizer uses) or 'local' (before the reduction)")
    made = as_rule(rule)
    if at == "local" and made.local_error():
        raise UsageError(f"only(at='local'): {made.local_error()}")
    if isinstance(made, Only) and made.at != at:
        raise UsageError(f"only(at={at!r}) around only(at={made.at!r}): give both the same moment")
    return Only(patterns, made, at)
