"""Saved tensors in CPU memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from disthooks.errors import UsageError
from disthooks.saved.stores.base import Account, Store
from disthooks.saved.stores.traffic import StoreReport


class _Held(NamedTuple):
    tensor: torch.Tensor
    device: torch.device
    nbytes: int


@dataclass(frozen=True)
class OnCpu(Store):
    """Keep saved tensors of a GPU in CPU memory; a tensor that is there already stays, without a copy.

    Args:
        limit: most bytes at any time in this process, an int or text such as ``"64 GiB"``, or ``"256 GiB per node"``,
            of which each process of the node (``LOCAL_WORLD_SIZE``) gets its part; None for no limit.
        pin_memory: page-locked copies, which a GPU reads faster: True, False, or ``"auto"`` for wherever
            there is a GPU.

    Raises:
        UsageError: when ``limit`` is not a size or ``pin_memory`` none of the three.
        StoreError: in forward, at the limit.

    >>> store = OnCpu("64 GiB")
    >>> x = torch.ones(3)
    >>> store.get(store.put(x)).data_ptr() == x.data_ptr()
    True
    """

    limit: int | str | None = None
    pin_memory: bool | Literal["auto"] = field(default="auto", kw_only=True)
    account: Account = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pin_memory not in (True, False, "auto"):
            raise UsageError(f"OnCpu: pin_memory must be True, False or 'auto', got {self.pin_memory!r}")
        object.__setattr__(self, "account", Account(self.limit, "OnCpu"))

    def moves(self, tensor: torch.Tensor) -> bool:
        """False for a tensor in CPU memory."""
        return not tensor.is_cpu

    def put(self, tensor: torch.Tensor) -> _Held:
        """Copy ``tensor`` to the CPU and wait for the copy; hold it as it is if it is there."""
        nbytes = tensor.nbytes
        self.account.reserve(nbytes)
        if tensor.is_cpu:
            return _Held(tensor, tensor.device, nbytes)
        try:
            pin = torch.cuda.is_available() if self.pin_memory == "auto" else self.pin_memory
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin).copy_(tensor)
        except BaseException:
            self.account.release(nbytes)
            raise
        return _Held(copy, tensor.device, nbytes)

    def get(self, ticket: _Held) -> torch.Tensor:
        """The tensor on the device it came from."""
        return ticket.tensor.to(ticket.device)

    def report(self) -> tuple[StoreReport, ...]:
        """Bytes of the copies."""
        return (StoreReport("OnCpu()", held=self.account.held, limit=self.account.limit),)

    def held(self, ticket: _Held) -> torch.Tensor:
        """The tensor, in CPU memory."""
        return ticket.tensor

    def drop(self, ticket: _Held) -> None:
        """Give the bytes back to the limit; the memory goes with the ticket."""
        self.account.release(ticket.nbytes)
