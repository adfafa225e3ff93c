"""Tells which saved tensors are weights of a module, or copies of weights that autocast made."""

# [Note: copies of weights]
# Under autocast a layer saves a narrow copy of its weight. If a store took it, its bytes would be spent for nothing,
# because the weight is in memory anyway. So the copy is dropped, and the weight is cast again when backward needs it.
# That is right only if the cast gives the same bits. It does not give them for another memory format, for a copy that
# was rounded in place, or if autocast's cache is older than the weight. So the weight is cast once more while the copy
# is there, and all bytes are compared (decision 11). In backward the new copy must have the same checksum, because a
# weight can be written without a count, or be moved (decision 27). On a device the host does not wait for the result of
# the comparison: the copy stays `is_undecided`, and a later operator asks again.

from __future__ import annotations

import collections
import re
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._streams import current_stream, event_on, on_accelerator
from disthooks._tensors import Layout, exotic, is_waiting, storages_of
from disthooks._torch import StorageRef, node_name
from disthooks.errors import MutationError, StoreError
from disthooks.saved.packed import Packed
from disthooks.saved.report import Counters

# Nodes through which a view of a weight was made before it was cast: FSDP1's of its flat parameter, a transpose, ...
_VIEWS = re.compile(
    "(Alias|AsStrided|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|T|Transpose|Unbind|Unsqueeze|"
    "UnsafeView|View)Backward[0-9]"
)

#: The dtypes that autocast casts to. Autocast is off while an operator saves tensors, so it cannot be asked.
NARROW = (torch.bfloat16, torch.float16)


class CastFrom(NamedTuple):
    """A tensor was cast from ``weight``; if that is None, from a view or a copy of a weight."""

    weight: nn.Parameter | None


class ModuleWeights:
    """The weights and buffers of the module whose forward runs. They are looked up when a tensor is in doubt.

    Args:
        module: None for code that belongs to no module.
    """

    __slots__ = ("_by_shape", "_by_storage", "_module", "_replica", "_roots")

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._by_storage: dict[int, tuple[str, StorageRef]] | None = None
        self._by_shape: dict[torch.Size, list[nn.Parameter]] | None = None
        self._roots: list[tuple[Any, int]] | None = None
        # The weights of a DataParallel replica are no Parameters and have a history; other weights are told by type.
        self._replica = module is not None and getattr(module, "_is_replica", False)

    def kind_of(self, tensor: torch.Tensor) -> str | None:
        """ "parameter" or "buffer" if the memory of ``tensor``, plain and no Parameter, is the module's."""
        if self._module is None or not (self._replica or not tensor.requires_grad):
            return None
        by_storage = self._by_storage
        if by_storage is None:
            by_storage = storages_of(self._module)
            if not is_waiting(self._module):  # else lazy modules make more weights in this call
                self._by_storage = by_storage
        found = by_storage.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0]

    def cast_from(self, tensor: torch.Tensor) -> CastFrom | None:
        """The weight from which autocast made ``tensor``, which is narrow, or the tensor that it is a view of.

        None if it was not made in this way.
        """
        owner: Any = tensor._base if tensor._is_view() else tensor
        if not owner.requires_grad:
            if type(tensor) is not torch.Tensor:
                return None  # looking at the elements of a DTensor would be a collective
            weight = self._weight_like(owner)
            return None if weight is None else CastFrom(weight)
        node = owner.grad_fn
        if node is None or node_name(node) != "ToCopyBackward0":
            return None
        node, output = node.next_functions[0]
        if self._replica and self._roots is None:
            # The outputs of nodes that gave a DataParallel replica its weights.
            parts = [] if self._module is None else self._module.modules()
            copies = [copy for part in parts for copy in getattr(part, "_former_parameters", {}).values()]
            self._roots = [(copy.grad_fn, copy.output_nr) for copy in copies]
        if self._roots is not None and (node, output) in self._roots:
            return CastFrom(None)
        is_direct = True
        while node is not None and _VIEWS.fullmatch(node_name(node)):
            node, is_direct = node.next_functions[0][0], False
        weight = node.variable if node is not None and node_name(node) == "torch::autograd::AccumulateGrad" else None
        if not isinstance(weight, nn.Parameter):
            return None
        return CastFrom(weight if is_direct else None)

    def _weight_like(self, copy: torch.Tensor) -> nn.Parameter | None:
        """A weight that ``copy``, which has no history, may be cast from; the bytes are compared later.

        Copies of frozen weights have no history, and neither has anything that was made inside a compiled graph.
        """
        if self._module is None:
            return None
        by_shape = self._by_shape
        if by_shape is None:
            # The weights of which autocast makes copies.
            by_shape = collections.defaultdict(list)
            for weight in self._module.parameters():
                if not nn.parameter.is_lazy(weight) and weight.dtype not in NARROW and exotic(weight.detach()) is None:
                    by_shape[weight.shape].append(weight)
            if not is_waiting(self._module):  # else lazy modules make more weights in this call
                self._by_shape = by_shape
        alike = by_shape.get(copy.shape, [])
        if not copy.is_cpu:
            # The host would wait for the device if it looked at elements, and any activation may have the shape of a
            # weight. So only a frozen weight is taken, and only if no other one has this shape.
            alike = [weight for weight in alike if not weight.requires_grad]
            return alike[0] if len(alike) == 1 else None
        if not copy.numel():
            return None
        # Two elements are compared, the first and the last: they tell the copies of most weights apart.
        first, last = (0,) * copy.dim(), (-1,) * copy.dim()
        for i, weight in enumerate(alike):
            values = weight.detach()
            if all(bool(copy[corner] == values[corner].to(copy.dtype)) for corner in (first, last)):
                by_shape[copy.shape] = alike[i + 1 :] + alike[: i + 1]  # the next copy is likely of the next weight
                return weight
        return None


