"""What is not finite: how many elements, and on which rank it began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks.grads.measures.base import Fact, Local, Look, Measure, Merge, stack
from disthooks.grads.measures.scan import known


@dataclass(frozen=True)
class NonFiniteCount(Measure):
    """How many elements are infinite or not a number."""

    merge: ClassVar[Merge] = "sum"
    facts: ClassVar[frozenset[Fact]] = frozenset({"nonfinite"})

    def local(self, local: Local) -> torch.Tensor:
        """The count for each parameter."""
        found = known(local, self.facts)["nonfinite"]
        if all(other is None for other in local.apart):
            return found
        return found + stack(local.apart, lambda grads: [(~torch.isfinite(g)).sum() for g in grads], local.device)


@dataclass(frozen=True)
class FirstToFail(Measure):
    """Which rank comes first whose own gradient was non-finite: world minus its place, and 0 for none."""

    merge: ClassVar[Merge] = "max"
    looks: ClassVar[frozenset[Look]] = frozenset({"finite"})

    def local(self, local: Local) -> torch.Tensor:
        """World minus this rank's place wherever its own gradient was non-finite."""
        bad = torch.zeros(len(local.seen), dtype=torch.bool, device=local.device)
        for batch in range(max((len(seen.norms or seen.flags) for seen in local.seen), default=0)):
            norms = [seen.norms[batch] if batch < len(seen.norms) else None for seen in local.seen]
            flags = [seen.flags[batch] if batch < len(seen.flags) else None for seen in local.seen]
            bad |= ~torch.isfinite(stack(norms, list, local.device)) | stack(flags, list, local.device).bool()
        return bad.long() * (local.world - local.position)
