"""A narrower dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks.errors import UsageError
from disthooks.saved.codecs.base import Codec

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Cast(Codec):
    """Store floating-point tensors in a narrower dtype. Lossy: it changes gradients by its rounding.

    A tensor that is not floating point (indices, masks, complex numbers), or not wider than ``dtype``, is
    left as it is.

    The two dtypes of 8 bits have little range, so the tensor is divided by a scale first, one float32 for each
    tensor: ``max |x| / finfo(dtype).max`` ("FP8 Formats for Deep Learning", Micikevicius et al. 2022, arXiv:2209.05433,
    section 4). The largest element comes back to within the rounding of the scale, a tensor of zeros as zeros. One
    that has an inf or a nan in it is left as it is, so that each comes back with its sign: float8_e4m3fn has no inf.
    Whether there is one the host has to know, so on a GPU these two wait for the device, once for each tensor.

    Args:
        dtype: ``torch.bfloat16`` (keeps the range, 8 bits of precision), ``torch.float16`` (11 bits, overflows
            beyond 65504), ``torch.float32``, ``torch.float8_e4m3fn`` (4 bits; from 1/28672 of the tensor's largest
            element down, fewer) or ``torch.float8_e5m2`` (3 bits; from 1 part in 9e8 down, fewer).

    Raises:
        UsageError: for any other dtype.

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

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.dtype]:
        """The tensor in the narrower dtype, its scale if it has one, and the dtype it had."""
        if not (tensor.is_floating_point() and tensor.element_size() > self.dtype.itemsize and tensor.numel()):
            return (tensor,), tensor.dtype
        if self.dtype in _PLAIN:
            return (tensor.to(self.dtype),), tensor.dtype
        return self._scaled(tensor) or (tensor,), tensor.dtype

    def _scaled(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        # Not below the smallest normal number: a device that takes the others for zero would divide by it.
        largest = wide.abs().amax() / torch.finfo(self.dtype).max
        scale = largest.to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
        if not scale.isfinite():
            return None  # or of float64 and too large for a scale in float32
        return (wide / scale).to(self.dtype), scale

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        """The tensor in the dtype it had."""
        if len(tensors) == 1:
            return tensors[0].to(spec)
        return tensors[0].to(torch.promote_types(spec, torch.float32)).mul_(tensors[1]).to(spec)
