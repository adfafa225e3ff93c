"""Other seeds for the tests: ``DISTHOOKS_SEED=7 make test``, on ranks too.

With the variable set, each seed that a test gives to torch or to :mod:`random` is shifted by its value. Processes that
a test starts inherit the variable.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch


def shift() -> None:
    """Shift all seeds that this process takes from now on, if the variable asks for it."""
    by = int(os.environ.get("DISTHOOKS_SEED", "0"))
    if not by:
        return
    manual_seed, seed = torch.manual_seed, random.seed

    class Generator(torch.Generator):  # type: ignore[misc]  (torch calls it final)
        def manual_seed(self, seed: int) -> Any:
            return super().manual_seed(seed + by)

    class Random(random.Random):
        def seed(self, a: Any = None, version: int = 2) -> None:
            super().seed(a + by if isinstance(a, int) else a, version)

    torch.Generator, torch.manual_seed = Generator, lambda seed: manual_seed(int(seed) + by)  # type: ignore[misc]
    random.Random, random.seed = Random, lambda a=None: seed(a + by if isinstance(a, int) else a)  # type: ignore[misc]


def on_rank(rank: int, world: int) -> None:
    """For ranks that import nothing else of the tests: to get this function, they import the package."""
