"""Eight or four bits an element, and a scale for each block."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch.nn.functional import pad

from disthooks.errors import UsageError
from disthooks.saved.codecs.base import Codec, flat

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Spec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    piece: int  # elements that were encoded at once


@dataclass(frozen=True)
class Quantize(Codec):
    """Store floating-point tensors in 8 or 4 bits an element, with a scale for each block of elements. Lossy.

    Elements x of a block, in the order of memory, become integers q = round(x / s) with s = max |x| / m, where m is 127
    or 7, and come back as q s. With ``stochastic``, q = floor(x / s + u) with u uniform in [0, 1): q is the integer
    below with probability one minus the fraction of x / s, else the one above, so E[q] = x / s and E[q s] = x. A
    gradient that is linear in what was saved (that of a linear layer's weight, say) is then right on average.

    Bound, for each element: |q s - x| < s = max |x| / m with ``stochastic``, at most s / 2 without. Both up to the
    rounding of float32 (of float64 for such a tensor) and of the tensor's own dtype; s is not below the smallest
    normal number. u has 15 bits, so the mean is off by at most s / 2**15. Zeros stay zeros.

    Sources: blocks and absmax scales, "8-bit Optimizers via Block-wise Quantization", Dettmers et al. 2022,
    arXiv:2110.02861; unbiased rounding of saved activations and what it means for gradients, "ActNN", Chen et al. 2021,
    arXiv:2104.14129, section 3.

    Two elements of 4 bits share a byte. The scales are float32 (float64 for a float64 tensor, whose range is larger);
    tensors of half precision are computed with in float32. Left as they are: tensors of another dtype (indices, masks,
    complex numbers, 8-bit floats), those that would not get smaller, and those that have an inf or a nan in them,
    which then come back exactly. To know of those, the host waits for a GPU once for each tensor.

    The random numbers are the codec's own, from one generator for each process and device: torch's global ones are
    not advanced, so dropout masks are what they are without the codec. It is seeded at its first use from
    ``torch.initial_seed()`` and the environment's ``RANK``: a run that calls ``torch.manual_seed`` before its first
    forward is repeated by calling it again in a new process, as long as one thread at a time saves tensors on a device.

    Args:
        bits: 8 or 4.
        block: elements that share a scale, an even number from 2; more are smaller, fewer more precise.
        stochastic: round at random and right on average; otherwise to the nearest.

    Raises:
        UsageError: when ``bits`` or ``block`` is something else.

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
        """Codes (1-D; int8, or uint8 with two of them each) and scales (1-D), or the tensor itself."""
        # Piece by piece, so that what is computed on the way is small, and in a CPU's cache.
        piece = max((2**20 if tensor.is_cpu else 2**24) // self.block, 1) * self.block
        spec = _Spec(tensor.shape, tensor.dtype, piece)
        if tensor.dtype not in _FLOATS or self._encoded_bytes(tensor) >= tensor.nbytes:
            return (tensor,), spec
        pieces = torch.split(flat(tensor), piece)
        scales = self._scales(pieces)
        if scales is None:
            return (tensor,), spec
        rows = torch.split(scales, piece // self.block)
        return (torch.cat([self._codes(*both) for both in zip(pieces, rows, strict=True)]), scales), spec

    def _codes(self, elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        codes = self._in_blocks(elements) / scales[:, None]  # in the dtype of the scales, which is the wider one
        if self.stochastic:
            codes.add_(_noise(codes), alpha=2.0**-16)  # round(x / s + u - 1/2) is floor(x / s + u)
        # x / s may be a little over m by rounding.
        codes = codes.round_().clamp_(-self._most, self._most).to(torch.int8).view(-1)[: elements.numel()]
        return codes if self.bits == 8 else _pair(codes)

    @property
    def _most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _in_blocks(self, elements: torch.Tensor) -> torch.Tensor:
        missing = -elements.numel() % self.block
        return (pad(elements, (0, missing)) if missing else elements).view(-1, self.block)

    def _encoded_bytes(self, tensor: torch.Tensor) -> int:
        n = tensor.numel()
        return (n * self.bits + 7) // 8 + -(-n // self.block) * _wide(tensor.dtype).itemsize

    def _scales(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """One for each block of ``pieces``; None when something in them is not finite."""
        wide = _wide(pieces[0].dtype)
        largest = torch.cat([self._in_blocks(elements).abs().amax(1).to(wide) for elements in pieces])
        if not largest.isfinite().all():
            return None
        limits = torch.finfo(wide)
        # Rounded up, s m may be over the largest number there is; and a scale of zero, or one that a device takes for
        # zero, would divide 0 by 0.
        return (largest.clamp_(max=limits.max * (1 - 8 * limits.eps)) / self._most).clamp_(min=limits.tiny)

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: _Spec) -> torch.Tensor:
        """The tensor in the shape and dtype it had."""
        if len(tensors) == 1:
            return tensors[0]
        codes, scales = tensors
        decoded = torch.empty(spec.shape, dtype=spec.dtype, device=scales.device)
        pieces = torch.split(decoded.view(-1), spec.piece)
        encoded = torch.split(codes, spec.piece * self.bits // 8), torch.split(scales, spec.piece // self.block)
        for into, some, rows in zip(pieces, *encoded, strict=True):
            some = some if self.bits == 8 else _unpair(some, into.numel())
            blocks = self._in_blocks(some).to(scales.dtype).mul_(rows[:, None])
            into.copy_(blocks.view(-1)[: into.numel()])
        return decoded


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _pair(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of 4 bits a byte: one of the first half beside one of the second, which is faster than neighbours."""
    half = (codes.numel() + 1) // 2
    nibbles = (codes + 8).view(torch.uint8)
    bytes_ = nibbles[:half].clone()
    bytes_[: codes.numel() - half].add_(nibbles[half:], alpha=16)
    return bytes_


def _unpair(bytes_: torch.Tensor, n: int) -> torch.Tensor:
    nibbles = torch.cat((bytes_ & 15, bytes_ >> 4))[:n]
    return nibbles.view(torch.int8).sub_(8)


_generators: dict[tuple[int, torch.device], torch.Generator] = {}
_making = threading.Lock()


def _noise(like: torch.Tensor) -> torch.Tensor:
    """Odd random int16 of the shape of ``like``: over 2**16, evenly between -1/2 and 1/2, and never either of them.

    So an integer stays what it is, 0 among them. Four of them come from each number that is drawn: on a CPU drawing
    is what takes the time.
    """
    words = torch.empty((like.numel() + 3) // 4, dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=_generator(like.device)).bitwise_or_(0x0001_0001_0001_0001)
    return words.view(torch.int16)[: like.numel()].view(like.shape)


def _generator(device: torch.device) -> torch.Generator:
    """This process's own for ``device``; torch locks a generator while it draws, so threads may share it."""
    key = os.getpid(), device  # a forked child draws its own
    generator = _generators.get(key)
    if generator is None:
        with _making:
            generator = _generators.get(key) or torch.Generator(device).manual_seed(_seed(device))
            _generators[key] = generator
    return generator


def _seed(device: torch.device) -> int:
    # Hashed, so that the numbers are not those that torch's own generators draw from the same seed.
    known = f"{torch.initial_seed()} {os.environ.get('RANK', 0)} {device}"
    return int.from_bytes(hashlib.blake2b(known.encode(), digest_size=8).digest(), "little")
