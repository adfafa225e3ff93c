"""Checksums: every bit and every place counts, in every dtype; and the sums of them over ranks that agree are zero."""

from __future__ import annotations

import pytest
import torch

from disthooks import _hashing
from disthooks._hashing import Checksums

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


def of(tensor: torch.Tensor) -> int:
    return int(Checksums()(tensor))


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


def test_contents_count_and_not_how_they_lie() -> None:
    tensor = torch.randn(7, 9)
    assert of(tensor) == of(tensor.t().contiguous().t()) != of(tensor.t())
    whole = torch.randn(64)
    assert of(whole[1:4]) == of(whole[1:4].clone())  # begins at no multiple of 8 bytes
    z = torch.randn(5, dtype=torch.complex64)
    assert of(z.conj()) == of(z.conj().resolve_conj()) != of(z)
    assert of(torch.tensor(3.0)) == of(torch.tensor([3.0]))
