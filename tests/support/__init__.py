"""What tests share: models, ranks, engines, stores, torch's databases, jobs, a simulated accelerator."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
import torch

#: Whether torch shows what a node holds for the tensors that it saved. torch 2.9 does not. There Recompute stores the
#: outputs of operators whose formula needs such a tensor, and the gradients must be exact all the same.
SHOWS_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")
shows_saved = pytest.mark.skipif(not SHOWS_SAVED, reason="this torch does not show what a node saved")

#: Of the repository.
ROOT = pathlib.Path(__file__).parents[2]


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where ``package`` is not installed, without importing it: that is left to the processes that use it."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")
