"""What autograd holds for a saved tensor that goes to no store.

Tells the weights of a module, and copies of them, among the tensors that autograd saves.
"""

from __future__ import annotations

import collections
import re
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._tensors import Layout, exotic, is_waiting, storages_of
from disthooks._torch import StorageRef, current_node, is_python_node, node_name
from disthooks.errors import MutationError


def changed_message(module_name: str, now: int, then: int) -> str:
    """The sentence for a saved tensor of module ``where`` that is at version ``now`` instead of ``then``."""
    place = f"the forward of {module_name!r}" if module_name else "a saving(...) block"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"tensor saved in {place} is at version {now}; expected version {then} "
        "instead. Use the out-of-place operation there, or give it a clone()"
    )


class InPlace:
    """What autograd holds for a tensor that stays where it is, and why it stays."""

    __slots__ = ("__weakref__", "is_alias", "module_name", "reason", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, module_name: str, reason: str = "", is_alias: bool = False) -> None:
        self.tensor, self.version, self.module_name, self.reason = tensor, tensor._version, module_name, reason
        self.is_alias = is_alias  # of an activation's memory

    def check(self) -> None:
        """MutationError when the tensor was changed in place since."""
        if self.tensor._version != self.version:
            raise MutationError(changed_message(self.module_name, self.tensor._version, self.version))

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


_NARROW = (torch.bfloat16, torch.float16)  # what autocast makes; it is off while an operator saves, so not asked

# Nodes through which a view of a weight was made before it was cast: FSDP1's of its flat parameter, a transpose, ...
_VIEWS = re.compile(
    "(Alias|AsStrided|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|T|Transpose|Unbind|Unsqueeze|"
    "UnsafeView|View)Backward[0-9]"
)


class CastFrom(NamedTuple):
    """A tensor was cast from a weight: from ``itself``, or, where that is None, from a view or a copy of one."""

    itself: nn.Parameter | None


def is_constant(tensor: torch.Tensor) -> bool:
    """No gradient flows to it: a batch, a mask, a buffer, a detached weight."""
    return not tensor.requires_grad


class ModuleWeights:
    """The weights and buffers of the module whose forward it is, looked up when a tensor is in doubt.

    Args:
        module: None for code that belongs to no module.
    """

    __slots__ = ("_alike", "_module", "_owned", "_replica", "_roots")

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._owned: dict[int, tuple[str, StorageRef]] | None = None
        self._alike: dict[torch.Size, list[nn.Parameter]] | None = None
        # A replica's weights are no Parameters and have a history; those of any other module are told by type.
        self._replica = module is not None and getattr(module, "_is_replica", False)
        self._roots: list[tuple[Any, int]] | None = None

    def kind_of(self, tensor: torch.Tensor) -> str | None:
        """ "parameter" or "buffer" when the memory of a plain tensor, not a Parameter, is the module's."""
        if self._module is None or not (self._replica or is_constant(tensor)):
            return None
        owned = self._owned
        if owned is None:
            owned = storages_of(self._module)
            if not is_waiting(self._module):  # otherwise more of them come in this call, when lazy modules materialise
                self._owned = owned
        found = owned.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0]

    def cast_from(self, tensor: torch.Tensor) -> CastFrom | None:
        """From which weight ``tensor``, or what it is a view of, was cast to a narrower dtype, as autocast does it."""
        if tensor.dtype not in _NARROW:
            return None
        owner: Any = tensor._base if tensor._is_view() else tensor
        if is_constant(owner):
            if type(tensor) is not torch.Tensor:
                return None  # looking at a DTensor would be a collective
            weight = self._weight_like(owner)
            return None if weight is None else CastFrom(weight)
        node = owner.grad_fn
        if node is None or node_name(node) != "ToCopyBackward0":
            return None
        node, output = node.next_functions[0]
        if self._replica and (node, output) in self._roots_of_copies():
            return CastFrom(None)
        direct = True
        while node is not None and _VIEWS.fullmatch(node_name(node)):
            node, direct = node.next_functions[0][0], False
        weight = node.variable if node is not None and node_name(node) == "torch::autograd::AccumulateGrad" else None
        if not isinstance(weight, nn.Parameter):
            return None
        return CastFrom(weight if direct else None)

    def _weight_like(self, copy: torch.Tensor) -> nn.Parameter | None:
        """A weight that ``copy``, which has no history, looks like; its bits will have to tell.

        Copies of frozen weights have none, nor has anything that was made inside a compiled graph.
        """
        if self._module is None:
            return None
        by_shape = self._by_shape(self._module)
        alike = by_shape.get(copy.shape, [])
        if not copy.is_cpu:  # looking at elements would wait for the device, and any activation may have that shape
            alike = [weight for weight in alike if not weight.requires_grad]
            return alike[0] if len(alike) == 1 else None
        for i, weight in enumerate(alike):
            if _same_corners(copy, weight.detach()):
                by_shape[copy.shape] = alike[i + 1 :] + alike[: i + 1]  # the next one is wanted next
                return weight
        return None

    def _by_shape(self, module: nn.Module) -> dict[torch.Size, list[nn.Parameter]]:
        """The weights of which autocast makes copies."""
        if self._alike is not None:
            return self._alike
        found: dict[torch.Size, list[nn.Parameter]] = collections.defaultdict(list)
        for weight in module.parameters():
            if not nn.parameter.is_lazy(weight) and weight.dtype not in _NARROW and exotic(weight.detach()) is None:
                found[weight.shape].append(weight)
        if not is_waiting(module):
            self._alike = found
        return found

    def _roots_of_copies(self) -> list[tuple[Any, int]]:
        if self._roots is None:
            parts = [] if self._module is None else self._module.modules()
            copies = [copy for part in parts for copy in getattr(part, "_former_parameters", {}).values()]
            self._roots = [(copy.grad_fn, copy.output_nr) for copy in copies]
        return self._roots


def _same_corners(copy: torch.Tensor, weight: torch.Tensor) -> bool:
    return copy.numel() > 0 and all(
        bool(copy[corner] == weight[corner].to(copy.dtype)) for corner in ((0,) * copy.dim(), (-1,) * copy.dim())
    )
