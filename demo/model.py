"""A byte-level GPT: small enough for two CPU cores, large enough that its saved tensors dominate memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; ``heads`` divides ``width``."""

    layers: int = 6
    width: int = 288
    heads: int = 6
    context: int = 256


TINY = Shape(layers=2, width=64, heads=2, context=64)


class Attention(nn.Module):
    """Causal self-attention; q, k and v are views of one tensor, which disthooks stores once."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        parts = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Normalise, attend, add; normalise, transform, add."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes and the bytes that follow them, both (batch, context), to the loss of each in nats, flat."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._initialise(shape.layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's: what adds to the residual stream starts smaller the more blocks add to it.
                last = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.bytes(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
