"""What autograd holds for a saved tensor that goes to no store."""

from __future__ import annotations

import torch

from disthooks.errors import MutationError


def changed_message(where: str, now: int, then: int) -> str:
    """The sentence for a saved tensor of module ``where`` that is at version ``now`` instead of ``then``."""
    place = f"the forward of {where!r}" if where else "a saving(...) block"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"tensor saved in {place} is at version {now}; expected version {then} "
        "instead. Use the out-of-place operation there, or give it a clone()"
    )


class Kept:
    """What autograd holds for a tensor that stays where it is, and why it stays."""

    __slots__ = ("__weakref__", "reason", "tensor", "version", "where")

    def __init__(self, tensor: torch.Tensor, where: str, reason: str = "") -> None:
        self.tensor, self.version, self.where, self.reason = tensor, tensor._version, where, reason

    def check(self) -> None:
        """MutationError when the tensor was changed in place since."""
        if self.tensor._version != self.version:
            raise MutationError(changed_message(self.where, self.tensor._version, self.version))

    def unpack(self) -> torch.Tensor:
        """The tensor itself."""
        self.check()
        return self.tensor
