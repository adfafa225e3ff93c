"""What happens to saved tensors, told to whoever listens; nothing is built when nobody does.

The one handle that everything attached gives back.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch


class SavedTensorEvent(NamedTuple):
    """One thing that happened to one saved tensor.

    Attributes:
        kind: "pack" or "unpack".
        module_name: the name of the module whose forward saved it, as its attachment knows it.
        tensor: the tensor itself, as autograd gave it or gets it back.
        outcome: what became of it: "stored", "shared" or "kept".
    """

    kind: str
    module_name: str
    tensor: torch.Tensor
    outcome: str


# Read on the hot path as `if listeners:`; replaced, never changed in place, so a reader needs no lock.
listeners: tuple[Callable[[SavedTensorEvent], None], ...] = ()


def add_listener(listener: Callable[[SavedTensorEvent], None]) -> Callable[[], None]:
    """Have ``listener`` told of every event in this process; call the result to stop.

    >>> stop = add_listener(print)
    >>> stop()
    >>> listeners
    ()
    """
    global listeners
    listeners = (*listeners, listener)

    def stop() -> None:
        global listeners
        listeners = tuple(other for other in listeners if other is not listener)

    return stop


def notify(kind: str, module_name: str, tensor: torch.Tensor, outcome: str) -> None:
    """Tell every listener."""
    for listener in listeners:
        listener(SavedTensorEvent(kind, module_name, tensor, outcome))


A = TypeVar("A", bound="Attachment")


class Attachment:
    """What was attached, and how to take it off again: ``remove()``, or the end of a ``with`` block.

    Removing twice is allowed and does nothing the second time. Subclasses add ``report()``.

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
        """Have ``undo`` called on removal, the last one given first."""
        self._undo.callback(undo)

    def at_exit(self, method: Callable[[], object]) -> None:
        """Have a method of this object called when the process ends, if it is still attached then."""
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
    """A hook on a module that a copy or pickle of the module does not have: the copy gets one that does nothing.

    >>> import copy
    >>> copy.copy(UncopiedHook(lambda: "seen"))() is None
    True
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """What the function returns; nothing at all while torch.compile traces, since a lock is not traceable."""
        return None if torch.compiler.is_compiling() else self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return UncopiedHook, (_nothing,)


def _nothing(*args: Any) -> None:
    """The hook of a copy."""


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` while its object lives; then a function that does nothing.

    It is for hooks whose holder the collector cannot look into: torch's list of hooks on all optimizers, and parameters
    that DDP's reducer or FSDP holds. A strong reference there would keep the object, and its model, for ever.

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
