"""A decoder-only transformer as today's are, by hand: RMSNorm, SwiGLU, rotary positions, torch's fused attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    """Sizes.

    Attributes:
        heads: of queries; a head has ``width / heads`` channels.
        shared: of keys and values, each for several of queries.
        hidden: channels inside the MLP.
        batch, length: sequences, and tokens in each.
    """

    width: int = 2560
    layers: int = 24
    heads: int = 20
    shared: int = 20
    hidden: int = 6912
    vocabulary: int = 32_000
    batch: int = 1
    length: int = 8192


SIZES = {
    "full": Config(),  # 1.97 billion parameters
    "first": Config(width=1024, layers=4, heads=8, shared=8, hidden=2816, vocabulary=1024, length=2048),
    "tiny": Config(width=64, layers=2, heads=4, shared=2, hidden=160, vocabulary=64, batch=2, length=64),
}


def rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``x`` of shape (batch, heads, length, channels), each half of its channels turned by its position."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.each, self.groups = config.width // config.heads, config.heads // config.shared
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k, self.v = (nn.Linear(config.width, config.shared * self.each, bias=False) for _ in range(2))
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q, turn), rotated(k, turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups > 1)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.gate, self.up = (nn.Linear(config.width, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.first(x), turn)
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Tokens to the mean cross entropy of the next ones.

    Attributes:
        between: what stands around each layer, and what its output goes through: for offloading that needs to be told.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.between: tuple[Any, Callable[[torch.Tensor], torch.Tensor]] | None = None
        each = config.width // config.heads
        rates = 10_000.0 ** (-torch.arange(0, each, 2, dtype=torch.float32, device="cpu") / each)
        angles = torch.outer(torch.arange(config.length, dtype=torch.float32, device="cpu"), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        turn = self.cos.to(x.dtype), self.sin.to(x.dtype)
        context, passed = self.between or (contextlib.nullcontext(), lambda y: y)
        for layer in self.layers:
            with context:
                x = layer(x, turn)
            x = passed(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(config: Config, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, torch.Tensor]:
    """The model with small random weights, and its tokens."""
    with torch.device(device):
        model = Decoder(config)
    model.to(device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    return model, torch.randint(0, config.vocabulary, (config.batch, config.length), device=device)
