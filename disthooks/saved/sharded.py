"""What autograd holds for a DTensor: the handle of its local part, and a description of the whole."""

from __future__ import annotations

from typing import Any

import torch

from disthooks._tensors import exotic
from disthooks.errors import MutationError
from disthooks.saved.kept import changed_message
from disthooks.saved.packed import Handle


def stored_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor whose bytes are to be stored for ``tensor``: itself, or the local part of a DTensor.

    None when there is no such: of other subclasses nobody knows what they are made of.
    """
    kind = type(tensor)
    if kind is torch.Tensor:
        return tensor if exotic(tensor) is None else None
    # torch.distributed is not imported for the sake of a class that nobody can have without importing it.
    if kind.__name__ != "DTensor" or not kind.__module__.startswith("torch.distributed."):
        return None
    part: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return part if exotic(part) is None else None


class Sharded:
    """A DTensor whose local part is packed.

    Its changes are counted by the DTensor, not by its local part. So the witness here is a DTensor without memory.
    """

    __slots__ = ("_context", "_inner", "_version", "_witness", "handle")

    def __init__(self, handle: Handle, tensor: torch.Tensor) -> None:
        self.handle = handle
        self._version = tensor._version
        witness: Any = tensor.detach()
        names, self._context = witness.__tensor_flatten__()
        self._inner = {name: getattr(witness, name) for name in names if name != "_local_tensor"}
        witness._local_tensor = torch.empty(0, device="cpu")
        self._witness = witness

    @property
    def where(self) -> str:
        """The name of the module that saved it."""
        return self.handle.where

    def unpack(self) -> torch.Tensor:
        """The saved tensor; any number of times, in any thread."""
        if self._witness._version != self._version:
            raise MutationError(changed_message(self.where, self._witness._version, self._version))
        inner = {**self._inner, "_local_tensor": self.handle.unpack()}
        kind: Any = type(self._witness)
        whole: torch.Tensor = kind.__tensor_unflatten__(
            inner, self._context, self._witness.size(), self._witness.stride()
        )
        return whole
