"""``Cast``: a narrower dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._registry import register
from disthooks.errors import UsageError
from disthooks.saved.codecs import blocks
from disthooks.saved.codecs.base import Codec, flat
from disthooks.saved.codecs.blocks import Codes, limited, scaled, unscaled, wide

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK = 128  # elements that share a scale
_CODES = {
    torch.float8_e4m3fn: Codes(448.0, 416.0, math.nan),
    torch.float8_e5m2: Codes(57344.0, 49152.0, math.nan),
}


@register("codec")
@dataclass(frozen=True)
class Cast(Codec):
    """Store floating-point tensors in a narrower dtype. Lossy: it changes gradients by its rounding.

    ``Cast`` leaves a tensor as it is if it is not floating point (indices, masks, complex numbers), or not wider than
    ``dtype``.

    The two dtypes of 8 bits have a small range. So each block of 128 elements, in the order of memory, is divided by a
    scale first, ``max |x| / finfo(dtype).max`` ("FP8 Formats for Deep Learning", Micikevicius et al. 2022,
    arXiv:2209.05433, section 4; for blocks: "DeepSeek-V3 Technical Report" 2024, arXiv:2412.19437, section 3.3), in
    float32 (float64 for a float64 tensor). The largest element comes back to within the rounding of the scale, and
    zeros come back as zeros. A tensor that would not get smaller is left as it is.

    If a block has an inf or a nan, these come back as they are: infs with their sign, each nan as the same nan. Then
    only the finite elements count, which are scaled to the next lower number of the dtype, 416 or 49152, and the
    largest number of the dtype stands for inf. The scale of such a block has a minus sign.

    Args:
        dtype: ``torch.bfloat16`` (keeps the range, 8 bits of precision), ``torch.float16`` (11 bits, overflows
            beyond 65504), ``torch.float32``, ``torch.float8_e4m3fn`` (4 bits; from 1/28672 of the block's largest
            element down, fewer) or ``torch.float8_e5m2`` (3 bits; from 1 part in 9e8 down, fewer).

    Raises:
        UsageError: if ``dtype`` is another one.

    >>> tensors, spec = Cast(torch.bfloat16).encode(torch.tensor([1.0, 2.5]))
    >>> tensors[0].dtype, Cast(torch.bfloat16).decode(tensors, spec)
    (torch.bfloat16, tensor([1.0000, 2.5000]))
    >>> tensors, spec = Cast(torch.float8_e4m3fn).encode(torch.tensor([1000.0, 10.0, 0.0]))
    >>> [t.dtype for t in tensors], Cast(torch.float8_e4m3fn).decode(tensors, spec)
    ([torch.float8_e4m3fn, torch.float32], tensor([1000.0000,   10.0446,    0.0000]))
    """

    lossy: ClassVar[bool] = True

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _PLAIN + _SCALED:
            raise UsageError(
                "Cast: dtype must be torch.bfloat16, float16, float32, float8_e4m3fn or float8_e5m2, "
                f"got {self.dtype!r}"
            )

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Size, torch.dtype]]:
        """The tensor in the narrower dtype (1-D, with its scales, if it has scales), and its shape and dtype."""
        spec = tensor.shape, tensor.dtype
        if not (tensor.is_floating_point() and tensor.element_size() > self.dtype.itemsize and tensor.numel()):
            return (tensor,), spec
        if self.dtype in _PLAIN:
            return (tensor.to(self.dtype),), spec
        # A dtype of 8 bits: one byte for each element, and a scale for each block.
        scale_bytes = -(-tensor.numel() // _BLOCK) * wide(tensor.dtype).itemsize
        if tensor.numel() + scale_bytes >= tensor.nbytes:
            return (tensor,), spec
        elements, codes = flat(tensor), _CODES[self.dtype]
        pieces = torch.split(elements, blocks.piece_size(elements, _BLOCK))
        parts = [scaled(piece, _BLOCK, codes) for piece in pieces]
        numbers = [limited(it, codes).to(self.dtype).view(-1) for it in parts]
        # They are joined as bytes, because not every device has a kernel that joins 8-bit floats.
        joined = torch.cat([some.view(torch.uint8) for some in numbers])[: elements.numel()]
        return (joined.view(self.dtype), torch.cat([it.scales for it in parts])), spec

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        shape, dtype = spec
        if len(tensors) == 1:
            return tensors[0].to(dtype)
        numbers, scales = tensors
        decoded = torch.empty(shape, dtype=dtype, device=scales.device)
        into = decoded.view(-1)
        piece = blocks.piece_size(into, _BLOCK)
        encoded = torch.split(numbers, piece), torch.split(scales, piece // _BLOCK)
        for part, some, rows in zip(torch.split(into, piece), *encoded, strict=True):
            # The product is written in place if the codes were copied into the result.
            values = part.copy_(some) if dtype is scales.dtype else some.to(scales.dtype)
            found = unscaled(values, rows, _BLOCK, _CODES[self.dtype])
            if found.data_ptr() != part.data_ptr():
                part.copy_(found)
        return decoded
