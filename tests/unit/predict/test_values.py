"""The values of small tensors beside the fake ones."""

from __future__ import annotations

import torch

from disthooks.predict.fake_kernels import FakeKernels
from disthooks.predict.values import Values


def test_writing_by_a_mask_keeps_the_values() -> None:
    """Tensor parallelism does so with the tokens that a rank has no row of the embedding for."""
    with FakeKernels() as mode, Values(mode):
        tokens = torch.arange(12).view(2, 6)
        tokens[(tokens < 3) | (tokens >= 9)] = 0
        assert tokens.sum().item() == sum(range(3, 9))