class AutocastCopy(Packed):
    """A narrow copy of a weight, which is dropped if it is proven that casting the weight again gives the same bits.

    Otherwise it stays in memory. See [Note: copies of weights].
    """

    __slots__ = ("_answer", "_checksum", "_weight", "_weight_state")

    def __init__(
        self,
        alias: torch.Tensor,
        storage: torch.UntypedStorage,
        first_layout: Layout,
        weight: nn.Parameter,
        counters: Counters,
        module_name: str,
    ) -> None:
        super().__init__(alias, storage, None, first_layout, counters, module_name)
        self._weight = weight
        self._weight_state: tuple[Any, ...] = ()  # of the weight when it was compared
        self._checksum: torch.Tensor | None = None
        self._answer: tuple[torch.Tensor, torch.Event] | None = None

    @property
    def is_source(self) -> bool:
        return False  # weights are no activations: Recompute copies those that norms need

    def _offload(self, storage: torch.UntypedStorage) -> bool:
        is_proven = self._ask_device(storage) if on_accelerator(self.alias) else self._compare(storage)
        self.is_undecided = is_proven is None
        if is_proven and self._is_same_weight():
            self.counters.count_recast(self.nbytes, self.module_name)
            return True
        if is_proven is not None:
            self.counters.count_kept("autocast weight", self.nbytes, self.module_name)
        return False

    def _compare(self, storage: torch.UntypedStorage) -> torch.Tensor | bool:
        """Whether casting the weight again gives the same bytes."""
        if not self._is_weight_there():  # FSDP freed it when its forward ended
            return False
        # The state is taken before the weight is read: a write in between makes it another state, and the copy stays.
        self._weight_state = self._state_of_weight()
        again, now = _bytes(self._cast().untyped_storage()), self.content(storage)
        if again.shape != now.shape:
            return False
        self._checksum = checksum(again)
        return (again == now).all()

    def _ask_device(self, storage: torch.UntypedStorage) -> bool | None:
        """The same for an accelerator, whose answer is read when it is there. None until then."""
        if self._answer is None:
            is_same = self._compare(storage)
            if isinstance(is_same, bool):
                return is_same
            answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(is_same, non_blocking=True)
            self._answer = answer, event_on(current_stream(is_same.device))
        answer, done = self._answer
        return bool(answer) if done.query() else None

    def _restore(self) -> torch.Tensor:
        if not self._is_weight_there():
            raise StoreError(f"a weight of {self.module_name!r} is not in memory in backward, to be cast again")
        again = self._cast()
        # On a GPU reading the checksum waits for the device, so it is read only if the weight was moved or changed.
        is_trusted = on_accelerator(self.alias) and self._is_same_weight()
        storage = again.untyped_storage()
        if not is_trusted and (storage.nbytes() != self.nbytes or bool(checksum(_bytes(storage)) != self._checksum)):
            raise MutationError(
                f"a weight was changed between the forward of {self.module_name!r} and its backward, and autocast's "
                "copy of it was dropped: call backward before the optimizer steps, or the model is converted"
            )
        return again

    def _is_same_weight(self) -> bool:
        """Whether the weight lies where it lay when it was compared, at the same version."""
        return self._state_of_weight() == self._weight_state

    def _state_of_weight(self) -> tuple[Any, ...]:
        weight = self._weight
        return weight._version, weight.dtype, weight.data_ptr(), weight.shape, weight.stride()

    def _is_weight_there(self) -> bool:
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
