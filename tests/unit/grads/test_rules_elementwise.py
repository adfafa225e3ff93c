"""Noise that is noise, and the same however a parameter is split; Scale and Sanitize as torch has them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import disthooks as dh
from disthooks._hashing import GOLDEN, mix64_, signed64
from disthooks.engines.base import Part, Shard
from disthooks.grads.rules import Work
from disthooks.grads.rules import elementwise as module
from disthooks.grads.rules.elementwise import normal, places
from tests.support.rules import stepped

CPU = torch.device("cpu")
N = 60_000


def noise_of(shape: Any, step: int = 0, name: str = "w", seed: int = 0, part: Part | None = None) -> torch.Tensor:
    part = part or Part.whole(torch.Size(shape))
    grad = torch.zeros(part.local_shape, dtype=torch.float64)
    shard = Shard(name, nn.Parameter(grad.clone()), True, "whole", part)
    dh.Noise(1.0, seed).rewrite(Work([shard], [grad], [], {}, step=step))
    return grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_gaussian(dtype: torch.dtype) -> None:
    """Mean, variance, skewness and kurtosis to five standard errors, and Kolmogorov's distance to one in 10,000."""
    found = normal(torch.arange(N), (3, -7), dtype).double()
    for power, truth, error in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert abs(float(found.pow(power).mean()) - truth) < 5 * error / math.sqrt(N)
    assert 3.5 < float(found.abs().max()) < 6.8
    ranked = torch.special.ndtr(found.sort().values)
    assert float((ranked - (torch.arange(N) + 0.5) / N).abs().max()) < 2.2 / math.sqrt(N)


def test_nothing_is_correlated_with_anything() -> None:
    start = noise_of((N,))
    others = {
        "neighbour": start.roll(1),
        "far": start.roll(4096),
        "step": noise_of((N,), step=1),
        "parameter": noise_of((N,), name="v"),
        "seed": noise_of((N,), seed=1),
        "negative seed": noise_of((N,), seed=-1),
    }
    for name, other in others.items():
        for power in (1, 2):  # squares too: numbers may be uncorrelated and depend on each other all the same
            a, b = start.pow(power), other.pow(power)
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(N), name
    assert torch.equal(start, noise_of((N,)))


def test_streams_of_different_keys_do_not_overlap() -> None:
    """With one key, mixing counters that are apart by a multiple of the increment gives one sequence, shifted."""
    golden = signed64(GOLDEN)
    assert not set(normal(torch.arange(100), (golden * 0, 5), torch.float64).tolist()) & set(
        normal(torch.arange(100), (golden, 6), torch.float64).tolist()
    )


def test_the_mixing_function_is_splitmix() -> None:
    """The first outputs for seed 1234567 (Rosetta Code, and Java's SplittableRandom)."""
    counters = torch.arange(1, 4) * signed64(GOLDEN) + 1234567
    found = [value % 2**64 for value in mix64_(counters).tolist()]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_places_are_those_of_the_part(shape: list[int], data: st.DataObject) -> None:
    box = []
    for size in shape:
        first = data.draw(st.integers(0, size - 1))
        box.append((first, data.draw(st.integers(1, size - first))))
    total = math.prod(shape)
    first = data.draw(st.integers(0, total - 1))
    ends = (first, data.draw(st.integers(first + 1, total)))
    for part in (Part(torch.Size(shape), box=tuple(box)), Part(torch.Size(shape), span=ends)):
        truth = part.indices(CPU).reshape(-1)
        start = data.draw(st.integers(0, len(truth) - 1))
        count = data.draw(st.integers(1, len(truth) - start))
        assert places(part, start, count, CPU).tolist() == truth[start : start + count].tolist()


def test_a_part_has_the_noise_of_the_whole() -> None:
    whole = noise_of((6, 5))
    assert torch.equal(noise_of((), part=Part(torch.Size([6, 5]), box=((2, 3), (1, 2)))), whole[2:5, 1:3])
    assert torch.equal(noise_of((), part=Part(torch.Size([6, 5]), span=(7, 21))), whole.reshape(-1)[7:21])


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_show(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.zeros(3, 4, 2, 5)
    whole = stepped(dh.Noise(0.5), [grad], [grad])[0][0]
    monkeypatch.setattr(module, "_CHUNK", chunk)
    for layout in (torch.contiguous_format, torch.channels_last):
        assert torch.equal(stepped(dh.Noise(0.5), [grad], [grad.to(memory_format=layout)])[0][0], whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_noise_in_every_dtype(dtype: torch.dtype) -> None:
    grad = torch.full((50, 40), 4.0, dtype=dtype)
    grad[0, 0] = math.nan
    (found,), _ = stepped(dh.Noise(0.25, seed=9), [grad], [grad])
    assert found.dtype == dtype
    assert found[0, 0].isnan()
    rest = found.double().view(-1)[1:] - 4
    assert abs(float(rest.std()) / 0.25 - 1) < 0.08
    assert abs(float(rest.mean())) < 0.03


def test_torchs_generators_are_not_moved() -> None:
    state = torch.get_rng_state()
    noise_of((10,))
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_that_would_part_replicas_and_complex_gradients() -> None:
    weight = torch.ones(2)
    with pytest.raises(dh.errors.UsageError, match=r"replicas.*at='local'"):
        stepped(dh.Noise(1.0, alike=False), [weight], [weight])
    with pytest.raises(dh.errors.UsageError, match="'0' is complex"):
        stepped(dh.Noise(1.0), [weight.to(torch.complex64)], [weight.to(torch.complex64)])
    shard = Shard("flat", nn.Parameter(torch.ones(3)), True, "sharded", None)
    with pytest.raises(dh.errors.UsageError, match="does not tell which elements of 'flat' are on this rank"):
        dh.Noise(1.0).check([shard])


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
