"""``Codec``, the interface of codecs, and the measure of what a lossy codec loses.

To add a codec, write a file in this folder with one class: a frozen dataclass under ``@register("codec")`` with
``encode``, ``decode`` and, if it is lossy, ``lossy = True``. Its tests subclass ``disthooks.testing.CodecTests``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch


class Codec(ABC):
    """Turns a tensor into smaller tensors and a small spec, and back. Subclass it as a frozen dataclass.

    A codec that cannot make a tensor smaller returns ``(tensor,)``, the same object: then disthooks copies nothing.

    Attributes:
        lossy: whether the decoded tensor may differ from the encoded one. disthooks measures the error of such codecs,
            see :attr:`disthooks.SavedReport.errors`. False unless the class says otherwise.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Halves(Codec):
    ...     lossy = False
    ...     def encode(self, tensor):
    ...         return tensor.flatten().chunk(2), tensor.shape
    ...     def decode(self, tensors, spec):
    ...         return torch.cat(tensors).view(spec)
    >>> Halves().decode(*Halves().encode(torch.eye(2)))
    tensor([[1., 0.],
            [0., 1.]])
    """

    lossy: ClassVar[bool] = False

    @abstractmethod
    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        """``tensor`` (strided, any dtype and device) as smaller tensors, and a spec that ``decode`` gets with them."""

    @abstractmethod
    def decode(self, tensors: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        """The tensor, in the shape, dtype and on the device of the tensor that was encoded."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` in order, 1-D and contiguous; a view of ``tensor`` if that is possible."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()


#: Elements of a tensor whose error is measured at once: 16 MiB of float32, and a few times that for what comes of them.
_PIECE = 1 << 22


def relative_error(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """``||approximate - exact|| / ||exact||`` in the L2 norm, over the elements that are finite in ``exact``.

    The result is a float64 scalar on the device of ``exact``, so the host does not wait for it. It is zero if nothing
    differs. It is infinite if a finite element is not finite any more, or if zeros came back as other numbers. It is
    computed in pieces, so it needs little memory beside the two tensors; a large tensor's sums differ from those over
    all at once by the rounding of float64, some 1e-15 of them.

    >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    tensor(0.1000, dtype=torch.float64)
    """
    wide = torch.promote_types(exact.dtype, torch.float32)
    pieces = list(_pieces(approximate, exact))
    # The norms have their places before the large temporaries come and go: a small tensor in the hole that a large one
    # left would keep malloc from using that hole for the next large one.
    sums = torch.empty(2, len(pieces), dtype=torch.float64, device=exact.device)
    for i, (there, here) in enumerate(pieces):
        there, here = there.to(wide), here.to(wide)
        finite = here.isfinite()
        sums[0, i] = _norm(torch.where(finite, there - here, 0))
        sums[1, i] = _norm(torch.where(finite, here, 0))
    lost, norm = _norm(sums[0]), _norm(sums[1])
    error = torch.where(lost == 0, lost, lost / norm)
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _pieces(approximate: torch.Tensor, exact: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the same elements of both, which need not lie in the same order in memory."""
    if exact.numel() <= _PIECE or approximate.shape != exact.shape:
        yield approximate, exact
        return
    longest = max(range(exact.dim()), key=exact.shape.__getitem__)
    count = min(exact.shape[longest], -(-exact.numel() // _PIECE))
    for there, here in zip(approximate.tensor_split(count, longest), exact.tensor_split(count, longest), strict=True):
        yield from _pieces(there, here)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    # The sum is in float64, because the squares of large float32 numbers are infinite in float32.
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm
