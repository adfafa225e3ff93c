"""Blocks of elements that share a scale, by torch operations or by the Triton kernels in ``kernels.py``.

A block of elements x has the scale s = max |x| / m, where m is the largest code. Its codes are x / s, rounded as the
codec says. The kernels run on a CUDA or ROCm device with Triton, which comes with torch there; everywhere else torch
operations give the same bits. The first use of a kernel compiles it, for about a second; nothing is tuned at run time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from disthooks._hashing import MULTIPLIERS, ODD
from disthooks._tensors import bitless

# [Note: blocks that are not finite]
# The host would have to wait for the device to learn whether a block is finite. So the scale says it: if a block has an
# inf or a nan, its scale has a minus sign, its largest finite element has the next lower code instead of m, and the
# code m stands for inf. Decoding takes the absolute value of the scale. Such a block has two codes less for its finite
# elements, and other blocks lose nothing. Codes for nan, inf and -inf in every block would take 2 of the 15 levels of 4
# bits (decision 31).


class Codes(NamedTuple):
    """The numbers of the codes: the largest one, m; the next lower one; and the one that stands for a nan."""

    most: float
    less: float
    nan: float


class Scaled(NamedTuple):
    """Elements divided by the scales of their blocks, one block in each row; the scale of a block that is not finite is
    negative. See [Note: blocks that are not finite].
    """

    values: torch.Tensor  # in the dtype of the scales
    scales: torch.Tensor
    special: bool  # whether a scale may be negative


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the scales and of the computation: float64 for float64, otherwise float32."""
    return torch.promote_types(dtype, torch.float32)


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """The largest max |x| and the smallest scale that the codecs use, for scales of ``dtype``.

    A larger max |x| might give a scale s, rounded up, whose product s m exceeds the largest number of the dtype. A
    scale of zero would divide by zero, and so would a subnormal scale on a device that treats it as zero.
    """
    info = torch.finfo(dtype)
    return info.max * (1 - 8 * info.eps), info.tiny


def in_blocks(elements: torch.Tensor, block: int) -> torch.Tensor:
    """1-D ``elements`` in rows of ``block`` elements; the last row is filled up with zeros."""
    missing = -elements.numel() % block
    return (pad(elements, (0, missing)) if missing else elements).view(-1, block)


def scaled(elements: torch.Tensor, block: int, codes: Codes) -> Scaled:
    """1-D ``elements`` divided by the scales of their blocks. The host does not wait for the device."""
    rows = in_blocks(elements, block)
    dtype = wide(rows.dtype)
    largest = rows.abs().amax(1)
    broken = largest.isfinite().logical_not_()
    special = not rows.is_cpu or bool(broken.any())  # on a CPU there is nothing to wait for
    most = torch.full((), codes.most, dtype=dtype, device=rows.device)
    if special:
        largest = torch.where(rows.isfinite(), rows, 0).abs().amax(1)
        most = torch.where(broken, codes.less, most)
    largest_there_is, smallest = limits(dtype)
    scales = (largest.to(dtype).clamp_(max=largest_there_is) / most).clamp_(min=smallest)
    inverse = scales.reciprocal()[:, None]  # one division for each block instead of one for each element
    values = rows * inverse if rows.dtype is dtype else rows.to(dtype).mul_(inverse)
    return Scaled(values, torch.where(broken, -scales, scales) if special else scales, special)


def limited(it: Scaled, codes: Codes) -> torch.Tensor:
    """``it.values`` limited to the codes, because x / s may be a little larger than m by rounding."""
    if not it.special:
        return it.values.clamp_(-codes.most, codes.most)
    top = torch.where(it.scales < 0, codes.less, torch.full_like(it.scales, codes.most))[:, None]
    finite = it.values.clamp(-top, top)
    found = torch.where(it.values.isfinite(), finite, it.values.clamp(-codes.most, codes.most))
    return torch.where(it.values.isnan(), codes.nan, found)


def unscaled(values: torch.Tensor, scales: torch.Tensor, block: int, codes: Codes) -> torch.Tensor:
    """The elements of the codes ``values`` (1-D), in the dtype of ``scales``. May overwrite ``values``."""
    rows = in_blocks(values, block).to(scales.dtype)
    if scales.is_cpu and not (scales < 0).any():
        return rows.mul_(scales[:, None]).view(-1)[: values.numel()]
    found = rows * scales.abs()[:, None]
    found = torch.where((scales < 0)[:, None] & (rows.abs() >= codes.most), rows * torch.inf, found)
    return torch.where(rows < -codes.most, torch.nan, found).view(-1)[: values.numel()]


