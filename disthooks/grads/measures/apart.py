"""What a rank has of gradients that nobody reduces, and which no other rank would notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks.engines.shard import Shard
from disthooks.grads.measures.base import Local, Measure, Merge, onto


@dataclass(frozen=True)
class NonFiniteApart(Measure):
    """How many elements are not finite in gradients that are apart and not owned; no numbers for other parameters."""

    merge: ClassVar[Merge] = "sum"

    def width(self, shard: Shard | None) -> int:
        """One number for a parameter that is apart."""
        return int(shard is not None and shard.layout == "apart")

    def local(self, local: Local) -> torch.Tensor:
        """The count of this rank."""
        counts, zero = [], torch.zeros((), dtype=torch.float64, device=local.device)
        for place, shard in enumerate(local.shards):
            if shard.layout == "apart":
                grad = local.apart[place] if local.apart else None
                counts.append(zero if grad is None else onto((~torch.isfinite(grad)).sum(), zero.device, zero.dtype))
        return torch.stack(counts) if counts else zero.new_zeros(0)
