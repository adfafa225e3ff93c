"""Saved tensors in CPU memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from disthooks.errors import UsageError
from disthooks.saved.stores.base import Account, Store


class _Held(NamedTuple):
    tensor: torch.Tensor
    device: torch.device
    nbytes: int


@dataclass(frozen=True)
class OnCpu(Store):
    """Keep saved tensors of a GPU in CPU memory; a tensor that is there already stays, without a copy.

    Args:
        limit: most bytes of copies at any time in this process, an int or text such as ``"64 GiB"``; None
            for no limit. A tensor that is in CPU memory already costs none.
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
        if tensor.is_cpu:
            return _Held(tensor, tensor.device, 0)
        nbytes = int(tensor.numel()) * tensor.element_size()
        self.account.reserve(nbytes)
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

    def drop(self, ticket: _Held) -> None:
        """Give the bytes back to the limit; the memory goes with the ticket."""
        self.account.release(ticket.nbytes)
