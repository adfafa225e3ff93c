"""``Quantize``: eight or four bits for each element, and a scale for each block of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from disthooks import _hashing
from disthooks._registry import register
from disthooks.errors import UsageError
from disthooks.saved.codecs import blocks
from disthooks.saved.codecs.base import Codec, flat
from disthooks.saved.codecs.blocks import Codes, limited, scaled, unscaled, wide

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CODES = {8: Codes(127.0, 126.0, -128.0), 4: Codes(7.0, 6.0, -8.0)}


class _Spec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


@register("codec")
@dataclass(frozen=True)
class Quantize(Codec):
    """Store floating-point tensors in 8 or 4 bits an element, with a scale for each block of elements. Lossy.

    Elements x of a block, in the order of memory, become integers ``q = round(x / s)``, ``s = max |x| / m``: m is 127
    or 7, and come back as q s. With ``stochastic``, q = floor(x / s + u) with u uniform in [0, 1): q is the integer
    below with probability one minus the fraction of x / s, else the one above, so E[q] = x / s and E[q s] = x. A
    gradient that is linear in what was saved (that of a linear layer's weight, say) is then right on average.

    Bound, for each element: ``|q s - x| < s`` with ``stochastic``, and at most ``s / 2`` without it. Both up to the
    rounding of float32 (of float64 for such a tensor) and of the tensor's own dtype; s is not below the smallest
    normal number. u has 15 bits, so the mean is off by at most s / 2**15. Zeros stay zeros.

    Sources: blocks and absmax scales, "8-bit Optimizers via Block-wise Quantization", Dettmers et al. 2022,
    arXiv:2110.02861; unbiased rounding of saved activations and what it means for gradients, "ActNN", Chen et al. 2021,
    arXiv:2104.14129, section 3.

    Two neighbours of 4 bits share a byte. The scales are float32 (float64 for a float64 tensor, whose range is larger).
    Tensors of half precision are computed in float32. ``Quantize`` leaves a tensor as it is if it has another dtype
    (indices, masks, complex numbers, 8-bit floats), or if it would not get smaller.

    If a block has an inf or a nan, these come back as they are: infs with their sign, each nan as the same nan. Then m
    is 126 or 6, and only the finite elements count. The scale of such a block has a minus sign; the code 127 or 7
    stands for inf, and -128 or -8 for nan.

    The codec has random numbers of its own: a hash of the element's index and of a key. Each tensor has a new key, made
    from a seed and from a count for each process and device. The global generators of torch do not advance, so
    dropout masks are the same as without the codec. The seed comes from ``torch.initial_seed()`` and the ``RANK`` of
    the environment at the first use. So a new process repeats a run that calls ``torch.manual_seed`` before its first
    forward, as long as one thread at a time saves tensors on a device.

    Args:
        bits: 8 or 4.
        block: how many elements share a scale, an even number from 2. Larger blocks take less memory, smaller blocks
            are more precise.
        stochastic: whether to round at random, so that the result is right on average, or to the nearest.

    Raises:
        UsageError: if ``bits`` or ``block`` is another number.

    >>> codec = Quantize(bits=8, stochastic=False)
    >>> x = torch.linspace(-1, 1, 1000)
    >>> tensors, spec = codec.encode(x)
    >>> x.nbytes, sum(t.nbytes for t in tensors)
    (4000, 1032)
    >>> bool((codec.decode(tensors, spec) - x).abs().max() <= 1 / 127 / 2)
    True
    """

    lossy: ClassVar[bool] = True

    bits: int = 8
    block: int = 128
    stochastic: bool = True

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (8, 4):
            raise UsageError(f"Quantize: bits must be 8 or 4, got {self.bits!r}")
        if type(self.block) is not int or self.block < 2 or self.block % 2:
            raise UsageError(f"Quantize: block must be an even number of elements from 2, got {self.block!r}")

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], _Spec]:
        """Codes (1-D; int8, or uint8 with two codes in each) and scales (1-D); or the tensor itself."""
        spec, n = _Spec(tensor.shape, tensor.dtype), tensor.numel()
        if tensor.dtype not in _FLOATS:
            return (tensor,), spec
        scale_bytes = -(-n // self.block) * wide(tensor.dtype).itemsize
        if (n * self.bits + 7) // 8 + scale_bytes >= tensor.nbytes:
            return (tensor,), spec
        elements = flat(tensor)
        key = _hashing.draw_key(elements.device) if self.stochastic else None
        size = blocks.piece_size(elements, self.block)
        parts = [self._encode_piece(piece, key, i * size) for i, piece in enumerate(torch.split(elements, size))]
        codes, scales = map(torch.cat, zip(*parts, strict=True))
        return (codes, scales), spec

    def _encode_piece(
        self, elements: torch.Tensor, key: tuple[int, int] | None, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of ``elements``."""
        codes, n = _CODES[self.bits], elements.numel()
        it = scaled(elements, self.block, codes)
        if key:
            random = _hashing.rounding_noise(it.values.numel(), key, first, elements.device)
            it.values.add_(random.view_as(it.values), alpha=2.0**-16)  # round(x / s + u - 1/2) is floor(x / s + u)
        it.values.round_()
        found = limited(it, codes).to(torch.int8).view(-1)[:n]
        if self.bits == 8:
            return found, it.scales
        # Each code plus 8 is in 0 ... 15. Two neighbours share a byte; the first one has the lower half.
        nibbles = found.add_(8)
        if n % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1), value=8)
        pairs = nibbles.view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8), it.scales

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: _Spec) -> torch.Tensor:
        if len(tensors) == 1:
            return tensors[0]
        codes, scales = tensors
        decoded = torch.empty(spec.shape, dtype=spec.dtype, device=scales.device)
        into = decoded.view(-1)
        size = blocks.piece_size(into, self.block)
        encoded = torch.split(codes, size * self.bits // 8), torch.split(scales, size // self.block)
        for part, values, rows in zip(torch.split(into, size), *encoded, strict=True):
            if self.bits == 4:  # the two codes of each byte, minus 8
                pairs = values.to(torch.int16)
                nibbles = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.int8)
                values = nibbles.sub_(8)[: part.numel()]
            part.copy_(unscaled(values, rows, self.block, _CODES[self.bits]))
        return decoded
