"""``Attachment``, the handle of attached hooks; and hooks that copies of a model do not have."""

# [Note: hooks must not keep models]
# A hook that is a bound method keeps its object alive, and the object often keeps the model alive. Python's collector
# finds such a cycle only if it can look into every holder. It cannot look into torch's list of hooks on all optimizers,
# nor into parameters that DDP's C++ reducer or FSDP holds. A hook there is a `weak_method`, which does nothing after
# its object is gone. A hook on a module is an `UncopiedHook`: a deep copy or pickle of the model would otherwise copy
# the attachment too, and the hooks of the copy would report to an attachment that no user has.

from __future__ import annotations

import atexit
import contextlib
import functools
import reprlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from disthooks.errors import UsageError


def check_state(state: Any, *keys: str, like: Mapping[str, Any] | None = None) -> None:
    """Raise UsageError unless ``state`` is a dict with ``keys``, as the ``state_dict()`` of an attachment is.

    ``like`` is an example of a state; what is at its keys must have the types that the example has.

    >>> check_state({"steps": 3}, "steps")
    >>> check_state(None)
    Traceback (most recent call last):
    disthooks.errors.UsageError: load_state_dict(None): give what state_dict() returned
    >>> check_state({"needs": {8: None}}, like={"needs": {0: 0.0}})
    Traceback (most recent call last):
    disthooks.errors.UsageError: load_state_dict: 'needs' is {8: None}: give what state_dict() returned
    """
    keys += tuple(like or ())
    if not isinstance(state, Mapping) or not all(key in state for key in keys):
        parts = f", a dict with {', '.join(map(repr, keys))}" if keys else ""
        raise UsageError(f"load_state_dict({reprlib.repr(state)}): give what state_dict() returned{parts}")
    for key, example in (like or {}).items():
        if not _is_like(state[key], example):
            raise UsageError(f"load_state_dict: {key!r} is {reprlib.repr(state[key])}: give what state_dict() returned")


def _is_like(value: Any, example: Any) -> bool:
    """Whether a value has the types of an example; each entry of a dict, those of the one entry of the example."""
    if isinstance(example, dict):
        ((key, inner),) = example.items()
        return isinstance(value, Mapping) and all(_is_like(k, key) and _is_like(v, inner) for k, v in value.items())
    if isinstance(example, tuple):
        return isinstance(value, tuple) and len(value) == len(example) and all(map(_is_like, value, example))
    return isinstance(value, (int, float) if isinstance(example, float) else type(example))


def is_power_of_two(count: int) -> bool:
    """Whether ``count`` is 1, 2, 4, 8, ...: a thing is done this often that is worth less the more it was done.

    >>> [count for count in range(20) if is_power_of_two(count)]
    [1, 2, 4, 8, 16]
    """
    return count.bit_count() == 1


class LoggedRecords:
    """The number of records for which this process has asked ``also=``: the peaks of stores begin anew with each."""

    count = 0


A = TypeVar("A", bound="Attachment")


class Attachment:
    """The handle of attached hooks. ``remove()``, or the end of a ``with`` block, takes the hooks off again.

    A second ``remove()`` does nothing. Subclasses add ``report()``.

    >>> log = []
    >>> with Attachment() as attached:
    ...     attached.on_remove(lambda: log.append("off"))
    >>> attached.remove()
    >>> log
    ['off']
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def on_remove(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` on removal. The function that was given last is called first."""
        self._undo.callback(undo)

    def at_exit(self, method: Callable[[], object]) -> None:
        """Call a method of this object when the process ends, if it is still attached then."""
        alive = weakref.WeakMethod(method)

        def call() -> None:
            if (method := alive()) is not None:
                method()

        atexit.register(call)
        self.on_remove(functools.partial(atexit.unregister, call))

    def remove(self) -> None:
        """Take off everything that was attached."""
        self._undo.close()

    def __enter__(self: A) -> A:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class UncopiedHook:
    """A hook on a module that a copy or pickle of the module does not have: the copy gets a hook that does nothing.

    See [Note: hooks must not keep models].

    >>> import copy
    >>> copy.copy(UncopiedHook(lambda: "seen"))() is None
    True
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function, except while torch.compile traces, because a lock is not traceable."""
        return None if torch.compiler.is_compiling() else self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return UncopiedHook, (_nothing,)


def _nothing(*args: Any) -> None:
    """The hook that a copy gets. Pickles refer to it by its name."""


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``method`` while its object lives, and then does nothing.

    It is for hooks in a holder that the collector cannot look into; see [Note: hooks must not keep models].

    >>> attached = Attachment()
    >>> remove = weak_method(attached.remove)
    >>> del attached
    >>> remove() is None
    True
    """
    alive = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return None if (found := alive()) is None else found(*args)

    return call


def first_names(names: Sequence[str], most: int = 3) -> str:
    """The first of ``names``, for a ``repr``.

    >>> first_names(["a", "b"]), first_names(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    first = ", ".join(name or "the model" for name in names[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"
