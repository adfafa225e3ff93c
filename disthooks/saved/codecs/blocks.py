"""Blocks of elements with a scale each, in torch's own operations: what the kernels have to give bit for bit.

A block of elements x has s = max |x| / m, with m the largest code, and its codes are x / s, rounded as the codec
does. What is not finite is no reason to wait for the device: a block with such an element has the next lower code for
its largest finite one, the scale that follows from it *with a minus*, and the code m for an infinity.

The codecs' kernels, where there are any: on a CUDA or ROCm device, with Triton, which comes with torch there.

Elsewhere the codecs run in torch's own operations, which give the same bits (``blocks``, ``noise``). Neither waits for
the device. A kernel is compiled at its first use, for a second or so; nothing is tuned while it runs.
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


class Codes(NamedTuple):
    """The numbers that codes are: the largest, m, the next lower one, and what stands for a nan."""

    most: float
    less: float
    nan: float


class Scaled(NamedTuple):
    """A block in each row, over its scale; and the scales, negative where something is not finite."""

    values: torch.Tensor  # in the dtype of the scales
    scales: torch.Tensor
    special: bool  # whether one may be negative


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in, and the dtype of the scales: float64 for float64, otherwise float32."""
    return torch.promote_types(dtype, torch.float32)


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """The largest max |x|, and the smallest scale, in the dtype of the scales.

    Rounded up, s m may be over the largest number there is; a scale of zero, or one that a device takes for zero, would
    divide by zero.
    """
    info = torch.finfo(dtype)
    return info.max * (1 - 8 * info.eps), info.tiny


def in_blocks(elements: torch.Tensor, block: int) -> torch.Tensor:
    """1-D ``elements`` as rows of ``block``, the last one filled up with zeros."""
    missing = -elements.numel() % block
    return (pad(elements, (0, missing)) if missing else elements).view(-1, block)


def scaled(elements: torch.Tensor, block: int, codes: Codes) -> Scaled:
    """1-D ``elements`` over the scales of their blocks. The host waits for no device."""
    rows = in_blocks(elements, block)
    dtype = wide(rows.dtype)
    largest = rows.abs().amax(1)
    broken = largest.isfinite().logical_not_()
    special = not rows.is_cpu or bool(broken.any())  # a CPU is asked at no price
    most = torch.full((), codes.most, dtype=dtype, device=rows.device)
    if special:
        largest = torch.where(rows.isfinite(), rows, 0).abs().amax(1)
        most = torch.where(broken, codes.less, most)
    largest_there_is, smallest = limits(dtype)
    scales = (largest.to(dtype).clamp_(max=largest_there_is) / most).clamp_(min=smallest)
    inverse = scales.reciprocal()[:, None]  # one division for each block
    values = rows * inverse if rows.dtype is dtype else rows.to(dtype).mul_(inverse)
    return Scaled(values, torch.where(broken, -scales, scales) if special else scales, special)


def limited(it: Scaled, codes: Codes) -> torch.Tensor:
    """``it.values``, rounded or not, where they have a code: x / s may be a little over m by rounding."""
    if not it.special:
        return it.values.clamp_(-codes.most, codes.most)
    top = torch.where(it.scales < 0, codes.less, torch.full_like(it.scales, codes.most))[:, None]
    finite = it.values.clamp(-top, top)
    found = torch.where(it.values.isfinite(), finite, it.values.clamp(-codes.most, codes.most))
    return torch.where(it.values.isnan(), codes.nan, found)


def unscaled(values: torch.Tensor, scales: torch.Tensor, block: int, codes: Codes) -> torch.Tensor:
    """The elements that 1-D ``values`` of codes stand for, in the dtype of ``scales``, which may be where those are."""
    rows = in_blocks(values, block).to(scales.dtype)
    if scales.is_cpu and not (scales < 0).any():
        return rows.mul_(scales[:, None]).view(-1)[: values.numel()]
    found = rows * scales.abs()[:, None]
    found = torch.where((scales < 0)[:, None] & (rows.abs() >= codes.most), rows * torch.inf, found)
    return torch.where(rows < -codes.most, torch.nan, found).view(-1)[: values.numel()]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 2048  # elements of a program; why, see kernels.py
