"""Checksums: every bit and every place counts, in every dtype; and the sums of them over ranks that agree are zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from disthooks import _hashing
from disthooks._hashing import Checksums
from disthooks.report.watch.replicas import _sketch, check_replicas

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int64,
    torch.bool,
]


def of(tensor: torch.Tensor, rows: int | None = None) -> int:
    return int(Checksums(rows)(tensor))


def raw(count: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(0))
    return made.view(dtype) if dtype != torch.bool else made % 2 == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = raw(21, dtype)  # no multiple of 8 bytes
    found = {of(tensor)}
    content = tensor.view(torch.uint8)
    bits = (0, 4, 7) if dtype != torch.bool else (0,)
    for byte in range(content.numel()):
        for bit in bits:
            content[byte] ^= 1 << bit
            found.add(of(tensor))
            content[byte] ^= 1 << bit
    assert len(found) == 1 + content.numel() * len(bits)


@pytest.mark.parametrize("a", [0, 3, 9, _hashing._ROW - 1, 2 * _hashing._ROW, 2 * _hashing._ROW + 7])
def test_places_count_also_across_rows(a: int) -> None:
    tensor = torch.full((9 * _hashing._ROW + 3,), 1.0)
    tensor[a] = -1.0
    before = of(tensor)
    for b in (1, 10, _hashing._ROW, 2 * _hashing._ROW + a, 4 * _hashing._ROW + a):
        swapped = tensor.clone()
        swapped[[a, b]] = tensor[[b, a]]
        assert of(swapped) != before, b


def test_two_signs_do_not_cancel() -> None:
    tensor = torch.ones(1000)
    seen = set()
    for i in range(0, 1000, 50):
        for j in range(i + 1, 1000, 50):
            changed = tensor.clone()
            changed[[i, j]] *= -1
            seen.add(of(changed))
    assert len(seen) == 210
    assert of(tensor) not in seen


def test_zeros_and_nans_are_told_by_their_bits() -> None:
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert of(quiet) != of(other)
    assert of(quiet) == of(quiet.clone())


@pytest.mark.parametrize("size", [0, 1, 5, _hashing._ROW * 2, _hashing._ROW * 2 + 1, _hashing._ROW * 9 + 5])
@pytest.mark.parametrize("rows", [2, 3, 64])
def test_rows_at_a_time_change_nothing(size: int, rows: int) -> None:
    tensor = torch.randn(size)
    assert of(tensor) == of(tensor, rows)


def test_contents_count_and_not_how_they_lie() -> None:
    tensor = torch.randn(7, 9)
    assert of(tensor) == of(tensor.t().contiguous().t()) != of(tensor.t())
    whole = torch.randn(64)
    assert of(whole[1:4]) == of(whole[1:4].clone())  # begins at no multiple of 8 bytes
    z = torch.randn(5, dtype=torch.complex64)
    assert of(z.conj()) == of(z.conj().resolve_conj()) != of(z)
    assert of(torch.tensor(3.0)) == of(torch.tensor([3.0]))


def sent(model: nn.Module, rank: int, ranks: tuple[int, ...], twins: list[tuple[int, ...]]) -> torch.Tensor:
    """What ``rank`` would send if the parameters had copies on ``twins``."""
    return _sketch(torch.stack([Checksums()(p.detach()) for p in model.parameters()]), twins, rank, ranks, signature=7)


def test_the_totals_of_ranks_that_agree_are_zero_whatever_the_groups() -> None:
    torch.manual_seed(0)
    ranks = tuple(range(24))
    grids = [(24, 1), (6, 4), (4, 6), (2, 12)]
    layers: dict[tuple[int, int], nn.Linear] = {}  # one for each part of each grid
    total, spoilt = torch.zeros(513, dtype=torch.int64), torch.zeros(513, dtype=torch.int64)
    for rank in ranks:
        parts = [layers.setdefault((i, rank % n), nn.Linear(2, 2, bias=False)) for i, (_, n) in enumerate(grids)]
        twins = [tuple(r for r in ranks if r % n == rank % n) for _, n in grids]
        model = nn.Sequential(*parts)
        total += sent(model, rank, ranks, twins)
        before = model[2].weight.detach().clone()
        with torch.no_grad():
            model[2].weight.view(torch.int32)[0, 0] ^= rank == 17
        spoilt += sent(model, rank, ranks, twins)
        with torch.no_grad():
            model[2].weight.copy_(before)
    assert not total.any()
    assert spoilt.nonzero().flatten().tolist() == [2]


def test_one_process_has_nothing_to_compare() -> None:
    report = check_replicas(nn.DataParallel(nn.Linear(2, 2)))
    assert not report.ok
    assert str(report) == "DataParallel, 1 rank: 0 tensors are replicated; nothing to compare"
