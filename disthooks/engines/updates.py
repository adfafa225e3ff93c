"""The step of a DeepSpeed engine, with functions run before and after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from disthooks.engines.partitions import Partitions
from disthooks.engines.shard import Shard
from disthooks.engines.skip import hide, over
from disthooks.engines.steps import BeforeStep, Entry

_NAME = "_take_model_step"


class Update:
    """Stands in for ``engine._take_model_step``, which ``engine.step()`` calls once for each step of the optimizer.

    All gradients are reduced by then, and DeepSpeed has not measured, clipped or unscaled any of them.

    Attributes:
        early, late: what is to run before the update, in this order.
        after: what is to run after it.
    """

    def __init__(self, engine: Any, kept: Partitions, shards: Sequence[Shard], group: Any) -> None:
        self.early: list[BeforeStep] = []
        self.late: list[BeforeStep] = []
        self.after: list[Callable[[], None]] = []
        self._engine, self._kept, self._group = engine, kept, group
        self._shards = shards
        self._own = engine.__dict__.get(_NAME)
        self._true = getattr(engine, _NAME)
        engine.__dict__[_NAME] = self

    @classmethod
    def of(cls, engine: Any, kept: Partitions, shards: Sequence[Shard], group: Any) -> Update:
        """The one that is in place on ``engine``, or a new one."""
        found = engine.__dict__.get(_NAME)
        return found if isinstance(found, cls) else cls(engine, kept, shards, group)

    def add(self, to: list[Any], run: Any) -> Entry:
        """Put ``run`` at the end of one of the lists; gives what takes it off."""
        to.append(run)
        return Entry(self, to, run)

    def leave(self) -> None:
        """Put back what was there, unless something is still to run, or somebody else has wrapped this."""
        if not (self.early or self.late or self.after) and self._engine.__dict__.get(_NAME) is self:
            if self._own is None:
                del self._engine.__dict__[_NAME]
            else:
                self._engine.__dict__[_NAME] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Everything before, the step, everything after."""
        if not (self.early or self.late or self.after):
            return self._true(*args, **kwargs)
        with self._still() if self._before() else self._resting():
            result = self._true(*args, **kwargs)
        for run in list(self.after):
            run()
        return result

    def _before(self) -> bool:
        """Whether the step is to be skipped, and not by DeepSpeed itself."""
        overflow = self._overflow()
        decisions = [run(self._engine.basic_optimizer, (), {}) for run in [*self.early, *self.late]]
        self._keep(overflow)
        skip = any(bool(decision) for decision in decisions if decision is not None)
        return skip and not self._anywhere(overflow)

    @torch.no_grad()
    def _overflow(self) -> torch.Tensor | None:
        """With a loss scale: whether any of this rank's gradients overflowed, before a rule could hide it."""
        if scaler_of(self._engine) is None and not self._engine.fp16_enabled():
            return None
        found = [~torch.isfinite(grad).all() for grad in self._grads()]
        return torch.stack(found).any() if found else None

    @torch.no_grad()
    def _keep(self, overflow: torch.Tensor | None) -> None:
        """An overflow stays one, so that DeepSpeed skips the step and lowers its loss scale; nothing is waited for."""
        first = next(self._grads(), None)
        if overflow is not None and first is not None:
            first.view(-1)[:1].masked_fill_(overflow, torch.nan)

    def _anywhere(self, overflow: torch.Tensor | None) -> bool:
        """Whether any rank has had an overflow; asked only where every rank decided to skip."""
        if scaler_of(self._engine) is None and not self._engine.fp16_enabled():
            return False
        device = self._shards[0].parameter.device
        found = torch.zeros((), device=device) if overflow is None else overflow.to(torch.float32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def _grads(self) -> Iterator[torch.Tensor]:
        for shard in self._shards:
            grad = shard.gradient()
            if grad is not None and grad.numel():
                yield grad

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """The optimizer's step does nothing but forget gradients; the engine takes it for one that overflowed."""
        optimizer = self._engine.optimizer
        knows = hasattr(optimizer, "overflow")
        before = optimizer.__dict__.get("step")

        def step(closure: Any = None) -> None:
            self._kept.drop()
            optimizer.overflow = True

        optimizer.__dict__["step"] = step
        try:
            yield
        finally:
            _restore(optimizer, "step", before)
            if not knows:
                optimizer.__dict__.pop("overflow", None)

    @contextlib.contextmanager
    def _resting(self) -> Iterator[None]:
        """Torch's own optimizer does not see what is withheld; when that is back, the engine zeroes its gradients."""
        if type(self._kept) is not Partitions:
            yield
            return
        optimizer = self._engine.basic_optimizer
        hide(optimizer)
        try:
            yield
        finally:
            over(optimizer)
            self._engine.zero_grad()


def scaler_of(engine: Any) -> Any:
    """The ``GradScaler`` that an engine under DeepSpeed's ``torch_autocast`` has, or None."""
    own = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return own if own is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def _restore(optimizer: Any, name: str, before: Any) -> None:
    if before is None:
        optimizer.__dict__.pop(name, None)
    else:
        optimizer.__dict__[name] = before
