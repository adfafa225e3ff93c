"""``LoopFacts``: what the training loop itself set in each step, by numbers that the host knows."""

# [Note: what the loop set]
# A layer that begins to train, a learning rate that is 0 no more, or a larger batch moves losses and norms as a fault
# does. So each record says what the loop set: a reader looks there first. The numbers are those of the first rank, and
# are added when it writes a record; all else in a record is the same on every rank. Nothing is computed on a device and
# no collective runs. A number that lies on a device, such as the scale of a `GradScaler` there, is left out, because to
# read it the host would wait.
# That something happened in a step is known some steps later. So the numbers of the last steps are kept.

from __future__ import annotations

import contextlib
import operator
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from disthooks._handles import UncopiedHook, weak_method
from disthooks._torch import in_backward
from disthooks.engines.base import Engine, Removable, Shard
from disthooks.engines.scalers import scalers
from disthooks.engines.step import Step
from disthooks.errors import UsageError

_MOST_NAMED = 10  # parameters
_KEPT = 256  # steps, and as many as `recent` says
_needs_gradient = operator.attrgetter("requires_grad")


class LoopFacts:
    """Notes what the loop sets in each step. See [Note: what the loop set].

    Args:
        model: the model that the loop calls.
        config: the arguments of ``gradients``.
        is_written: whether this rank writes records.
    """

    def __init__(
        self, engine: Engine, step: Step, shards: Sequence[Shard], model: nn.Module, config: Any, is_written: bool
    ) -> None:
        self._engine, self._step, self._model, self._scaler = engine, step, model, config.scaler
        self._names, self._parameters = [shard.name for shard in shards], [shard.parameter for shard in shards]
        self._settings = sorted({name for stat in config.stats for name in stat.settings})
        self._is_written, kept = is_written, _KEPT + config.recent
        # Of the last steps: the number, the largest settings, the entries of the record, which parameters train.
        self._taken = deque[tuple[int, dict[str, float], dict[str, Any], list[bool]]](maxlen=kept)
        self._trained = deque[tuple[int, list[bool]]](maxlen=kept)  # of the records that were written
        self._trains: list[bool] = []  # in the last step
        self._last: float | None = None  # when the last step was made
        self._forwards = self._inputs = 0
        self._is_training: bool | None = None

    def attach(self) -> list[Removable]:
        hook = UncopiedHook(weak_method(self._before_forward))
        return [self._model.register_forward_pre_hook(hook, with_kwargs=True)] if self._is_written else []

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not in_backward() and not getattr(module, "_is_replica", False):
            self._forwards += 1
            self._is_training = module.training
            self._inputs += sum(each.numel() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))

    def forget_forwards(self) -> None:
        """The forwards since the last step belong to no step, or to one whose numbers were taken."""
        self._forwards, self._inputs, self._is_training = 0, 0, None

    def take(self, step: int) -> None:
        """Take the numbers of a step that is made now."""
        groups = self._step.param_groups
        settings = {name: [x for x in _of_groups(groups, name) if x is not None] for name in self._settings}
        largest = {name: max(known) for name, known in settings.items() if known}
        entries = self._entries(groups) if self._is_written else {}
        self._taken.append((step, largest, entries, self._trains))
        self.forget_forwards()

    def _entries(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        now, last = time.perf_counter(), self._last
        self._last, trains = now, list(map(_needs_gradient, self._parameters))
        self._trains = trains if trains != self._trains else self._trains  # one list for all steps
        entries = {
            **{f"loop/{name}": _of_groups(groups, name) for name in ("lr", "weight_decay")},
            "loop/trained": sum(trains),
            "loop/training": self._model.training if self._is_training is None else self._is_training,
            "loop/inputs": self._inputs or None,
            "loop/micro_batches": self._forwards or None,
            "loop/scale": self._scale(),
            "loop/seconds": None if last is None else now - last,
        }
        return {name: value for name, value in entries.items() if value is not None and value != [None] * len(groups)}

    def settings(self, step: int) -> dict[str, float]:
        """The largest settings in a step."""
        return next((largest for at, largest, *_ in reversed(self._taken) if at == step), {})

    def of(self, step: int) -> dict[str, Any]:
        """The entries for the record of a step; with the parameters that train since the record before, or no more."""
        for at, _, entries, trains in reversed(self._taken):
            if at == step and entries:
                # Recent steps may get their records after a later step that was logged.
                before = next((told for at, told in reversed(self._trained) if at < step), trains)
                self._trained.append((step, trains))
                changed: dict[str, list[str]] = {"loop/began": [], "loop/ended": []}
                for name, was, now in zip(self._names, before, trains, strict=True) if before != trains else ():
                    if was != now:
                        changed["loop/began" if now else "loop/ended"].append(name)
                return {**entries, **{key: names[:_MOST_NAMED] for key, names in changed.items() if names}}
        return {}

    def _scale(self) -> float | None:
        """The factor of the loss; None if there is none, or it lies on a device."""
        scale = self._engine.gradient_scale()
        with contextlib.suppress(UsageError):  # it is not known which scaler it is
            scaler = self._scaler or scalers.of(self._step.optimizers[0])
            if scale is None and scaler is not None and scaler.is_enabled():
                scale = scaler._scale
        return on_host(scale)


def _of_groups(groups: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """A setting of each parameter group."""
    return [on_host(group.get(name)) for group in groups]


def on_host(value: Any) -> float | None:
    """A number as a float, if the host need not wait for it.

    >>> on_host(1), on_host(torch.tensor(0.5)), on_host(torch.ones((), device="meta")), on_host("auto")
    (1.0, 0.5, None, None)
    """
    is_there = isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1
    return float(value) if isinstance(value, (int, float)) or is_there else None
