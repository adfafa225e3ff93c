"""Blocks of elements with a scale each, in torch's own operations: what the kernels have to give bit for bit.

A block of elements x has s = max |x| / m, with m the largest code, and its codes are x / s, rounded as the codec
does. What is not finite is no reason to wait for the device: a block with such an element has the next lower code for
its largest finite one, the scale that follows from it *with a minus*, and the code m for an infinity.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad


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
