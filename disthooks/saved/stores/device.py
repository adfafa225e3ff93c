"""Saved tensors where they are."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from disthooks._device import handed_over, stream_of
from disthooks._tensors import resident
from disthooks.saved.stores.base import Account, Store
from disthooks.saved.stores.traffic import StoreReport


@dataclass(frozen=True)
class OnDevice(Store):
    """Keep saved tensors where they are, up to a limit: the first tier of a :class:`Tiered`, or behind codecs.

    Args:
        limit: most bytes at any time in this process, an int or text such as ``"8 GiB"``, or ``"64 GiB per node"``;
            None for no limit.

    Raises:
        UsageError: when ``limit`` is not a size.
        StoreError: in forward, at the limit.

    >>> store = OnDevice("1 MiB")
    >>> x = torch.ones(3)
    >>> store.get(store.put(x)).data_ptr() == x.data_ptr()
    True
    """

    limit: int | str | None = None
    account: Account = field(init=False, repr=False, compare=False)
    #: Stores that take what does not fit here, by identity; what they hold on the device counts, too.
    below: weakref.WeakValueDictionary[int, Store] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "account", Account(self.limit, "OnDevice"))
        object.__setattr__(self, "below", weakref.WeakValueDictionary())

    def __reduce__(self) -> tuple[Any, ...]:
        return OnDevice, (self.limit,)

    def moves(self, tensor: torch.Tensor) -> bool:
        """Never."""
        return False

    def put(self, tensor: torch.Tensor) -> _There:
        """Hold ``tensor``."""
        nbytes = max(tensor.nbytes, resident(tensor))  # a view keeps all of its storage
        self.account.reserve(nbytes)
        return _There(tensor, stream_of(tensor), nbytes)

    def get(self, ticket: _There) -> torch.Tensor:
        """The tensor itself, for the current stream."""
        return ticket.tensor if ticket.stream is None else handed_over(ticket.tensor, ticket.stream)

    def held(self, ticket: _There) -> torch.Tensor:
        """The tensor itself."""
        return ticket.tensor

    def drop(self, ticket: _There) -> None:
        """Let go of it."""
        self.account.release(ticket.nbytes)

    def report(self) -> tuple[StoreReport, ...]:
        """Bytes held."""
        return (StoreReport("OnDevice()", held=self.account.held, limit=self.account.limit),)


class _There(NamedTuple):
    """A tensor, and the stream of its device that filled it, if it is an accelerator's."""

    tensor: torch.Tensor
    stream: torch.Stream | None
    nbytes: int
