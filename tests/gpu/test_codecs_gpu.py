"""The codecs on a GPU: the bits of the CPU, no wait for the device, torch's random numbers where they were."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import disthooks as dh
from disthooks import _hashing
from disthooks.saved.codecs.base import Codec, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CODECS: dict[str, Codec] = {
    "8": dh.Quantize(8),
    "4": dh.Quantize(4),
    "8, nearest": dh.Quantize(8, stochastic=False),
    "4, blocks of 10": dh.Quantize(4, block=10),
    "8, blocks of 2": dh.Quantize(8, block=2),
    "4, blocks of 8192": dh.Quantize(4, block=8192),
    "8, blocks of 10000": dh.Quantize(8, block=10000),
    "e4m3": dh.Cast(torch.float8_e4m3fn),
    "e5m2": dh.Cast(torch.float8_e5m2),
}
SIZES = (9, 129, 2048, 2049, 100_003)


@contextmanager
def no_wait() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def numbers(kind: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    if kind == "bits":  # infs, nans with payloads, -0.0, subnormals
        return torch.randint(0, 256, (n * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    x = torch.randn(n, generator=generator) * torch.logspace(-6, 4, n)
    if kind == "not finite":
        x[:: max(n // 3, 1)] = math.inf
        x[1 :: max(n // 2, 1)] = -math.inf
        x[n // 2] = math.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", ["normal", "not finite", "bits"])
def test_the_bits_are_those_of_the_cpu(
    name: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = CODECS[name]
    monkeypatch.setattr(_hashing, "draw_key", lambda device: (12345, -678))
    for n in SIZES:
        x = numbers(kind, n, dtype)
        there = x.cuda()
        (*host,), spec = codec.encode(x)
        (*device,), spec_there = codec.encode(there)
        assert spec == spec_there
        assert (host[0] is x) == (device[0] is there)
        for mine, theirs in zip(host, device, strict=True):
            if mine is not x:
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8).cpu()), (n, codec)
        back, back_there = codec.decode(tuple(host), spec), codec.decode(tuple(device), spec).cpu()
        assert torch.equal(back.isnan(), back_there.isnan())
        assert torch.equal(back[~back.isnan()], back_there[~back.isnan()]), (n, codec)


@pytest.mark.parametrize("off", [1, 2, 3])
def test_what_begins_at_an_odd_place(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hashing, "draw_key", lambda device: (5, 6))
    for dtype in FLOATS[:3]:
        x = numbers("normal", 5000, dtype)
        for codec in CODECS.values():
            host = codec.decode(*codec.encode(x[off:]))
            assert torch.equal(codec.decode(*codec.encode(x.cuda()[off:])).cpu(), host)
    bools = torch.rand(5000) < 0.5
    assert torch.equal(dh.Compact().decode(*dh.Compact().encode(bools.cuda()[off:])).cpu(), bools[off:])


@pytest.mark.parametrize("n", [1, 9, 1000, 1023, 1024, 1025, 16_384, 1_000_003])
def test_bools(n: int) -> None:
    bools = (torch.rand(n) < 0.4).cuda()
    with no_wait():
        parts, spec = dh.Compact().encode(bools)
        back = dh.Compact().decode(parts, spec)
    assert torch.equal(back, bools)
    assert n < 2 or parts[0].numel() == (n + 7) // 8


@pytest.mark.parametrize("name", [*CODECS, "Compact"])
def test_nobody_waits(name: str) -> None:
    codec = CODECS.get(name, dh.Compact())
    for dtype in FLOATS:
        x = torch.randn(3001, 7, device="cuda").to(dtype)
        x[0, 0] = math.inf
        codec.decode(*codec.encode(x))  # compiled
        with no_wait():
            back = codec.decode(*codec.encode(x))
            error = relative_error(back, x)
        assert float(error) < 0.3
        assert torch.equal(back.isinf(), x.isinf())


def test_torchs_random_numbers_are_not_advanced() -> None:
    state = torch.cuda.get_rng_state()
    x = torch.randn(5000).cuda()
    first, second = (dh.Quantize(8).encode(x)[0][0] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one() -> None:
    x = torch.randn(100_000, device="cuda:1")
    for codec in CODECS.values():
        assert relative_error(codec.decode(*codec.encode(x)), x) < 0.3


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40 << 30,
    reason="needs a GPU of 40 GB",
)
def test_more_elements_than_32_bits_count() -> None:
    n = 2**31 + 12_345
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-200:] = torch.arange(200, device="cuda")
    for codec in (dh.Quantize(8, stochastic=False), dh.Cast(torch.float8_e4m3fn)):
        back = codec.decode(*codec.encode(x))
        assert (back[-200:] - x[-200:]).abs().max() <= 13
        assert back[-100:].min() > 80
        assert not back[:-200].any()
        del back
    mask = x != 0
    back = dh.Compact().decode(*dh.Compact().encode(mask))
    assert torch.equal(back, mask)
