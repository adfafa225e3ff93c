"""The model and the data of the two example scripts: the same numbers on any engine and any number of processes."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, LENGTH, BATCH = 64, 64, 12  # a batch that 1, 2, 3 and 4 processes can share; a rank saves tensors above 64 KiB


class Block(nn.Module):
    """The unit that FSDP shards by itself, and that launch/hooks.yaml attaches to ("blocks.*")."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual and what is added to it."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks and a head."""

    _no_split_modules = ("Block",)  # where accelerate's FSDP configurations look for the class to shard

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss: cross entropy of 8 classes at each place, in float32 whatever the model computes in."""
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), y.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step; each rank takes its part."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return x, (x[..., :8] + 0.3 * torch.randn(BATCH, LENGTH, 8, generator=generator)).argmax(-1)
