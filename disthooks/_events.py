"""What happens to saved tensors, told to whoever listens; nothing is built when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Event(NamedTuple):
    """One thing that happened to one saved tensor.

    Attributes:
        kind: "pack" or "unpack".
        where: the name of the module whose forward saved it, as its attachment knows it.
        tensor: the tensor itself, as autograd gave it or gets it back.
        fate: what became of it: "stored", "shared" or "kept".
    """

    kind: str
    where: str
    tensor: torch.Tensor
    fate: str


# Read on the hot path as `if listeners:`; replaced, never changed in place, so a reader needs no lock.
listeners: tuple[Callable[[Event], None], ...] = ()


def listen(listener: Callable[[Event], None]) -> Callable[[], None]:
    """Have ``listener`` told of every event in this process; call the result to stop.

    >>> stop = listen(print)
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


def tell(kind: str, where: str, tensor: torch.Tensor, fate: str) -> None:
    """Tell every listener."""
    for listener in listeners:
        listener(Event(kind, where, tensor, fate))
