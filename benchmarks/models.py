"""The models that are measured, by hand, so that torch is all they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NAMES = ("transformer", "resnet152", "mlp")


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def convolution(inner: int, outer: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without a bias, and the batch norm behind it."""
    conv = nn.Conv2d(inner, outer, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer))


class Bottleneck(nn.Module):
    """1 x 1 to ``width`` channels, 3 x 3, 1 x 1 to four times as many, and the input added."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.first, self.second = convolution(inner, width, 1), convolution(width, width, 3, stride)
        self.third, self.relu = convolution(width, outer, 1), nn.ReLU(inplace=True)
        self.shortcut = nn.Identity() if inner == outer and stride == 1 else convolution(inner, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.third(self.relu(self.second(self.relu(self.first(x)))))
        out += self.shortcut(x)
        return self.relu(out)


def resnet(depths: tuple[int, ...]) -> nn.Sequential:
    """A ResNet of bottlenecks: (3, 8, 36, 3) of them make ResNet-152."""
    stem = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    blocks, inner = [], 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for number in range(depth):
            blocks.append(Bottleneck(inner, width, 2 if stage and not number else 1))
            inner = 4 * width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000))


class _Reads(torch.autograd.Function):
    """Saves ``data``, and reads it once in forward and once in backward; allocates nothing of its size."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(data)
        return y + data.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0].mean(), None


class Chain(nn.Module):
    """As little computation for each byte saved as there can be.

    What is saved is there before the forward begins: to make it, even by the cheapest of operations, takes longer than
    a fast disk takes to write it, because the system has to find and clear every page.
    """

    def __init__(self, links: int, elements: int) -> None:
        super().__init__()
        self.links, self.elements, self.data = links, elements, [torch.empty(0)]
        self.start = nn.Parameter(torch.ones(1))

    @property
    def nbytes(self) -> int:
        """What it saves."""
        return 4 * self.links * self.elements

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Have the data, the same each time, in memory; outside, the other models are measured without it."""
        torch.manual_seed(1)
        # As batches of rows, which activations are: of vectors without a gradient disthooks takes a copy at once.
        shape = (self.elements // 1024, 1024)
        self.data = [torch.rand(shape, device=self.start.device) + 0.5 for _ in range(self.links)]
        try:
            yield
        finally:
            self.data = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.start
        for data in self.data:
            y = _Reads.apply(y, data)
        return y


def build(name: str, size: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    """The model called ``name``, or the chain, and a batch for it; ``size`` is "full" or "small"."""
    torch.manual_seed(0)
    full = size == "full"
    if name == "transformer":
        # 16 times the width is saved for each token and block: 2.16 GB.
        count, width, batch = (16, 512, (16, 256)) if full else (2, 128, (2, 64))
        model, x = nn.Sequential(*[Block(width, width // 64) for _ in range(count)]), torch.randn(*batch, width)
    elif name == "resnet152":
        batch, pixels = (8, 224) if full else (2, 64)  # 1.4 GB
        model, x = resnet((3, 8, 36, 3)), torch.randn(batch, 3, pixels, pixels)
    elif name == "mlp":
        count, width, batch = (12, 1024, 8192) if full else (4, 256, 1024)
        layers = [part for _ in range(count) for part in (nn.Linear(width, width), nn.ReLU())]
        model, x = nn.Sequential(*layers), torch.randn(batch, width)
    else:
        model, x = Chain(*((96, 4 << 20) if full else (8, 1 << 18))), torch.ones(1)  # 1.6 GB
    return model.to(device), x.to(device)
