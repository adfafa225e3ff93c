"""Tells which saved tensors are weights of a module, or copies of weights that autocast made."""

# [Note: copies of weights]
# Under autocast a layer saves a narrow copy of its weight. If a store took it, its bytes would be spent for nothing,
# because the weight is in memory anyway. So the copy is dropped, and the weight is cast again when backward needs it.
# That is right only if the cast gives the same bits. It does not give them for another memory format, for a copy that
# was rounded in place, or if autocast's cache is older than the weight. So the weight is cast once more while the copy
# is there, and all bytes are compared (decision 11). In backward the new copy must have the same checksum, because a
# weight can be written without a count, or be moved (decision 27). On a device the host waits for the first answer of
# each weight, and later casts of it are not compared (decision 136). It does not wait for a copy without a history, nor
# while a CUDA graph is captured: the copy stays `undecided`, and a later operator asks again.

from __future__ import annotations

import collections
import re
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from disthooks._hashing import Checksums
from disthooks._streams import current_stream, event_on, is_capturing, on_accelerator
from disthooks._tensors import exotic, is_plain, is_waiting, storages_of, words_of
from disthooks._torch import StorageRef, node_name
from disthooks.errors import MutationError, StoreError
from disthooks.saved.counters import ModuleCounts
from disthooks.saved.packed import Packed, Place, SavedTensor

# Nodes through which a view of a weight was made before it was cast: FSDP1's of its flat parameter, a transpose, ...
_VIEWS = re.compile(
    "(Alias|AsStrided|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|T|Transpose|Unbind|Unsqueeze|"
    "UnsafeView|View)Backward[0-9]"
)

#: A number that changes with any bit of a tensor, and with the order of its words.
checksum = Checksums()

#: The dtypes that autocast casts to. Autocast is off while an operator saves tensors, so it cannot be asked.
NARROW = (torch.bfloat16, torch.float16)


class CastFrom(NamedTuple):
    """A tensor was cast from ``weight``; if that is None, from a view or a copy of a weight."""

    weight: nn.Parameter | None


class ModuleWeights:
    """The weights and buffers of the module whose forward runs. They are looked up when a tensor is in doubt."""

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
            if not is_plain(tensor):
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


class _CastProof:
    """What was proven of the cast of one weight.

    Attributes:
        kind: the layouts and dtypes of the weight and of its copy.
        copy: the memory of the last copy, held weakly.
        has_stayed: whether the last backward found the weight where forward had it, unchanged.
    """

    __slots__ = ("copy", "has_stayed", "kind")

    def __init__(self, kind: tuple[Any, ...], copy: StorageRef) -> None:
        self.kind, self.copy = kind, copy
        self.has_stayed = False


_proofs: Any = WeakIdKeyDictionary()  # by weight


class AutocastCopy(Packed):
    """A narrow copy of a weight, which is dropped if it is proven that casting the weight again gives the same bits.

    Otherwise it stays in memory. See [Note: copies of weights].
    """

    __slots__ = ("_answer", "_checksum", "_weight", "_weight_state")

    def __init__(self, saved: SavedTensor, weight: nn.Parameter, counts: ModuleCounts) -> None:
        Packed.__init__(self, saved, StorageRef(saved.storage), counts)
        self._weight = weight
        self._weight_state: tuple[Any, ...] = ()  # of the weight when it was compared
        self._checksum: torch.Tensor | None = None
        self._answer: tuple[torch.Tensor, torch.Event] | None = None

    @property
    def is_source(self) -> bool:
        return False  # weights are no activations: Recompute copies those that norms need

    def _offload(self, storage: torch.UntypedStorage) -> Place:
        if not on_accelerator(self.alias):
            is_proven: torch.Tensor | bool | None = self._compare(storage)
        else:
            is_proven = self._is_as_proven(storage) or self._ask_device(storage)
        if is_proven is None:
            return "undecided"
        if is_proven and self._is_same_weight():
            self.counts.recast += self.nbytes
            return "offloaded"
        self.counts.count_kept("autocast weight", self.nbytes)
        return "in memory"

    def _compare(self, storage: torch.UntypedStorage) -> torch.Tensor | bool:
        """Whether casting the weight again gives the same bytes."""
        if not self._is_weight_there():  # FSDP freed it when its forward ended
            return False
        # The state is taken before the weight is read: a write in between makes it another state, and the copy stays.
        self._weight_state = self._state_of_weight()
        again = self._cast().untyped_storage()
        if again.nbytes() != storage.nbytes():
            return False
        one, two = words_of(again, again.nbytes()), words_of(storage, storage.nbytes())
        self._checksum = checksum(one)
        return torch.equal(one, two) if one.is_cpu else (one == two).all()

    def _ask_device(self, storage: torch.UntypedStorage) -> bool | None:
        """The same for an accelerator; None if it has not answered. The first answer for a weight is awaited."""
        if self._answer is None:
            is_same = self._compare(storage)
            if isinstance(is_same, bool):
                return is_same
            answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(is_same, non_blocking=True)
            self._answer = answer, event_on(current_stream(is_same.device))
        answer, done = self._answer
        if self._weight not in _proofs and self.nature == "result" and not is_capturing(self.alias.device):
            done.synchronize()
        if not done.query():
            return None
        if answer and self.nature == "result":
            _proofs[self._weight] = _CastProof(self._kind(), StorageRef(storage))
        return bool(answer)

    def _is_as_proven(self, storage: torch.UntypedStorage) -> bool:
        """Whether a cast of this weight was proven before, and the graph shows that this is a new one."""
        proof = _proofs.get(self._weight)
        if proof is None or self.nature != "result" or self.alias._version or self._answer is not None:
            return False
        was_there = proof.copy.address == storage._cdata and proof.copy.get() is not None
        if was_there or self._kind() != proof.kind or not self._is_weight_there():
            return False
        self._weight_state, proof.copy = self._state_of_weight(), StorageRef(storage)
        if not proof.has_stayed:
            self._checksum = checksum(words_of(storage, storage.nbytes()))
        return True

    def _kind(self) -> tuple[Any, ...]:
        """Everything that selects the kernel of the cast and the layout of its result."""
        weight = self._weight
        return weight.dtype, weight.shape, weight.stride(), self.first_layout, self.nbytes, self.alias.device

    def _restore(self, is_as_packed: bool = False) -> torch.Tensor:
        if not self._is_weight_there():
            raise StoreError(f"a weight of {self.module_name!r} is not in memory in backward, to be cast again")
        again = self._cast()
        # On a GPU reading the checksum waits for the device, so it is read only if the weight was moved or changed.
        is_trusted = on_accelerator(self.alias) and self._is_same_weight()
        proof = _proofs.get(self._weight)
        if proof is not None:
            proof.has_stayed = is_trusted
        if not is_trusted and not self._has_checksum(again.untyped_storage()):
            raise MutationError(
                f"a weight was changed between the forward of {self.module_name!r} and its backward, and autocast's "
                "copy of it was dropped: call backward before the optimizer steps, or the model is converted"
            )
        return again

    def _has_checksum(self, storage: torch.UntypedStorage) -> bool:
        """Whether the bytes of ``storage`` are those that were dropped. If there is no checksum, nobody knows."""
        if self._checksum is None or storage.nbytes() != self.nbytes:
            return False
        return bool(checksum(words_of(storage, self.nbytes)) == self._checksum)

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
