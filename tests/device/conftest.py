"""Fixtures of the tests on a device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def sim(device: torch.device) -> torch.device:
    """The simulated device, where a test needs its counts, its delays or its streams that stand still."""
    if device.type != "sim":
        pytest.skip("of the simulated device")
    return device
