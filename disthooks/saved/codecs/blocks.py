"""Blocks of elements that share a scale.

A block of elements x has the scale s = max |x| / m, where m is the largest code. Its codes are x / s, rounded as the
codec says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

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
    """How many elements are taken at a time, so that temporaries are small and fit into a CPU's cache.

    A tensor without bits is taken whole, because nothing is computed.
    """
    if type(elements) in bitless.kinds:
        return max(-(-elements.numel() // block), 1) * block
    return max((2**20 if elements.is_cpu else 2**24) // block, 1) * block
