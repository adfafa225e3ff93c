"""The codecs' kernels in Triton's interpreter, against torch's operations, bit for bit.

Triton decides when it is imported whether it interprets: ``test_kernels.py`` runs this in a process of its own.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import disthooks as dh
from disthooks import _hashing
from disthooks.saved.codecs import blocks, cast, quantize
from disthooks.saved.codecs.base import Codec

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CODECS: dict[str, tuple[Codec, blocks.CodeKind, int]] = {
    "8": (dh.Quantize(8), quantize._KINDS[8], 128),
    "4": (dh.Quantize(4), quantize._KINDS[4], 128),
    "8, nearest": (dh.Quantize(8, stochastic=False), quantize._KINDS[8], 128),
    "4, nearest, 64": (dh.Quantize(4, 64, False), quantize._KINDS[4], 64),
    "8, 2": (dh.Quantize(8, 2), quantize._KINDS[8], 2),
    "8, 10": (dh.Quantize(8, 10), quantize._KINDS[8], 10),
    "4, 10": (dh.Quantize(4, 10), quantize._KINDS[4], 10),
    "4, 4096": (dh.Quantize(4, 4096), quantize._KINDS[4], 4096),
    "e4m3": (dh.Cast(torch.float8_e4m3fn), cast._KINDS[torch.float8_e4m3fn], 128),
    "e5m2": (dh.Cast(torch.float8_e5m2), cast._KINDS[torch.float8_e5m2], 128),
}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def numbers(kind: str, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":  # infs, nans with payloads, -0.0, subnormals
        return torch.randint(0, 256, (n * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    x = torch.randn(n, generator=generator)
    if kind == "subnormal":
        return (x * torch.finfo(dtype).smallest_normal).to(dtype)
    if kind == "zeros":
        return torch.where(x > 1, x, 0).to(dtype)
    x = (x * torch.logspace(-6, 4, n)).to(dtype)
    if kind == "not finite":
        x[:: max(n // 3, 1)] = math.inf
        x[1 :: max(n // 2, 1)] = -math.inf
        x[n // 2] = math.nan
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=6, derandomize=True)
@given(
    kind=st.sampled_from(["bits", "normal", "not finite", "subnormal", "zeros"]),
    n=st.sampled_from([9, 127, 128, 129, 2047, 2048, 2049, 4500]),
    seed=st.integers(0, 99),
)
def test_codes_scales_and_numbers(name: str, dtype: torch.dtype, kind: str, n: int, seed: int) -> None:
    codec, codes, block = CODECS[name]
    x, key = numbers(kind, n, dtype, seed), (seed * 40503, -seed)
    drawn, _hashing.draw_key = _hashing.draw_key, lambda device: key
    try:
        (*parts,), spec = codec.encode(x)
    finally:
        _hashing.draw_key = drawn
    if parts[0] is x:  # it would not get smaller
        return
    stochastic = getattr(codec, "stochastic", False)
    mine, scales = blocks.encode(x, block, codes, key if stochastic else None)
    assert torch.equal(bits(scales), bits(parts[1]))
    assert torch.equal(bits(mine), bits(parts[0]))
    back, into = codec.decode(tuple(parts), spec), torch.empty_like(x)
    blocks.decode(mine, scales, into, block, codes)
    same = (back == into) | (back.isnan() & into.isnan())
    assert same.all(), (into[~same][:3], back[~same][:3])


@pytest.mark.parametrize("n", [1024, 1025, 4097, 16383, 17000])
def test_bools(n: int) -> None:
    bools = (torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.4).view(torch.uint8)
    run = -(-n // 128) * 16
    packed = blocks.pack(bools, run)
    filled = torch.zeros(8 * run, dtype=torch.uint8)
    filled[:n] = bools
    assert torch.equal(packed, sum(filled[k * run : (k + 1) * run] << k for k in range(8)).to(torch.uint8))
    assert torch.equal(blocks.unpack(packed, n), bools)
    assert torch.equal(blocks.pack(bools * 254, run), packed)  # whatever is not 0 is true
