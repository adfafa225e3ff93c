"""ClipAdaptive and ClipNorm by parameter: the published formulas, whatever part of a parameter is here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.engines.base import Shard
from tests.support.engines import close
from tests.support.rules import stepped, tensors


def unitwise(x: torch.Tensor) -> torch.Tensor:
    """timm's ``unitwise_norm``."""
    return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)


def agc(weight: torch.Tensor, grad: torch.Tensor, clipping: float, eps: float) -> torch.Tensor:
    """timm's ``adaptive_clip_grad`` of one parameter."""
    limit = unitwise(weight).clamp(min=eps) * clipping
    norm = unitwise(grad)
    return torch.where(norm < limit, grad, grad * (limit / norm.clamp(min=1e-6)))


SHAPES = [(), (7,), (1, 5), (4, 3), (3, 2, 2), (4, 2, 3, 3), (0, 3), (3, 0)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_adaptive_equals_timms(dtype: torch.dtype) -> None:
    weights, grads = tensors(SHAPES, 0, dtype), tensors(SHAPES, 1, dtype)
    weights[3][1] = 0  # below eps
    grads[3][2] *= 1e-3  # not clipped
    found, log = stepped(dh.ClipAdaptive(0.1, 0.02), weights, grads)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    truth = [agc(w.to(wide), g.to(wide), 0.1, 0.02) for w, g in zip(weights, grads, strict=True)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.complex64: 1e-6}.get(dtype, 1e-2)
    assert all(a.dtype == dtype for a in found)
    assert all(close(a.to(wide), b, tolerance) for a, b in zip(found, truth, strict=True) if b.numel())
    assert torch.equal(found[3][2], grads[3][2])
    units = [unitwise(t).numel() for t in truth]
    same = [(unitwise(a.to(wide)) == unitwise(g.to(wide))).sum() for a, g in zip(truth, grads, strict=True)]
    assert close(log["units_clipped"], 1 - float(sum(same)) / sum(units))
    assert close(
        log["unit_clip_ratio"], float(min((b.abs().max() / g.abs().max()) for b, g in _there(truth, grads))), 0.1
    )


def _there(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (x, y.to(x.dtype))
        for whole, other in zip(a, b, strict=True)
        if whole.numel()
        for x, y in (zip(whole, other, strict=True) if whole.ndim > 1 else [(whole, other)])
    ]


def test_adaptive_keeps_nan_in_its_unit() -> None:
    weights, grads = [torch.ones(4, 2), torch.ones(2, 2)], [torch.ones(4, 2), torch.ones(2, 2)]
    grads[0][1, 0], grads[0][2, 0], weights[1][1, 0] = math.nan, math.inf, math.nan
    (first, second), _ = stepped(dh.ClipAdaptive(), weights, grads)
    assert first.isnan().tolist() == [[False] * 2, [True] * 2, [True, False], [False] * 2]
    assert first[2, 1] == 0
    assert second.isnan().tolist() == [[False] * 2, [True] * 2]


def test_adaptive_needs_to_know_the_part_and_the_final_gradient() -> None:
    shard = Shard("flat", nn.Parameter(torch.ones(3)), True, "sharded", None)
    with pytest.raises(dh.errors.UsageError, match="which elements of 'flat' are on this rank"):
        dh.ClipAdaptive().check([shard])
    with pytest.raises(dh.errors.UsageError, match=r"whole units.*ClipNorm\(by='parameter'\)"):
        dh.only("*", dh.ClipAdaptive(), at="local")
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2).to_sparse()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with (
        dh.gradients(nn.ParameterList([parameter]), optimizer, rules=[dh.ClipAdaptive()]),
        pytest.raises(dh.errors.UsageError, match="dense gradients"),
    ):
        optimizer.step()


def test_adaptive_on_gradients_that_are_not_contiguous() -> None:
    weight, grad = tensors([(6, 4, 3, 3), (6, 4, 3, 3)], 0)
    found, _ = stepped(dh.ClipAdaptive(0.1), [weight], [grad.to(memory_format=torch.channels_last)])
    assert close(found[0], agc(weight, grad, 0.1, 1e-3), 1e-12)
