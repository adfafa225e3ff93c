"""What autograd holds for a saved tensor that goes to no store."""

from __future__ import annotations

import torch

from disthooks._tensors import Layout
from disthooks._torch import current_node, is_python_node
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

    __slots__ = ("__weakref__", "is_alias", "reason", "tensor", "version", "where")

    def __init__(self, tensor: torch.Tensor, where: str, reason: str = "", is_alias: bool = False) -> None:
        self.tensor, self.version, self.where, self.reason = tensor, tensor._version, where, reason
        self.is_alias = is_alias  # of an activation's memory

    def check(self) -> None:
        """MutationError when the tensor was changed in place since."""
        if self.tensor._version != self.version:
            raise MutationError(changed_message(self.where, self.tensor._version, self.version))

    def unpack(self) -> torch.Tensor:
        """The tensor itself; a copy for Python code, see [Note: what a function of the user's own is given]."""
        self.check()
        if self.is_alias and is_python_node(current_node()):
            return _copy(self.tensor)
        return self.tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` and those between them, at the same strides in memory of their own."""
    layout, itemsize = Layout.of(tensor), tensor.element_size()
    begin, nbytes = layout.offset * itemsize, (layout.end() - layout.offset) * itemsize if tensor.numel() else 0
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    copy = raw.set_(tensor.untyped_storage(), begin, (nbytes,), (1,)).clone()
    return layout.over(copy.untyped_storage(), layout.offset)
