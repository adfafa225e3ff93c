"""Law 3, once, at scale: thousands of views, steps that share a tensor, and reads, counted and not timed."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import disthooks as dh
from disthooks._tensors import StorageRegion
from disthooks.saved import contents, packed


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts how often regions, handles and restored contents were looked at."""
    counts = {"regions": 0, "handles": 0, "brought": 0}
    nbytes = StorageRegion.nbytes.fget
    part, bring = packed.Readers.drop_far_readers, contents.StoredContent._restore

    def counted_nbytes(region: StorageRegion) -> int:
        counts["regions"] += 1
        assert nbytes is not None
        return int(nbytes(region))

    def counted_part(self: Any, *args: Any) -> None:
        counts["handles"] += len(self.handles)
        part(self, *args)

    def counted_bring(self: Any, *args: Any) -> torch.Tensor:
        counts["brought"] += 1
        return bring(self, *args)

    monkeypatch.setattr(StorageRegion, "nbytes", property(counted_nbytes))
    monkeypatch.setattr(packed.Readers, "drop_far_readers", counted_part)
    monkeypatch.setattr(contents.StoredContent, "_restore", counted_bring)
    return counts


def _run(folder: pathlib.Path, forward: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """The gradient of the leaf in the second of two steps, in which the store reads ahead."""
    store, found = dh.OnDisk(folder, in_flight="256 KiB"), None
    for _ in range(2):
        with dh.saving(store, at_least=0) as saved:
            loss, leaf = forward()
        store.wait()
        leaf.grad = None
        loss.backward()
        assert saved.report().held == 0
        assert saved.report().moved > 0
        found = leaf.grad
    return found


class Takes(torch.autograd.Function):
    """Saves all that it is given; its backward reads the saved tensors as often as it is told."""

    @staticmethod
    def forward(ctx: Any, times: int, *given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*given)
        ctx.times = times
        return given[0].sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        seen = [ctx.saved_tensors for _ in range(ctx.times - 1)]
        del seen
        for _ in range(ctx.times - 1):
            for tensor in ctx.saved_tensors:
                tensor.mul_(0)  # nobody else sees what it writes into the tensor
        return (
            None,
            *(
                grad * tensor if needed else None
                for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
            ),
        )


def _views(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = torch.linspace(-1, 1, count * 1024).view(count, 1024).requires_grad_()
    return Takes.apply(1, *(leaf * 1.0).unbind(0)), leaf


def _steps(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = (torch.eye(32) * 1.1).requires_grad_()
    weight, h = leaf * 0.9, torch.ones(8, 32)
    for _ in range(count):
        h = torch.tanh(h @ weight)
    return h.sum(), leaf


def _masked(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = torch.linspace(-1, 1, 512).view(8, 64).requires_grad_()
    mask, h = (torch.arange(512) % 3 > 0).view(8, 64).float() * 1.01, leaf  # a vector would stand alone
    for _ in range(count):
        h = torch.tanh(h * mask)
    return h.sum(), leaf


@pytest.mark.parametrize("program", [_views, _steps, _masked])
def test_four_times_as_many_tensors_take_four_times_as_many_looks(
    program: Callable[[int], tuple[torch.Tensor, torch.Tensor]], looks: dict[str, int], tmp_path: pathlib.Path
) -> None:
    found = {}
    for count in (100, 400):
        looks.update(dict.fromkeys(looks, 0))
        gradient = _run(tmp_path, lambda: program(count))  # noqa: B023
        loss, leaf = program(count)
        loss.backward()
        assert gradient is not None
        assert leaf.grad is not None
        assert torch.equal(gradient, leaf.grad)
        found[count] = dict(looks)
    for name, few in found[100].items():
        # Each look at all handles is one of a few: the logarithm comes on top.
        assert found[400][name] <= 4 * few * 1.6 + 256, (name, found)


class Gathers(torch.autograd.Function):
    """Saves all that it is given; its backward writes into each saved tensor, and notes the memory it was given."""

    given: ClassVar[list[tuple[int, int]]] = []  # the number of storages, and their bytes

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return sum(tensors, torch.zeros(())).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
        Gathers.given.append((len(storages), sum(storages.values())))
        for number, tensor in enumerate(saved):
            tensor.mul_(number + 1)
        return tuple(tensor.clone() for tensor in saved)


def _rows(base: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return base.unbind(0)


def _columns(base: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return base.unbind(1)


def _columns_twice(base: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return base.unbind(1) + base.unbind(1)


@pytest.mark.any_device
@pytest.mark.parametrize("views", [_rows, _columns, _columns_twice])
@pytest.mark.parametrize("place", ["disk", "cpu", "kept"])
def test_a_function_that_saves_all_views_of_a_storage_is_given_about_as_many_bytes(
    views: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], place: str, tmp_path: pathlib.Path
) -> None:
    def step() -> torch.Tensor | None:
        leaf = torch.linspace(-1, 1, 64 * 64 * 64).view(64, 64, 64).requires_grad_()
        loss = Gathers.apply(*views(leaf * 2))
        loss.backward()
        return leaf.grad

    expected = step()
    Gathers.given.clear()
    to = dh.OnDisk(tmp_path) if place == "disk" else dh.OnCpu()
    with dh.saving(to, at_least="1 GiB" if place == "kept" else 0):
        found = step()
    assert expected is not None
    assert found is not None
    # `_columns_twice` writes into each column twice where torch alone gives both views the same memory.
    assert views is _columns_twice or torch.equal(found, expected)
    (_, nbytes), whole = Gathers.given[0], 64**3 * 4
    assert nbytes <= (3 if views is _columns_twice else 2) * whole, Gathers.given