_LARGEST_BLOCK = 8192  # a program holds a block in its registers
_RUN = 16  # bytes; runs of bits begin at multiples, for wide loads
_FEWEST = 1024  # bools; with fewer a run of such a length may lie beyond the end


class Kind(NamedTuple):
    """What a code is: an integer of 8 or 4 bits, or a float8 with so many bits of mantissa, and exponents off by so."""

    bits: int
    codes: Codes
    mantissa: int = 0
    bias: int = 0


def usable(tensor: torch.Tensor, block: int = 2) -> bool:
    """Whether a tensor of this dtype (of a scale, too) on this device goes through kernels, in blocks of ``block``."""
    return tensor.is_cuda and tensor.dtype in _DTYPES and block <= _LARGEST_BLOCK and _works(tensor.device)


def packs(bools: torch.Tensor, run: int) -> bool:
    """Whether ``pack`` takes these in bytes of ``run``."""
    return bools.is_cuda and run % _RUN == 0 and bools.numel() >= _FEWEST and _works(bools.device)


def unpacks(packed: torch.Tensor, count: int) -> bool:
    """Whether ``unpack`` gives so many bools back from these bytes."""
    return packed.is_cuda and packed.numel() % _RUN == 0 and count >= _FEWEST and _works(packed.device)


def run_of(bools: torch.Tensor) -> int:
    """Bytes for these bools: as few as may be, on a GPU a few more so that its loads are wide."""
    fewest = (bools.numel() + 7) // 8
    return -(-fewest // _RUN) * _RUN if bools.is_cuda and bools.numel() >= _FEWEST else fewest


@functools.cache
def _works(device: torch.device) -> bool:
    try:
        with torch.no_grad():
            unpack(pack(torch.zeros(_FEWEST, dtype=torch.uint8, device=device), _FEWEST // 8), _FEWEST)
    except Exception as error:  # no Triton, no C compiler for its launcher, a device it does not know
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
    """Whether it rounds to bfloat16 and float8 by itself; the kernels can do it, at a price."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Triton launches on the current device, on its current stream.
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _shape(block: int) -> dict[str, int]:
    half = 1 << (block // 2 - 1).bit_length() if block > 2 else 1
    return {"BLOCK": block, "HALF": half, "ROWS": max(_TILE // (2 * half), 1)}


def _launch(shape: dict[str, int]) -> dict[str, Any]:
    # Products and sums that are fused are rounded once, those of torch twice. With 64 registers, in which the compiler
    # finds room without spilling, a multiprocessor has 1024 threads; the largest tile has 512.
    warps = max(4, 2 * shape["ROWS"] * shape["HALF"] // 512)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return options if torch.version.hip else options | {"maxnreg": 64}


def encode(
    elements: torch.Tensor, block: int, kind: Kind, key: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (1-D, uint8, so many bits each) and scales of 1-D contiguous ``elements``; at random with a ``key``."""
    n, shape = elements.numel(), _shape(block)
    codes = torch.empty((n * kind.bits + 7) // 8, dtype=torch.uint8, device=elements.device)
    scales = torch.empty(-(-n // block), dtype=torch.float32, device=elements.device)
    largest, smallest = limits(torch.float32)
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


def decode(codes: torch.Tensor, scales: torch.Tensor, into: torch.Tensor, block: int, kind: Kind) -> None:
    """Fill ``into`` (1-D, contiguous) with what ``codes`` (uint8) and ``scales`` stand for."""
    shape = _shape(block)
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
    """1-D ``bools`` (uint8, at least 1024) in ``run`` bytes, a multiple of 16: byte i has i, i + run, i + 2 run, ..."""
    bools = bools if bools.data_ptr() % _RUN == 0 else bools.clone()  # words are read
    packed = torch.empty(run, dtype=torch.uint8, device=bools.device)
    with _on(bools.device):
        _kernels().pack[(-(-run // 2048),)](bools, packed, bools.numel(), run, WORDS=512, num_warps=4)
    return packed


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` bools (uint8) that were packed."""
    packed = packed if packed.data_ptr() % _RUN == 0 else packed.clone()
    bools = torch.empty(count, dtype=torch.uint8, device=packed.device)
    with _on(packed.device):
        _kernels().unpack[(-(-packed.numel() // 2048),)](packed, bools, count, packed.numel(), WORDS=512, num_warps=4)
    return bools
