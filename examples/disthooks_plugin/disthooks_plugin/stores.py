"""A store of one's own."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from disthooks.errors import UsageError
from disthooks.saved.stores.base import Store


class Ticket(NamedTuple):
    """One tensor, and nothing else has a reference to it: it goes with its ticket."""

    content: bytes
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Zipped(Store):
    """Keep saved tensors in host memory, compressed by zlib.

    Nothing of a ticket is in the store, so threads and forks have nothing to disturb.

    Args:
        level: from 1, fast, to 9, small.
    """

    level: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 9:
            raise UsageError(f"Zipped: level must be from 1 to 9, got {self.level!r}")

    def put(self, tensor: torch.Tensor) -> Any:
        host = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous().view(torch.uint8)
        content = zlib.compress(bytes(host.tolist()), self.level)
        return Ticket(content, tensor.shape, tensor.dtype, tensor.device)

    def get(self, ticket: Any) -> torch.Tensor:
        content = bytearray(zlib.decompress(ticket.content))
        host = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return host.view(ticket.dtype).view(ticket.shape).to(ticket.device)

    def drop(self, ticket: Any) -> None:
        """Nothing: the bytes go with the ticket."""
