"""Scale and Sanitize as torch has them."""

from __future__ import annotations

import math

import pytest
import torch

import disthooks as dh
from tests.support.rules import stepped

CPU = torch.device("cpu")
N = 60_000


# --- Scale and Sanitize

SPECIAL = torch.tensor([1.5, math.nan, math.inf, -math.inf, -2.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("limits", [(), (1.0,), (0.0, 7.0), (0.5, 7.0, -8.0)])
def test_sanitize_is_torchs(dtype: torch.dtype, limits: tuple[float, ...]) -> None:
    grad = SPECIAL.to(dtype)
    (found,), _ = stepped(dh.Sanitize(*limits), [grad], [grad])
    assert torch.equal(found, grad.nan_to_num(*limits))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_scale_multiplies(dtype: torch.dtype) -> None:
    grad = torch.tensor([1.5, math.nan, -2.0]).to(dtype)
    (found,), _ = stepped(dh.Scale(-0.5), [grad], [grad])
    assert torch.equal(found.nan_to_num(9), (grad * -0.5).nan_to_num(9))
    assert found[1].isnan()
