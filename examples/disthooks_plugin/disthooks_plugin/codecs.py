"""A codec of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from disthooks.saved.codecs import Codec

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Runs(Codec):
    """Store each run of equal elements once, with its length. Lossless.

    It is good for masks, for padding and for indices that are sorted; what does not get smaller is left as it is.

    Args:
        at_least: tensors of fewer elements are left as they are.
    """

    at_least: int = 64

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        if tensor.numel() < self.at_least or tensor.element_size() not in BITS or tensor.is_complex():
            return (tensor,), None
        # As integers: a NaN is equal to nothing, not to itself, and 0.0 equals -0.0, whose bits are others.
        bits = tensor.detach().resolve_conj().reshape(-1).contiguous().view(BITS[tensor.element_size()])
        values, lengths = torch.unique_consecutive(bits, return_counts=True)
        lengths = lengths.int()
        if values.nbytes + lengths.nbytes >= tensor.nbytes:
            return (tensor,), None
        return (values, lengths), (tensor.shape, tensor.dtype)

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        if spec is None:
            return tensors[0]
        values, lengths = tensors
        shape, dtype = spec
        return values.repeat_interleave(lengths).view(dtype).view(shape)
