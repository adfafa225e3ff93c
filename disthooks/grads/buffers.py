"""``BuffersBefore``: the buffers of a model before the forwards of a step, to be put back if the step is skipped."""

# [Note: buffers of a skipped step]
# A batch whose gradients are not finite has often made the running statistics of a batch norm NaN in forward, and they
# stay NaN for ever. So what the forwards of a skipped step wrote into buffers is put back. Running statistics are
# copied before each step: batch norm changes them without raising their version. All other buffers are watched by
# identity and version, because some are as large as the model (quantized weights, masks), and copied only once the
# forward of a step has changed them. So the first change of such a buffer cannot be put back, and is said.
# A step begins with the first forward of the model in training mode. A loop may call parts of the model and never the
# model itself; then the buffers are copied when the step before has ended.

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from disthooks._handles import UncopiedHook, first_names, weak_method
from disthooks._match import canonical_name
from disthooks._tensors import exotic
from disthooks._torch import flatten, groups_for_foreach, in_backward, unflatten
from disthooks.engines.base import Removable


class _Buffer:
    """One buffer: where the model has it, and what it was.

    Attributes:
        name: its name in the model.
        is_copied: whether its elements are copied before each step.
        tensor: the tensor that the model had before the step.
        copy: the elements before the step.
    """

    __slots__ = ("_at", "_key", "_version", "copy", "is_copied", "name", "tensor")

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self._at, self._key = name, module._buffers, key
        self.is_copied = isinstance(module, nn.modules.batchnorm._NormBase)
        self.tensor: torch.Tensor | None = None
        self.copy: torch.Tensor | None = None
        self._version = 0

    @property
    def now(self) -> torch.Tensor | None:
        return self._at.get(self._key)

    def has_changed(self) -> bool:
        """Whether another tensor is there, or its version was raised."""
        return self.now is not self.tensor or (self.tensor is not None and self.tensor._version != self._version)

    def remember(self) -> None:
        """Take the tensor, and make room for a copy of its elements if they are copied."""
        self.tensor = now = self.now
        self._version = 0 if now is None else now._version
        if now is None or not self.is_copied or exotic(now) is not None:
            self.copy = None
        elif self.copy is None or _kind(self.copy) != _kind(now):
            self.copy = torch.empty_like(now)

    def put_tensor_back(self) -> None:
        self._at[self._key] = self.tensor


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


class BuffersBefore:
    """The buffers of models before the forwards of a step; see [Note: buffers of a skipped step].

    >>> norm = nn.BatchNorm1d(2)
    >>> buffers = BuffersBefore([norm], [norm])
    >>> _ = norm(torch.full((2, 2), torch.nan))
    >>> buffers.treat(0, torch.tensor(True))
    []
    >>> norm.running_mean
    tensor([0., 0.])
    """

    def __init__(self, models: Iterable[nn.Module], called: Iterable[nn.Module], puts_back: bool = True) -> None:
        self.puts_back, self._has_said = puts_back, False
        self._called = tuple(dict.fromkeys([*called, *models]))
        named = [(name, module) for model in models for name, module in model.named_modules()]
        self._buffers = [
            _Buffer(canonical_name(f"{name}.{key}".lstrip(".")), module, key)
            for name, module in named
            for key in module._buffers
        ]
        self._is_remembered = self._was_called = self._has_warned = False
        if puts_back:
            self._remember()

    def attach(self) -> list[Removable]:
        begin = UncopiedHook(weak_method(self._begin_forward))
        wanted = self._called if self._buffers and self.puts_back else ()
        return [module.register_forward_pre_hook(begin, prepend=True) for module in wanted]

    def treat(self, step: int, decision: torch.Tensor) -> list[tuple[torch.Tensor, Callable[[float], None]]]:
        """The step is made, or skipped if ``decision`` is true: put buffers back, or say that they stay.

        Returns:
            A number on the device, and a function that is to be called with it when it has arrived.
        """
        say = functools.partial(self._say, step)
        if self.puts_back:
            self._put_back(decision)
            self._end_step()
            return []
        if not decision.is_cpu:
            return [(decision.double(), say)]
        say(float(decision))
        return []

    def has_lost(self) -> bool:
        """Whether the forwards of this step changed a buffer whose elements were not kept."""
        return any(each.copy is None and each.has_changed() for each in self._buffers)

    def put_back_now(self) -> None:
        """Make the buffers as they were before the forwards of this step."""
        self._put_back(torch.ones((), dtype=torch.bool))

    def _say(self, step: int, is_skipped: float) -> None:
        names = [each.name for each in self._buffers if each.is_copied]
        if is_skipped and names and not self._has_said:
            self._has_said = True
            warnings.warn(
                f"step {step} was left out, and what its forward wrote into {len(names)} buffers "
                f"({first_names(names)}) stays, because restore_buffers=False. If it is not finite, evaluation will "
                "not be finite either. This is said once",
                stacklevel=2,
            )

    def _end_step(self) -> None:
        """The next forward begins another step."""
        for each in self._buffers:
            each.is_copied = each.is_copied or each.has_changed()
        if self._was_called:
            self._is_remembered = self._was_called = False
        else:
            self._remember()

    @torch.no_grad()
    def _put_back(self, decision: torch.Tensor) -> None:
        """If ``decision`` is true, put the buffers back; a decision on a device is not waited for."""
        if decision.is_cpu and not bool(decision):
            return
        pairs = [
            (each.tensor, each.copy) for each in self._buffers if each.tensor is not None and each.copy is not None
        ]
        if decision.is_cpu:
            self._put_tensors_back()
        if not pairs:
            return
        for (now, before), _ in groups_for_foreach([list(row) for row in zip(*pairs, strict=True)]).values():
            if not decision.is_cpu and now[0].device == decision.device:
                # One kernel for all: `torch.where` of each buffer by itself would take longer than the step's rules.
                mixed = torch.where(decision, flatten(before), flatten(now))
                before = unflatten(mixed, now)
            elif not decision.is_cpu and not bool(decision):  # these buffers lie on another device
                continue
            torch._foreach_copy_(now, list(before), non_blocking=True)

    def _put_tensors_back(self) -> None:
        lost = []
        for each in self._buffers:
            if each.now is not each.tensor:
                each.put_tensor_back()
            if each.copy is None and each.has_changed():
                lost.append(each.name)
        if lost and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the forward of a step that was left out may have changed the buffers {', '.join(lost[:3])} for the "
                "first time, and their old elements were not kept; they are from now on. This is said once",
                stacklevel=2,
            )

    @torch.no_grad()
    def _remember(self) -> None:
        self._is_remembered = True
        for each in self._buffers:
            each.remember()
        if pairs := self._copied():
            torch._foreach_copy_([copy for _, copy in pairs], [now for now, _ in pairs], non_blocking=True)

    def _copied(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers whose elements are copied, and the copies."""
        return [(one.tensor, one.copy) for one in self._buffers if one.tensor is not None and one.copy is not None]

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or in_backward() or getattr(module, "_is_replica", False):
            return
        self._was_called = True
        if not self._is_remembered:
            self._remember()
