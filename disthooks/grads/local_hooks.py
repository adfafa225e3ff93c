"""What happens to this rank's own gradients in backward: a look for the statistics, then the rules at "local"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from disthooks._handles import weak_method
from disthooks._streams import capturing, refuse_capture
from disthooks._tensors import local_part
from disthooks._torch import backward_id
from disthooks.engines.base import Engine, Removable
from disthooks.errors import UsageError
from disthooks.grads.rules.base import MicroBatch, Rule
from disthooks.grads.stats.base import LocalFact, LocalStats, onto
from disthooks.grads.stats.norms import norms
from disthooks.grads.stats.scan import finite_probe

_NOTHING = LocalStats()
UNCAPTURED = (
    "let the optimizer step outside of the graph, and in a captured backward have nothing look at gradients before "
    "their reduction (rules at='local', statistics of ranks: NonFinite, NoiseScale); or remove() the hooks first"
)


class LocalNeeds(NamedTuple):
    """The gradients that the hooks look at, and when.

    Attributes:
        logged: in a step that is logged.
        always: in every step.
        kept: the parameters whose gradients are kept, in a step that is logged.
        must: whether what asks for them cannot do without: a gradient that no hook sees is then an error.
    """

    logged: frozenset[LocalFact] = frozenset()
    always: frozenset[LocalFact] = frozenset()
    kept: frozenset[int] = frozenset()
    must: bool = True


class LocalGradientHooks:
    """Hooks on this rank's own gradients; they communicate with nobody and wait for nothing.

    Attributes:
        on: whether the step that is being made will be logged, so that statistics look.
        used: whether anything looks at gradients before their reduction.
        ruled: whether anything changes them.
    """

    def __init__(
        self,
        engine: Engine,
        wanted: Sequence[int],
        needs: LocalNeeds,
        rules: Sequence[tuple[Rule, frozenset[int]]],
        scaler: Any,
    ) -> None:
        self._needs = needs
        self._any = bool(needs.logged | needs.always)
        self.on, self.used, self.ruled = True, self._any or bool(rules), bool(rules)
        self._engine, self._wanted = engine, wanted
        self._rules, self._scaler = rules, scaler
        self._seen: dict[int, LocalStats] = {}
        self._last: dict[int, int] = {}  # in which backward
        self._nothing = [_NOTHING] * len(wanted)
        self._step, self._batches = 0, Counter[int]()

    def begin(self, step: int, on: bool) -> None:
        """From now on gradients are those of ``step``."""
        self._step, self.on = step, on

    def attach(self) -> list[Removable]:
        """Put the hooks on, if anything needs them."""
        ruled = {index for _, indices in self._rules for index in indices}
        indices = [i for i in self._wanted if i in ruled or self._any]
        return self._engine.on_local(indices, weak_method(self._hook), self._must) if indices else []

    def scopes(self) -> list[list[int]]:
        """The parameters of each rule."""
        return [sorted(indices) for _, indices in self._rules]

    def take(self) -> list[LocalStats]:
        """What was seen of each parameter since the last time."""
        self._batches.clear()
        if not self._seen:
            return self._nothing
        seen, self._seen = self._seen, {}
        return [seen.get(index, _NOTHING) for index in self._wanted]

    @property
    def _must(self) -> bool:
        return self._needs.must or self.ruled

    def _hook(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        if grad.is_cuda:
            if not self._must and capturing():
                return None
            refuse_capture(f"gradients(...) on {self._engine.shards[index].name!r} in backward", UNCAPTURED)
        if grad.layout is not torch.strided:
            self._refuse(index, grad)
            return None
        local_facts = self._needs.logged | self._needs.always if self.on else self._needs.always
        if local_facts:
            self._look(index, local_part(grad.detach()), local_facts)
        return self._rewritten(index, grad)

    @torch.no_grad()
    def _look(self, index: int, grad: torch.Tensor, local_facts: frozenset[LocalFact]) -> None:
        if index in self._seen and self._engine.is_first_gradient(index):
            self._forget()
        seen = self._seen.get(index, LocalStats())
        if "norms" in local_facts:
            seen = seen._replace(norms=(*seen.norms, *norms([grad], 2.0)))
        elif "finite" in local_facts:
            seen = seen._replace(finite_probes=(*seen.finite_probes, finite_probe(grad)))
        if self.on and index in self._needs.kept:
            seen = seen._replace(accumulated=grad.clone() if seen.accumulated is None else seen.accumulated + grad)
        self._seen[index], self._last[index] = seen, backward_id()

    def _forget(self) -> None:
        """All that was seen before this backward: it belongs to a step that was never made."""
        now = backward_id()
        self._seen = {index: seen for index, seen in self._seen.items() if self._last[index] == now}

    @torch.no_grad()
    def _rewritten(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        chosen = [rule for rule, indices in self._rules if index in indices]
        if not chosen:
            return None
        if grad.requires_grad:
            raise UsageError(
                f"create_graph=True: the rules at 'local' for {self._engine.shards[index].name!r} would cut the graph "
                "of its gradient; use on_gradient(at='local') with a function that autograd can follow"
            )
        shard, scale = self._engine.shards[index], self._scale(grad)
        result = grad.detach()
        if scale is not None:  # wide, since it is what float16 was multiplied for
            result = result.to(torch.promote_types(grad.dtype, torch.float32)) / scale
        batch = MicroBatch(self._step, self._batches[index], self._engine.position)
        self._batches[index] += 1
        for rule in chosen:
            result = rule.rewrite_local(shard, result, batch)
        return result if scale is None else (result * scale).to(grad.dtype)

    def _scale(self, grad: torch.Tensor) -> torch.Tensor | None:
        """What the engine or a GradScaler has multiplied the loss by."""
        own = self._engine.gradient_scale()
        if own is not None:
            return torch.as_tensor(own, device=grad.device)
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        scale: torch.Tensor = self._scaler._scale
        return onto(scale, grad.device)

    def _refuse(self, index: int, grad: torch.Tensor) -> None:
        if any(index in indices for _, indices in self._rules):
            raise UsageError(
                f"the gradient of {self._engine.shards[index].name!r} is {grad.layout}: rules need dense gradients; "
                "build the layer with sparse=False"
            )
