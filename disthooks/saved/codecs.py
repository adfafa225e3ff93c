"""Tensor to smaller tensors and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from disthooks.errors import UsageError


class Codec(ABC):
    """Turns a tensor into smaller tensors and a small spec, and back; subclass it as a frozen dataclass."""

    @abstractmethod
    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        """``tensor`` (strided, any dtype and device) as smaller tensors and what ``decode`` needs besides."""

    @abstractmethod
    def decode(self, tensors: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        """A tensor of the shape, dtype and device that was encoded."""


@dataclass(frozen=True)
class Cast(Codec):
    """Store floating-point tensors in a narrower dtype. Lossy: it changes gradients by its rounding.

    A tensor that is not floating point (indices, masks, complex numbers), or not wider than ``dtype``, is
    left as it is.

    Args:
        dtype: ``torch.bfloat16`` (keeps the range, 8 bits of precision), ``torch.float16`` (11 bits, overflows
            beyond 65504) or ``torch.float32``.

    Raises:
        UsageError: for any other dtype.

    >>> tensors, spec = Cast(torch.bfloat16).encode(torch.tensor([1.0, 2.5]))
    >>> tensors[0].dtype, Cast(torch.bfloat16).decode(tensors, spec)
    (torch.bfloat16, tensor([1.0000, 2.5000]))
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UsageError(f"Cast: dtype must be torch.bfloat16, float16 or float32, got {self.dtype!r}")

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.dtype]:
        """The tensor in the narrower dtype, and the dtype it had."""
        narrower = tensor.is_floating_point() and tensor.element_size() > self.dtype.itemsize
        return ((tensor.to(self.dtype) if narrower else tensor,), tensor.dtype)

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: torch.dtype) -> torch.Tensor:
        """The tensor in the dtype it had."""
        return tensors[0].to(spec)