def piece_size(elements: torch.Tensor, block: int) -> int:
    """How many elements torch operations take at a time, so that temporaries are small and fit into a CPU's cache."""
    return max((2**20 if elements.is_cpu else 2**24) // block, 1) * block


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 2048  # elements that a program takes; kernels.py says why
_LARGEST_BLOCK = 8192  # elements of a block, because a program holds a block in its registers
_RUN = 16  # bytes: the length of a run is a multiple of it, so that loads are wide
_FEWEST = 1024  # bools that the kernels take: with fewer of them a run may be beyond the end of the tensor


class CodeKind(NamedTuple):
    """The kind of a code: an integer of 8 or 4 bits, or an 8-bit float.

    Attributes:
        bits: the bits of a code.
        codes: the numbers of the codes.
        mantissa: the bits of the mantissa of an 8-bit float; 0 for an integer.
        bias: the exponent bias of float32 minus that of the 8-bit float.
    """

    bits: int
    codes: Codes
    mantissa: int = 0
    bias: int = 0


def usable(tensor: torch.Tensor, block: int = 2) -> bool:
    """Whether the kernels take ``tensor`` by its dtype and its device, in blocks of ``block`` elements.

    A tensor without bits counts as one on a device with kernels, which are not launched then: what they give has the
    same size as what torch operations give, and those would run on thousands of pieces.
    """
    if tensor.dtype not in _DTYPES or block > _LARGEST_BLOCK:
        return False
    return (tensor.is_cuda and _works(tensor.device)) or type(tensor) in bitless.kinds


def packs(bools: torch.Tensor, run: int) -> bool:
    """Whether :func:`pack` takes ``bools`` in ``run`` bytes."""
    return bools.is_cuda and run % _RUN == 0 and bools.numel() >= _FEWEST and _works(bools.device)


def unpacks(packed: torch.Tensor, count: int) -> bool:
    return packed.is_cuda and packed.numel() % _RUN == 0 and count >= _FEWEST and _works(packed.device)


def run_of(bools: torch.Tensor) -> int:
    """The number of bytes for ``bools``: the smallest one, and on a GPU up to 15 more, so that loads are wide."""
    fewest = (bools.numel() + 7) // 8
    return -(-fewest // _RUN) * _RUN if bools.is_cuda and bools.numel() >= _FEWEST else fewest


@functools.cache
def _works(device: torch.device) -> bool:
    try:
        with torch.no_grad():
            unpack(pack(torch.zeros(_FEWEST, dtype=torch.uint8, device=device), _FEWEST // 8), _FEWEST)
    except Exception as error:  # no Triton, no C compiler for its launcher, or an unknown device
        warnings.warn(
            f"disthooks: codecs run in many torch operations instead of one kernel on {device}, because Triton does "
            f"not work: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("disthooks.saved.codecs.kernels")


@functools.cache
def _has_instructions(device: torch.device) -> bool:
    """Whether ``device`` has instructions that round to bfloat16 and float8; without them the kernels take longer."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Triton launches a kernel on the current stream of the current device.
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _shape(block: int) -> dict[str, int]:
    half = 1 << (block // 2 - 1).bit_length() if block > 2 else 1
    return {"BLOCK": block, "HALF": half, "ROWS": max(_TILE // (2 * half), 1)}


def _launch(shape: dict[str, int]) -> dict[str, Any]:
    # A fused product and sum is rounded once, the two operations of torch are rounded twice, so fusing is off. With 64
    # registers, which the compiler fills without spilling, a multiprocessor has 1024 threads; the largest tile has 512.
    warps = max(4, 2 * shape["ROWS"] * shape["HALF"] // 512)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return options if torch.version.hip else options | {"maxnreg": 64}


def encode(
    elements: torch.Tensor, block: int, kind: CodeKind, key: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (1-D, uint8, packed) and scales of 1-D contiguous ``elements``; a ``key`` makes them round at random."""
    n, shape = elements.numel(), _shape(block)
    codes = torch.empty((n * kind.bits + 7) // 8, dtype=torch.uint8, device=elements.device)
    scales = torch.empty(-(-n // block), dtype=torch.float32, device=elements.device)
    largest, smallest = limits(torch.float32)
    if type(elements) in bitless.kinds:
        return codes, scales
    with _on(elements.device):
        _kernels().encode[(-(-scales.numel() // shape["ROWS"]),)](
            elements,
            codes,
            scales,
            n,
            *(key or (0, 0)),
            **shape,
            BITS=kind.bits,
            M=kind.mantissa,
            BIAS=kind.bias,
            HARDWARE=_has_instructions(elements.device),
            STOCHASTIC=key is not None,
            MOST=kind.codes.most,
            LESS=kind.codes.less,
            NAN=kind.codes.nan,
            LIMIT=largest,
            TINY=smallest,
            M0=MULTIPLIERS[0],
            M1=MULTIPLIERS[1],
            ODD=ODD,
            **_launch(shape),
        )
    return codes, scales


def decode(codes: torch.Tensor, scales: torch.Tensor, into: torch.Tensor, block: int, kind: CodeKind) -> None:
    """Fill ``into`` (1-D, contiguous) with the elements of ``codes`` (uint8) and ``scales``."""
    shape = _shape(block)
    if type(into) in bitless.kinds:
        return
    with _on(into.device):
        _kernels().decode[(-(-scales.numel() // shape["ROWS"]),)](
            codes,
            scales,
            into,
            into.numel(),
            **shape,
            BITS=kind.bits,
            M=kind.mantissa,
            BIAS=kind.bias,
            HARDWARE=_has_instructions(into.device),
            MOST=kind.codes.most,
            **_launch(shape),
        )


def pack(bools: torch.Tensor, run: int) -> torch.Tensor:
    """1-D ``bools`` (uint8, at least 1024) in ``run`` bytes, a multiple of 16.

    Byte i has the elements i, i + run, i + 2 run, ...
    """
    bools = bools if bools.data_ptr() % _RUN == 0 else bools.clone()  # the kernel reads whole words
    packed = torch.empty(run, dtype=torch.uint8, device=bools.device)
    with _on(bools.device):
        _kernels().pack[(-(-run // 2048),)](bools, packed, bools.numel(), run, WORDS=512, num_warps=4)
    return packed


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` bools (uint8) in ``packed``."""
    packed = packed if packed.data_ptr() % _RUN == 0 else packed.clone()
    bools = torch.empty(count, dtype=torch.uint8, device=packed.device)
    with _on(packed.device):
        _kernels().unpack[(-(-packed.numel() // 2048),)](packed, bools, count, packed.numel(), WORDS=512, num_warps=4)
    return bools
