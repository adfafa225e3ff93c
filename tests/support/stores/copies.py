"""A store that copies into memory, so that what a pipeline does can be told from what the disk does."""

from __future__ import annotations

import dataclasses

import torch

from disthooks.saved.stores.base import ByteBudget, Store


@dataclasses.dataclass(frozen=True)
class Copies(Store):
    """Keeps contiguous clones, gives clones, counts their bytes against a limit; what is dropped is overwritten."""

    limit: int | None = None
    budget: ByteBudget = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", ByteBudget(self.limit, "Copies"))

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.budget.reserve(tensor.nbytes)
        return tensor.clone(memory_format=torch.contiguous_format)

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket.clone()

    def drop(self, ticket: torch.Tensor) -> None:
        self.budget.release(ticket.nbytes)
        if ticket.numel():
            ticket.view(-1).view(torch.uint8).fill_(0xAB)  # who reads it after this reads garbage
