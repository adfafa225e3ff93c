"""Laws 1 and 3 for every dtype that torch has: through every store and through autograd, bit for bit."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.functions import Save
from tests.support.stores.faulty import line

pytestmark = pytest.mark.any_device
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)} - QUANTIZED, key=str)


def example(dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Random bits as a tensor of ``dtype``."""
    count = torch.Size(size).numel()
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).view(size)


def _is_stiff(dtype: torch.dtype) -> bool:
    """Whether torch has no kernel that copies ``dtype`` to another layout: such as `int4`."""
    try:
        example(dtype, 2, 2).t().contiguous()
    except (NotImplementedError, RuntimeError):
        return True
    return False


def _bits(tensor: torch.Tensor) -> list:
    """Bytes of every element in order, without an operator on its dtype."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    size, step = tensor.dtype.itemsize, tensor.stride()
    return storage.as_strided(
        (*tensor.shape, size), (*(n * size for n in step), 1), tensor.storage_offset() * size
    ).tolist()


def same(a: torch.Tensor, b: torch.Tensor, layout: bool = True) -> bool:
    """Alike in every bit, and in layout."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or (layout and a.stride() != b.stride()):
        return False
    return _bits(a) == _bits(b)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "steps": lambda x: x[::2, 1::3],
    "column": lambda x: x[:, 2],
    "expanded": lambda x: x[:1].expand(5, 12),
    "windows": lambda x: x.unfold(1, 4, 2),
    "zero-dim": lambda x: x[3, 4],
    "empty": lambda x: x[:0],
    "small": lambda x: x[2:4, 3:5].t(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("store", [lambda folder: dh.OnDisk(folder), lambda folder: dh.OnCpu()], ids=["disk", "cpu"])
def test_every_dtype_comes_back_from_a_store(store: Callable, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    place, x, is_stiff = store(tmp_path), example(dtype, 8, 12), _is_stiff(dtype)
    for name, view in VIEWS.items():
        if is_stiff and not view(x).is_contiguous():
            continue
        ticket = place.put(view(x))
        assert same(place.get(ticket), view(x), layout=False), name
        place.drop(ticket)
    assert place.budget.held == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["disk", "copies"])
def test_every_dtype_goes_through_autograd(kind: str, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    to, account = line(kind, tmp_path)
    x = example(dtype, 8, 12)
    views = [view(x) for view in VIEWS.values()]
    with dh.saving(to) as saved:
        y = Save.apply(torch.zeros(1, requires_grad=True), *views)
    for view, back in zip(views, y.grad_fn.saved_tensors, strict=True):
        assert same(back, view)
    y.backward()
    assert (saved.report().held, account()) == (0, 0)
    assert saved.report().stored > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_view_of_every_dtype_goes_alone(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    """Less than half of a storage is stored as a region, which is copied element by element."""
    for name, view in VIEWS.items():
        x = view(example(dtype, 8, 12))
        with dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=0)) as saved:
            y = Save.apply(torch.zeros(1, requires_grad=True), x)
        assert same(y.grad_fn.saved_tensors[0], x)
        if name == "whole":
            assert saved.report().moved == x.nbytes


def test_quantized_tensors_are_kept(tmp_path: pathlib.Path) -> None:
    x = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)
    with dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=0)) as saved:
        y = Save.apply(torch.zeros(1, requires_grad=True), x)
    assert torch.equal(y.grad_fn.saved_tensors[0].int_repr(), x.int_repr())
    assert saved.report().kept_by == {"quantized": 16}
