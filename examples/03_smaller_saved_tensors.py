"""Make saved tensors smaller: without loss, with a loss that is right on average, and by a codec of one's own."""

from __future__ import annotations

import dataclasses
import tempfile

import torch
from torch import nn

import disthooks as dh
from disthooks.saved.codecs import Codec
from disthooks.saved.report import SavedReport

torch.manual_seed(0)
disk = dh.OnDisk(tempfile.gettempdir())
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 1))
x = torch.randn(256, 128)


def gradient(*codecs: Codec) -> tuple[torch.Tensor, SavedReport]:
    """The gradient of the third layer's weight, which is linear in what that layer saves."""
    with dh.save_activations(model, "", *codecs, disk) as saving:
        (grad,) = torch.autograd.grad(model(x).sum(), [model[2].weight])
        return grad, saving.report()


truth, plain = gradient()

# Lossless: the output of a ReLU is half zeros, and becomes a bitmap and what is not zero.
packed, report = gradient(dh.Compact())
assert torch.equal(packed, truth)
assert report.stored < 0.8 * plain.stored
print(f"Compact: {plain.stored} -> {report.stored} bytes, the same gradient bit for bit")

# Lossy: an eighth of the bytes. One gradient is off, the mean of many is not: rounding is random and unbiased.
one, report = gradient(dh.Quantize(bits=4))
many = torch.stack([gradient(dh.Quantize(bits=4))[0] for _ in range(100)]).mean(0)


def off(grad: torch.Tensor) -> float:
    return float((grad - truth).norm() / truth.norm())


print(f"Quantize(4): {report.stored} bytes; gradient off by {off(one):.3f}, the mean of 100 by {off(many):.3f}")
print(report)
assert report.stored < 0.15 * plain.stored
assert off(many) < 0.5 * off(one)


# One's own: a frozen dataclass with encode and decode.
@dataclasses.dataclass(frozen=True)
class KeepBits(Codec):
    """float32 without its lowest 16 bits, which is bfloat16 rounded towards zero."""

    lossy = True  # so that report().errors says how much

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Size | None]:
        if tensor.dtype is not torch.float32:
            return (tensor,), None  # left alone
        halves = tensor.contiguous().view(torch.int16).view(-1, 2)
        return (halves[:, 1].clone(),), tensor.shape  # the upper half, on a little-endian machine

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: torch.Size | None) -> torch.Tensor:
        if spec is None:
            return tensors[0]
        return torch.stack((torch.zeros_like(tensors[0]), tensors[0]), 1).view(torch.float32).view(spec)


cut, report = gradient(KeepBits())
assert report.stored == plain.stored // 2
assert 0 < report.errors["KeepBits()"] < 2**-7
assert 0 < off(cut) < 2**-6
