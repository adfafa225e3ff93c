"""Copies of weights that go nowhere: they are cast again when backward needs them.

What autograd holds for a DTensor: the handle of its local part, and a description of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disthooks._streams import current_stream, event_on, on_accelerator
from disthooks._tensors import Layout, exotic
from disthooks.errors import MutationError, StoreError
from disthooks.saved.counters import Counters
from disthooks.saved.in_place import changed_message
from disthooks.saved.packed import Handle, Packed


class AutocastCopy(Packed):
    """A narrow copy of a weight, as autocast makes them: dropped, and cast again when backward needs it.

    Only a copy that is proven to be cast again bit for bit is dropped: it is compared while it is there. One that
    is not (another memory format, rounded in place, cast from a weight that was written since) stays in memory. What
    is cast in backward has to have the same checksum: a weight can be written uncounted, or be moved.
    """

    __slots__ = ("_checksum", "_mark", "_proof", "_weight")

    def __init__(
        self,
        alias: torch.Tensor,
        storage: torch.UntypedStorage,
        first: Layout,
        weight: nn.Parameter,
        counters: Counters,
        module_name: str,
    ) -> None:
        super().__init__(alias, storage, None, first, counters, module_name)
        self._weight = weight
        self._mark: tuple[Any, ...] = ()
        self._checksum: torch.Tensor | None = None
        self._proof: tuple[torch.Tensor, torch.Event] | None = None

    @property
    def is_source(self) -> bool:
        """Weights are no activations: those that norms need are copied."""
        return False

    def _offload(self, storage: torch.UntypedStorage) -> bool:
        proven = self._is_proven(storage) if on_accelerator(self.alias) else self._compare(storage)
        self.is_undecided = proven is None
        if proven and self._is_same_weight():
            self.counters.count_recast(self.nbytes, self.module_name)
            return True
        if proven is not None:
            self.counters.count_kept("autocast weight", self.nbytes, self.module_name)
        return False

    def _compare(self, storage: torch.UntypedStorage) -> torch.Tensor | bool:
        """Whether casting again gives the same bytes."""
        if not self._is_there():  # FSDP freed it when its forward ended
            return False
        self._mark = self._marked()
        again, now = _bytes(self._cast().untyped_storage()), self.content(storage)
        if again.shape != now.shape:
            return False
        self._checksum = checksum(again)
        return (again == now).all()

    def _is_proven(self, storage: torch.UntypedStorage) -> bool | None:
        """The same without waiting for the device: asked first it says None, and so on until the answer is there."""
        if self._proof is None:
            same = self._compare(storage)
            if isinstance(same, bool):
                return same
            answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(same, non_blocking=True)
            self._proof = answer, event_on(current_stream(same.device))
        answer, done = self._proof
        return bool(answer) if done.query() else None

    def _restore(self) -> torch.Tensor:
        if not self._is_there():
            raise StoreError(f"a weight of {self.module_name!r} is not in memory in backward, to be cast again")
        again = self._cast()
        # On a GPU reading the checksum waits for the device: only when there is a reason.
        if not (on_accelerator(self.alias) and self._is_same_weight()) and not self._is_same(again.untyped_storage()):
            raise MutationError(
                f"a weight was changed between the forward of {self.module_name!r} and its backward, and autocast's "
                "copy of it was dropped: call backward before the optimizer steps, or the model is converted"
            )
        return again

    def _is_same(self, storage: torch.UntypedStorage) -> bool:
        assert self._checksum is not None
        return storage.nbytes() == self.nbytes and bool(checksum(_bytes(storage)) == self._checksum)

    def _is_same_weight(self) -> bool:
        """Whether the weight is where it was, at the same version."""
        return self._marked() == self._mark

    def _marked(self) -> tuple[Any, ...]:
        weight = self._weight
        return weight._version, weight.dtype, weight.data_ptr(), weight.shape, weight.stride()

    def _is_there(self) -> bool:
        return self._weight.untyped_storage().nbytes() >= self._weight.numel() * self._weight.element_size()

    def _cast(self) -> torch.Tensor:
        return self._weight.detach().to(self.alias.device, self.alias.dtype, copy=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def checksum(content: torch.Tensor) -> torch.Tensor:
    """A number, on the device, that changes with any bit of ``content`` (1-D, uint8) and with the order of its words.

    >>> x = torch.arange(64, dtype=torch.uint8)
    >>> bool(checksum(x) == checksum(x.clone())), bool(checksum(x) == checksum(x.roll(8)))
    (True, False)
    """
    words = content[: content.numel() // 8 * 8].view(torch.int64)
    factors = torch.arange(1, words.numel() + 1, device=content.device) * -7046029254386353131  # the golden ratio, odd
    factors ^= factors >> 32
    rest = content[words.numel() * 8 :].to(torch.int64)
    places = torch.arange(1, rest.numel() + 1, device=content.device) * 257
    return (words * (factors | 1)).sum() + (rest * places).sum()


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


class DTensorHandle:
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
    def module_name(self) -> str:
        """The name of the module that saved it."""
        return self.handle.module_name

    def unpack(self) -> torch.Tensor:
        """The saved tensor; any number of times, in any thread."""
        if self._witness._version != self._version:
            raise MutationError(changed_message(self.module_name, self._witness._version, self._version))
        inner = {**self._inner, "_local_tensor": self.handle.unpack()}
        kind: Any = type(self._witness)
        whole: torch.Tensor = kind.__tensor_unflatten__(
            inner, self._context, self._witness.size(), self._witness.stride()
        )
        return whole
