"""Small models that save tensors in all the usual ways, and the gradients they have without hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline


class Block(nn.Module):
    """Pre-norm attention and MLP: fused qkv split into views, transposes, dropout, residuals."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = self.attend(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), 0.1, self.training)
        return x + self.mlp(self.norm2(x))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Tiny(nn.Module):
    """Token model of two blocks with a tied head."""

    def __init__(self, blocks: int = 2, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class Conv(nn.Module):
    """Convolutions, batch norm, in-place ReLU and pooling, in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x.contiguous(memory_format=torch.channels_last)).mean((2, 3)))


class Recurrent(nn.Module):
    """A GRU, whose fused kernel saves a workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(16, 32, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())


def tokens(seed: int = 0, batch: int = 4) -> torch.Tensor:
    return torch.randint(0, 50, (batch, 32), generator=torch.Generator().manual_seed(seed))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "transformer": (Tiny, tokens),
    "convolution": (Conv, lambda: torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))),
    "recurrent": (Recurrent, lambda: torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(0))),
}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, example = CASES[name]
    torch.manual_seed(0)
    return make(), example()


def step(model: nn.Module, x: torch.Tensor, context: contextlib.AbstractContextManager[object] | None = None) -> list:
    """One forward and backward from a fixed seed; every gradient."""
    model.zero_grad()
    torch.manual_seed(1)
    with context or contextlib.nullcontext():
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def identical(left: list, right: list) -> bool:
    """The same number of tensors, bit for bit."""
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def stores(folder: object) -> dict[str, object]:
    """Every lossless pipeline there is; a new store is proven by one more line here."""
    return {
        "cpu": dh.OnCpu(),
        "disk": dh.OnDisk(folder),
        "disk, every tensor": pipeline(dh.OnDisk(folder), at_least=0),
        "recompute": pipeline(dh.Recompute(), dh.OnDisk(folder), at_least=0),
        "tiers": pipeline(dh.Tiered(dh.OnDevice("64 KiB"), dh.OnCpu("64 KiB"), dh.OnDisk(folder)), at_least=0),
        "functions": dh.Functions(lambda t: t.detach(), lambda t: t),
    }
