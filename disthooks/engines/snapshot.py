"""``OptimizerSnapshot``: the state of optimizers before a step, to be put back if the step is undone."""

# [Note: a step is undone as a whole]
# Whether an update is too large is known when it has been made, and by then the optimizer has changed its own state:
# moments, counts of steps, entries of its groups (schedulefree's k), or attributes. So all of it is copied before the
# step: tensors by value, dicts and lists entry by entry, other objects as they are. To undo the step, a tensor that the
# optimizer still holds gets its old values, in place, because a fused kernel or a graph may know its address. Entries
# that the step made are taken out. Attributes whose names begin with an underscore belong to torch and to learning rate
# schedules, which count calls of step(); they stay.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class OptimizerSnapshot:
    """Copies of all that a step of ``optimizers`` may change, except parameters and gradients.

    See [Note: a step is undone as a whole].

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.Adam([weight])
    >>> snapshot = OptimizerSnapshot([optimizer])
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> snapshot.restore()
    >>> dict(optimizer.state)
    {}
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._found = [(part, _copied(part)) for each in optimizers for part in _parts(each)]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for part, saved in self._found:
                _restore(part, saved)


class _Saved:
    """A tensor, and a copy of its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.values = tensor, tensor.detach().clone()

    def put_back(self) -> torch.Tensor:
        self.tensor.detach().copy_(self.values)
        return self.tensor


def _parts(optimizer: Any) -> Iterable[dict[Any, Any]]:
    yield optimizer.state
    yield from optimizer.param_groups
    yield optimizer.__dict__


def _is_left(key: Any, value: Any) -> bool:
    """Whether an entry is left as it is: parameters, and in the attributes what torch has."""
    return key in ("params", "state", "param_groups", "defaults") or (isinstance(key, str) and key.startswith("_"))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Saved(value)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items() if not _is_left(key, each)}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(each) for each in value) if type(value) in (list, tuple) else value
    return value


def _restored(saved: Any) -> Any:
    if isinstance(saved, _Saved):
        return saved.put_back()
    if isinstance(saved, dict):
        return {key: _restored(each) for key, each in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_restored(each) for each in saved)
    return saved


def _restore(now: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key in [key for key, value in now.items() if key not in saved and not _is_left(key, value)]:
        del now[key]
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(now.get(key), dict):
            _restore(now[key], value)
        else:
            now[key] = _restored(value)
