"""``OptimizerSnapshot``: the state of optimizers before a step, to be put back if the step is undone."""

# [Note: a step is undone as a whole]
# Whether an update is too large is known when it has been made, and by then the optimizer has changed its own state:
# moments, counts of steps, entries of its groups (schedulefree's k), or attributes. So all of it is copied before the
# step: tensors by value, dicts, lists and the attributes of objects (Shampoo's preconditioners) entry by entry. To undo
# the step, each tensor gets its old values in place, because a fused kernel or a graph may know its address. Entries
# that the step made are taken out. Attributes of an optimizer whose names begin with an underscore belong to torch and
# to learning rate schedules, which count calls of step(); they stay.

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterable, Set
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
        seen: set[int] = set()
        self._saved = [_saved(each, seen) for each in optimizers]

    def restore(self) -> None:
        with torch.no_grad():
            for saved in self._saved:
                saved()


def _saved(value: Any, seen: set[int]) -> Callable[[], Any]:
    """A function that gives ``value`` as it is now, later, with its contents put back."""
    if isinstance(value, torch.Tensor):
        return functools.partial(_put_back, value, value.detach().clone())
    if id(value) in seen:  # objects may refer to one another
        return lambda: value
    if isinstance(value, dict):
        return functools.partial(_put_entries_back, value, _entries(value, seen | {id(value)}))
    if type(value) in (list, tuple, collections.deque):
        entries = [_saved(each, seen | {id(value)}) for each in value]
        options = {"maxlen": value.maxlen} if isinstance(value, collections.deque) else {}
        return lambda: type(value)((entry() for entry in entries), **options)
    is_object = hasattr(value, "__dict__") and not callable(value) and not inspect.ismodule(value)
    if not is_object:
        return lambda: value
    seen = seen | {id(value)}
    is_optimizer = isinstance(value, torch.optim.Optimizer)
    left = {name for name in vars(value) if is_optimizer and name.startswith("_")}
    entries_of = _entries(vars(value), seen, left)

    def put_back() -> Any:
        _put_entries_back(vars(value), entries_of, left)
        return value

    return put_back


def _entries(found: dict[Any, Any], seen: set[int], left: Set[Any] = frozenset()) -> dict[Any, Callable[[], Any]]:
    # Whoever undoes the step puts the parameters back, and knows which parts of them are here.
    return {key: _saved(each, seen) for key, each in found.items() if not _is_left(key, left)}


def _is_left(key: Any, left: Set[Any]) -> bool:
    return isinstance(key, str) and (key == "params" or key in left)


def _put_back(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    tensor.detach().copy_(values)
    return tensor


def _put_entries_back(
    now: dict[Any, Any], saved: dict[Any, Callable[[], Any]], left: Set[Any] = frozenset()
) -> dict[Any, Any]:
    for key in [key for key in now if key not in saved and not _is_left(key, left)]:
        del now[key]
    now.update({key: entry() for key, entry in saved.items()})
    return now
