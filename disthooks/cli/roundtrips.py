"""What a pipeline gives back for what it was given, tried on random tensors."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from disthooks.saved.codecs.base import relative_error
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.saving import saving

_ELEMENTS = 1 << 18
DTYPES = (torch.float32, torch.bfloat16)


class RoundTrip(NamedTuple):
    """One tensor, there and back.

    Attributes:
        dtype: of the tensor.
        lossless: whether the pipeline says that every bit comes back.
        identical: whether every bit did.
        error: the relative error, ``||back - there|| / ||there||``; infinite when something finite is not any more.
        before: bytes of the tensor.
        after: bytes that the store was given.
        moved: of those, bytes that left the memory they were in.
        read: bytes that came back from a disk.
    """

    dtype: str
    lossless: bool
    identical: bool
    error: float
    before: int
    after: int
    moved: int
    read: int


class _Keep(torch.autograd.Function):
    """Saves its argument, and that alone."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].expand_as(ctx.saved_tensors[0])


def round_trip(line: Pipeline, dtype: torch.dtype) -> RoundTrip:
    """Have autograd save a random tensor of ``dtype`` through ``line``, whatever its size, and take it back.

    Raises:
        DisthooksError: what the pipeline raises.
    """
    before = _read(line)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
    exact = numbers.to(dtype).to(device)
    with saving(dataclasses.replace(line, at_least=0)) as saved:
        node: Any = _Keep.apply(exact.clone().requires_grad_())  # type: ignore[no-untyped-call]
    line.store.wait()  # what is still in memory proves nothing
    back = node.grad_fn.saved_tensors[0].detach()
    report = saved.report()
    same = back.dtype == dtype and torch.equal(_bits(back), _bits(exact))
    error = 0.0 if same else float(relative_error(back, exact))
    lossless = not any(codec.lossy for codec in line.codecs)
    name = str(dtype).removeprefix("torch.")
    return RoundTrip(
        name, lossless, same, error, exact.nbytes, report.stored or report.kept, report.moved, _read(line) - before
    )


def _read(line: Pipeline) -> int:
    return sum(tier.read for tier in line.store.report())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
