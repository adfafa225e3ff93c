"""What tests share: models, ranks, engines, stores, torch's databases, jobs, a simulated accelerator."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

#: Of the repository.
ROOT = pathlib.Path(__file__).parents[2]


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where ``package`` is not installed, without importing it: that is left to the processes that use it."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")
