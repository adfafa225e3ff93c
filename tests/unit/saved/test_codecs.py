"""Codecs by themselves: what comes back, how far off it is at most, and how small it was in between."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.saved.codecs import Codec
from disthooks.saved.codecs.base import relative_error
from tests.support.threads import together

# A new codec is one line here.
LOSSLESS = {
    "Compact": lambda: dh.Compact(),
}
LOSSY = {
    "Cast bf16": lambda: dh.Cast(torch.bfloat16),
    "Cast fp16": lambda: dh.Cast(torch.float16),
    "Cast e4m3": lambda: dh.Cast(torch.float8_e4m3fn),
    "Cast e5m2": lambda: dh.Cast(torch.float8_e5m2),
    "Quantize 8": lambda: dh.Quantize(8),
    "Quantize 4": lambda: dh.Quantize(4),
    "Quantize 8, nearest": lambda: dh.Quantize(8, stochastic=False),
    "Quantize 4, small blocks": lambda: dh.Quantize(4, block=6),
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128)
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = ((), (0,), (0, 3), (1,), (7,), (8,), (9,), (127,), (128,), (129,), (3, 43, 2), (4, 256), (1000,))


def made(kind: dict, name: str) -> Codec:
    return kind[name]()


def round_trip(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    back = codec.decode(*codec.encode(x))
    assert (back.dtype, back.shape, back.device) == (x.dtype, x.shape, x.device)
    return back


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().reshape(-1).view(torch.uint8).tolist()


def raw(shape: tuple[int, ...], dtype: torch.dtype, zeros: float, seed: int) -> torch.Tensor:
    """Random bits: nans with payloads, infs and -0.0 among them, and a share of zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    count = math.prod(shape)
    units = torch.randint(0, 256, (count, size), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        units &= 1
    units[torch.rand(count, generator=generator) < zeros] = 0
    return units.view(-1).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(deadline=None, max_examples=150)
@given(
    shape=st.sampled_from(SHAPES) | st.tuples(st.integers(0, 70), st.integers(0, 40)),
    dtype=st.sampled_from(FLOATS + OTHERS + EIGHT),
    zeros=st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)
def test_lossless_is_bit_exact(name: str, shape: tuple, dtype: torch.dtype, zeros: float, seed: int) -> None:
    codec = made(LOSSLESS, name)
    assert not codec.lossy
    x = raw(shape, dtype, zeros, seed)
    parts, _ = codec.encode(x)
    assert bits(round_trip(codec, x)) == bits(x)
    assert sum(part.nbytes for part in parts) < x.nbytes or (len(parts) == 1 and parts[0] is x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_compact_packs_zeros_and_keeps_signs(dtype: torch.dtype) -> None:
    x = torch.zeros(1001, dtype=dtype)
    special = torch.tensor([-0.0, math.inf, -math.inf, math.nan, 1.5], dtype=dtype)
    x[::200][:5] = special
    parts, _ = dh.Compact().encode(x)
    assert [part.nbytes for part in parts] == [126, 6 * dtype.itemsize - (dtype.itemsize if x[1000] == 0 else 0)]
    back = round_trip(dh.Compact(), x)
    assert bits(back) == bits(x)
    assert back[0].signbit()
    assert not back[1].signbit()


@pytest.mark.parametrize("count", [40, 41, 4000])
def test_compact_of_a_mask_that_was_bytes(count: int) -> None:
    """torch takes any byte but 0 for true, and one of them must not spill into others."""
    x = torch.randint(0, 256, (count,), dtype=torch.uint8) * torch.randint(0, 2, (count,), dtype=torch.uint8)
    assert torch.equal(round_trip(dh.Compact(), x.view(torch.bool)).view(torch.uint8), x.clamp(max=1))


def test_compact_gets_smaller_or_leaves_it() -> None:
    bools = torch.rand(8001) > 0.1
    assert [part.nbytes for part in dh.Compact().encode(bools)[0]] == [1001]
    for x in (torch.randn(1000), torch.arange(1000), torch.zeros(1000, dtype=torch.complex64), torch.tensor(True)):
        assert dh.Compact().encode(x)[0][0] is x
    relu = torch.relu(torch.randn(10_000))
    assert sum(part.nbytes for part in dh.Compact().encode(relu)[0]) < 0.56 * relu.nbytes
    barely = torch.ones(10_000)
    barely[:2700] = 0  # 73% and a bitmap of 3%
    assert dh.Compact().encode(barely)[0][0] is barely


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("block", [2, 10, 128])
@pytest.mark.parametrize("bits_", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bound_of_quantize_for_each_element(dtype: torch.dtype, bits_: int, block: int, stochastic: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    # From block to block as far apart as fp16 allows, so that a wrong scale would show.
    x = torch.randn(4007, generator=generator).mul_(torch.logspace(-3, 3, 4007)).to(dtype)
    codec = dh.Quantize(bits_, block=block, stochastic=stochastic)
    parts, _ = codec.encode(x)
    if parts[0] is x:
        assert (x.element_size() * 8 - bits_) * block <= 8 * max(4, x.element_size())  # scales cost what codes save
        return
    wide = x.double()
    blocks = torch.nn.functional.pad(wide, (0, -4007 % block)).view(-1, block)
    scale = (blocks.abs().amax(1, keepdim=True) / (2 ** (bits_ - 1) - 1)).expand_as(blocks).reshape(-1)[:4007]
    error = (round_trip(codec, x).double() - wide).abs()
    # What comes back is rounded to its dtype, and with stochastic rounding it may be a scale larger than x.
    rounding = torch.finfo(dtype).eps * (wide.abs() + scale) + 1e-6 * scale * (2 ** (bits_ - 1))
    assert (error <= scale * (1 if stochastic else 0.5) + rounding + torch.finfo(dtype).smallest_normal).all()
    assert error.max() > 0


def test_quantize_is_smaller() -> None:
    x = torch.randn(128 * 100)
    assert sum(part.nbytes for part in dh.Quantize(8).encode(x)[0]) == 128 * 100 + 400
    assert sum(part.nbytes for part in dh.Quantize(4).encode(x)[0]) == 64 * 100 + 400
    assert sum(part.nbytes for part in dh.Quantize(4).encode(x.double())[0]) == 64 * 100 + 800
    assert sum(part.nbytes for part in dh.Quantize(4, block=2).encode(x[:5])[0]) == 3 + 12
    for none in (torch.tensor(1.0), torch.tensor(1.0).half(), torch.randn(3).bfloat16(), torch.empty(0)):
        assert dh.Quantize(8).encode(none)[0][0] is none


@pytest.mark.parametrize("bits_", [8, 4])
def test_quantize_over_several_pieces(bits_: int) -> None:
    x = torch.randn(2**20 + 131)
    back = round_trip(dh.Quantize(bits_, stochastic=False), x)
    whole = torch.cat([round_trip(dh.Quantize(bits_, stochastic=False), part) for part in x.split(128 * 1024)])
    assert torch.equal(back, whole)


@pytest.mark.parametrize("bits_", [8, 4])
def test_stochastic_rounding_is_unbiased(bits_: int) -> None:
    """The mean of many draws within five standard errors; a bias of a hundredth of a step would be seen."""
    codec, draws = dh.Quantize(bits_, block=64), 4000
    x = torch.linspace(-1, 1, 64, dtype=torch.float64) ** 3
    step = 1 / (2 ** (bits_ - 1) - 1)
    mean = sum(round_trip(codec, x) for _ in range(draws)) / draws
    fraction = (x / step) % 1
    sigma = step * (fraction * (1 - fraction) / draws).sqrt() + 1e-4 * step
    assert ((mean - x).abs() < 5 * sigma).all()
    assert (mean - x).abs().mean() < step / 50
    nearest = round_trip(dh.Quantize(bits_, block=64, stochastic=False), x)
    assert not ((nearest - x).abs() < 5 * sigma).all()


def test_integers_and_zeros_stay_under_stochastic_rounding() -> None:
    x = torch.arange(-127, 127).float().repeat(4000)  # a million: one draw in 65536 would move one
    assert torch.equal(round_trip(dh.Quantize(8, block=254), x), x)
    assert torch.equal(round_trip(dh.Quantize(4), torch.zeros(1000)), torch.zeros(1000))
    assert (dh.Quantize(4).encode(torch.zeros(1000))[0][1] > 0).all()  # nothing is divided by zero


@pytest.mark.parametrize("name", [name for name in LOSSY if name.startswith(("Quantize", "Cast e"))])
@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=20)
@given(
    n=st.integers(1, 700),
    bad=st.lists(st.tuples(st.integers(0, 699), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=9),
    seed=st.integers(0, 1000),
)
def test_what_is_not_finite_comes_back_and_spoils_nothing(
    name: str, dtype: torch.dtype, n: int, bad: list, seed: int
) -> None:
    codec = made(LOSSY, name)
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for at, what in bad:
        x[at % n] = what
    back = round_trip(codec, x)
    finite = x.isfinite()
    assert torch.equal(back[~finite].nan_to_num(0.5), x[~finite].nan_to_num(0.5))  # infs with their sign
    assert torch.equal(back.isnan(), x.isnan())
    assert back[finite].isfinite().all()
    block = getattr(codec, "block", 128)
    rows = torch.nn.functional.pad(torch.where(finite, x, 0).double(), (0, -n % block)).view(-1, block)
    largest = rows.abs().amax(1, keepdim=True).expand_as(rows).reshape(-1)[:n]
    # In a block with one the step is a 6th or a 126th of the largest finite element; 2**-3 is that of float8_e5m2.
    step = {4: 1 / 6, 8: 1 / 126}.get(getattr(codec, "bits", 0), 2**-3)
    assert ((back.double() - x.double()).abs() <= (step + 2 * torch.finfo(dtype).eps) * largest)[finite].all()


def test_blocks_of_nothing_finite() -> None:
    for name in LOSSY:
        if name.startswith(("Quantize", "Cast e")):
            for bad in (math.nan, math.inf, -math.inf):
                x = torch.cat([torch.full((256,), bad), torch.ones(256)])
                assert torch.equal(round_trip(made(LOSSY, name), x).nan_to_num(7), x.nan_to_num(7)), (name, bad)


@pytest.mark.parametrize("name", [name for name in LOSSY if name != "Cast fp16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_largest_and_the_smallest_numbers(name: str, dtype: torch.dtype) -> None:
    codec, info = made(LOSSY, name), torch.finfo(dtype)
    if isinstance(codec, dh.Cast) and (codec.dtype is torch.bfloat16 or dtype is torch.float64):
        return  # rounds up to inf, as it always did; float64 has scales that float32 has not
    # A scale of these that is rounded up, times 127 or 7, is more than there is.
    large = torch.cat([torch.full((256,), info.max, dtype=dtype), torch.full((256,), -info.max, dtype=dtype)])
    back = round_trip(codec, large)
    assert torch.isfinite(back).all()
    torch.testing.assert_close(back, large, rtol=0.01, atol=0)
    small = torch.full((512,), info.smallest_normal / 64, dtype=dtype)
    back = round_trip(codec, small)
    assert torch.isfinite(back).all()
    assert back.abs().max() <= 1.01 * torch.finfo(torch.float32 if dtype is torch.bfloat16 else dtype).tiny


@pytest.mark.parametrize("name", LOSSY)
def test_indices_masks_and_complex_numbers_are_left_alone(name: str) -> None:
    codec = made(LOSSY, name)
    for dtype in OTHERS + EIGHT[:1]:
        x = raw((33, 31), dtype, 0.5, 0)
        if dtype not in EIGHT or getattr(codec, "bits", 8) == 8:
            assert codec.encode(x)[0][0] is x, dtype
    narrow = torch.randn(400).bfloat16()
    if isinstance(codec, dh.Cast) and codec.dtype.itemsize == 2:
        assert codec.encode(narrow)[0][0] is narrow


def test_cast_to_eight_bits() -> None:
    x = torch.randn(10_000) * 1e6
    for dtype, worst in ((torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)):
        parts, spec = dh.Cast(dtype).encode(x)
        assert [part.dtype for part in parts] == [dtype, torch.float32]
        assert sum(part.nbytes for part in parts) == 10_000 + 4 * 79
        normal = x.abs() > x.abs().max() / 1000
        back = dh.Cast(dtype).decode(parts, spec)
        assert ((back - x).abs() <= worst * x.abs() * 1.0001)[normal].all()
        assert (back - x).abs().max() > 0.1 * worst * x.abs().max()
        assert torch.equal(round_trip(dh.Cast(dtype), torch.zeros(64)), torch.zeros(64))


def test_torchs_random_numbers_are_not_advanced() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    codec = dh.Quantize(8)
    first, second = (codec.encode(torch.full((1000,), 0.3).cumsum(0))[0][0] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_repeats_a_process_and_ranks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from disthooks import _hashing

    def drawn(seed: int, rank: str = "0") -> torch.Tensor:
        monkeypatch.setattr(_hashing, "_counts", {})  # as in a new process
        monkeypatch.setenv("RANK", rank)
        torch.manual_seed(seed)
        return dh.Quantize(8).encode(torch.linspace(-1, 1, 1000))[0][0]

    with torch.random.fork_rng():
        assert torch.equal(drawn(1), drawn(1))
        assert not torch.equal(drawn(1), drawn(2))
        assert not torch.equal(drawn(1), drawn(1, "1"))


def test_threads_share_no_random_numbers() -> None:
    found: list[torch.Tensor] = []
    codec, x = dh.Quantize(8), torch.linspace(-1, 1, 10_000)

    def work() -> None:
        found.extend(codec.encode(x)[0][0] for _ in range(5))

    assert set(together([work] * 4)) == {None}
    assert len({tuple(codes.tolist()) for codes in found}) == 20


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dh.Cast(torch.float64), "Cast: dtype must be"),
        (lambda: dh.Quantize("8"), "bits must be 8 or 4"),
        (lambda: dh.Quantize(8, block=0), "block must be"),
        (lambda: dh.Quantize(8, block=7), "block must be"),
        (lambda: dh.Quantize(8, block=True), "block must be"),
        (lambda: dh.Compact(floats=1), "floats must be"),
    ],
)
def test_what_can_never_work(make: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_neither_a_default_device_nor_deterministic_algorithms_matter(name: str) -> None:
    codec, x = made(LOSSLESS | LOSSY, name), torch.relu(torch.randn(1001))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"), torch.no_grad():
            back = round_trip(codec, x)
            error = relative_error(back, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert float(error) <= (0.25 if codec.lossy else 0)


def test_relative_error() -> None:
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x) == 0
    assert relative_error(x + torch.tensor([0.0, 0.5]), x) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_error(torch.tensor([math.inf, 4.0]), x) == math.inf
    assert relative_error(torch.tensor([math.nan, 4.0]), x) == math.inf
    assert relative_error(torch.tensor([math.inf, 4.0]), torch.tensor([math.inf, 4.0])) == 0
    assert relative_error(torch.tensor([1e38, 1.1e38]), torch.tensor([1e38, 1e38])) == pytest.approx(0.1 / 2**0.5)
    assert relative_error(torch.empty(0), torch.empty(0)) == 0
    assert relative_error(torch.tensor([1j]), torch.tensor([2j])) == 0.5


@pytest.mark.skipif(not dh.memory.reset_peak_resident(), reason="the system does not tell the peak of resident memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relative_error_needs_little_memory(dtype: torch.dtype) -> None:
    """Beside 256 MiB of float32, less than 160 MiB; all at once it took 800, and from bfloat16 more."""
    exact = torch.ones(1, 8192, 8192, dtype=dtype)
    approximate = torch.full_like(exact, 1.5)
    relative_error(approximate[:, :16], exact[:, :16])
    before = dh.memory.resident()
    assert dh.memory.reset_peak_resident()
    assert float(relative_error(approximate, exact)) == pytest.approx(0.5)
    assert dh.memory.peak_resident() - before < 160 << 20
