"""Bits for bools, and a bitmap for what is mostly zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disthooks._registry import register
from disthooks.errors import UsageError
from disthooks.saved.codecs import blocks
from disthooks.saved.codecs.base import Codec, flat

#: Encoded bytes over bytes, above which a tensor is left as it is. Packing and unpacking take as long with few zeros as
#: with many (0.5 and 0.7 GB/s on one core, benchmarks/codecs.py), and gain less.
_WORTH = 0.75
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@register("codec")
@dataclass(frozen=True)
class Compact(Codec):
    """Pack what holds little: eight bools to a byte, and floating-point tensors with many zeros. Lossless.

    A bool tensor of n elements becomes ceil(n / 8) bytes, and any byte that is true comes back as 1. A floating-point
    one becomes a bitmap of the elements that are not zero, ceil(n / 8) bytes, and those elements, when that is at most
    three quarters of its bytes: the output of a ReLU becomes about half. Zero is what has no bit set: -0.0, infs and
    every nan come back as the bits they were. Everything else (integers, complex numbers) is left as it is.

    How many elements are not zero, and so how large the result is, a GPU's host could only wait for. By default it does
    not: there floating-point tensors are left as they are, and bools are packed in one Triton kernel (in some torch
    operations, without Triton), to at most 15 bytes more.

    Args:
        floats: whether to compact floating-point tensors: True also where the host has to wait for the device, once
            for each tensor; False nowhere; None where nobody waits, which is on the CPU.

    Raises:
        UsageError: when ``floats`` is something else.

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
        """A bitmap (1-D, uint8), for floats also what is not zero (1-D), and the shape; or the tensor and None."""
        parts: tuple[torch.Tensor, ...] | None = None
        if tensor.dtype is torch.bool and tensor.numel() > 1:
            parts = (_packed(flat(tensor)),)
        elif tensor.is_floating_point() and tensor.numel() and self._takes(tensor):
            parts = _sparse(tensor)
        return (parts, tensor.shape) if parts else ((tensor,), None)

    def _takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu if self.floats is None else self.floats

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: torch.Size | None) -> torch.Tensor:
        """The tensor, bit for bit."""
        if spec is None:
            return tensors[0]
        there = _unpacked(tensors[0], spec.numel())
        if len(tensors) == 1:
            return there.view(spec)
        values = tensors[1].view(_BITS[tensors[1].element_size()])
        elements = torch.zeros(spec.numel(), dtype=values.dtype, device=values.device)
        return elements.masked_scatter_(there, values).view(tensors[1].dtype).view(spec)


def _sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """A bitmap and the elements that are not zero, if that is little enough."""
    elements = flat(tensor).view(_BITS[tensor.element_size()])  # as integers: then -0.0 is not zero
    count = int(elements.count_nonzero())
    if (elements.numel() + 7) // 8 + count * tensor.element_size() > _WORTH * tensor.nbytes:
        return None
    there = elements != 0
    # Indexing with a mask would ask a GPU for the count again.
    values = elements[torch.nonzero_static(there, size=count)[:, 0]] if elements.is_cuda else elements[there]
    return _packed(there), values.view(tensor.dtype)


def _packed(bools: torch.Tensor) -> torch.Tensor:
    """1-D bools as m >= n / 8 bytes; byte i has elements i, i + m, i + 2 m, ...: whole runs at once."""
    n, units = blocks.run_of(bools), bools.view(torch.uint8)
    if blocks.packs(units, n):
        return blocks.pack(units, n)
    units = units.clamp(max=1)  # a mask that was bytes of 255 is as true
    packed = units[:n].clone()
    for k in range(1, 8):
        part = units[k * n : (k + 1) * n]  # the last ones may be short, or empty
        packed[: part.numel()].add_(part, alpha=1 << k)
    return packed


def _unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    n = packed.numel()
    if blocks.unpacks(packed, count):
        return blocks.unpack(packed, count).view(torch.bool)
    units = torch.empty(8 * n, dtype=torch.uint8, device=packed.device)
    for k in range(8):
        torch.bitwise_and(packed >> k, 1, out=units[k * n : (k + 1) * n])
    return units[:count].view(torch.bool)
