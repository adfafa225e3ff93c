"""``Compact``: one bit for a bool, and a bitmap for a tensor that is mostly zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disthooks._registry import register
from disthooks.errors import UsageError
from disthooks.saved.codecs.base import Codec, flat

#: A tensor is left as it is if its encoded bytes are more than this share of its bytes. Encoding and decoding take the
#: same time with few zeros as with many (0.5 and 0.7 GB/s on one core, benchmarks/codecs.py), and save less memory.
_WORTH = 0.75
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@register("codec")
@dataclass(frozen=True)
class Compact(Codec):
    """Store eight bools in a byte, and floating-point tensors with many zeros without their zeros. Lossless.

    A bool tensor of n elements becomes ceil(n / 8) bytes, and each byte that is true comes back as 1. A floating-point
    tensor becomes a bitmap of its elements that are not zero, ceil(n / 8) bytes, and these elements, if both together
    are at most three quarters of its bytes: the output of a ReLU becomes about half. An element is zero if none of its
    bits is set, so -0.0, infs and every nan come back with the same bits. ``Compact`` leaves every other tensor
    (integers, complex numbers) as it is.

    The size of the result depends on the count of zeros, and on a GPU the host has to wait for that count. By default
    it does not wait: floating-point tensors on a GPU are left as they are.

    Args:
        floats: whether to compact floating-point tensors. True: always; on a GPU the host waits once for each tensor.
            False: never. None: only on the CPU, where the host does not have to wait.

    Raises:
        UsageError: if ``floats`` is something else.

    >>> tensors, spec = Compact().encode(torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0, -0.0, 0.0, 0.0]))
    >>> tensors
    (tensor([40], dtype=torch.uint8), tensor([5., -0.]))
    >>> Compact().decode(tensors, spec)
    tensor([0., 0., 0., 5., 0., -0., 0., 0.])
    """

    floats: bool | None = None

    def __post_init__(self) -> None:
        if self.floats is not None and type(self.floats) is not bool:
            raise UsageError(f"Compact: floats must be True, False or None, got {self.floats!r}")

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Size | None]:
        """A bitmap (1-D, uint8), for floats also the elements that are not zero (1-D), and the shape; or the tensor."""
        if tensor.dtype is torch.bool and tensor.numel() > 1:
            return (_packed(flat(tensor)),), tensor.shape
        is_wanted = tensor.is_cpu if self.floats is None else self.floats
        if not (is_wanted and tensor.is_floating_point() and tensor.numel()):
            return (tensor,), None
        elements = flat(tensor).view(_BITS[tensor.element_size()])  # integers, so that -0.0 is not zero
        count = int(elements.count_nonzero())
        if (elements.numel() + 7) // 8 + count * tensor.element_size() > _WORTH * tensor.nbytes:
            return (tensor,), None
        there = elements != 0
        # On a GPU, indexing with a mask would make the host wait for the count again.
        values = elements[torch.nonzero_static(there, size=count)[:, 0]] if elements.is_cuda else elements[there]
        return (_packed(there), values.view(tensor.dtype)), tensor.shape

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: torch.Size | None) -> torch.Tensor:
        if spec is None:
            return tensors[0]
        packed, count, run = tensors[0], spec.numel(), tensors[0].numel()
        # The reverse of `_packed`: bit k of byte i is the element k run + i.
        units = torch.empty(8 * run, dtype=torch.uint8, device=packed.device)
        for k in range(8):
            torch.bitwise_and(packed >> k, 1, out=units[k * run : (k + 1) * run])
        there = units[:count].view(torch.bool)
        if len(tensors) == 1:
            return there.view(spec)
        values = tensors[1].view(_BITS[tensors[1].element_size()])
        elements = torch.zeros(count, dtype=values.dtype, device=values.device)
        return elements.masked_scatter_(there, values).view(tensors[1].dtype).view(spec)


def _packed(bools: torch.Tensor) -> torch.Tensor:
    """1-D ``bools`` in ``run`` bytes, at least an eighth of their count.

    Byte i has the elements i, i + run, i + 2 run, ..., so that one operation packs a whole run of elements.
    """
    run = (bools.numel() + 7) // 8
    units = bools.view(torch.uint8).clamp(max=1)  # a mask may have been made of bytes of 255
    packed = units[:run].clone()
    for k in range(1, 8):
        part = units[k * run : (k + 1) * run]  # the last runs may be short, or empty
        packed[: part.numel()].add_(part, alpha=1 << k)
    return packed
