"""A decoder's MLP with its norm: what Recompute computes again, and with products too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Gated(nn.Module):
    """LayerNorm, SwiGLU and a residual: ``gate`` and ``up`` have an input that is computed again."""

    def __init__(self, width: int = 32, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, 3 * width, bias=bias)
        self.down = nn.Linear(3 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))
