"""The cache of shapes changes no figure, whatever was predicted before in the same process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.predict.fake.fake_run import fake_run
from disthooks.predict.fake.shape_cache import ShapeCache
from tests.support import oracle, zoo


def figures(name: str, device: str) -> tuple[Any, ...]:
    said = dh.explain(zoo.ZOO[name], device=device, loss=oracle.loss_of)
    return said.saved_bytes, said.peak_bytes, said.by_module, said.by_operator


@pytest.mark.first_tier(name=("resnet18", "lstm"))
@pytest.mark.parametrize("name", ["gpt2", "resnet18", "lstm"])
def test_predictions_for_two_devices_do_not_change_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShapeCache, "_results", {})
    cpu, gpu_after_cpu = figures(name, "cpu"), figures(name, "h100")
    assert ShapeCache._results
    monkeypatch.setattr(ShapeCache, "_results", {})
    assert figures(name, "h100") == gpu_after_cpu
    assert figures(name, "cpu") == cpu


def test_torch_decides_what_a_view_does_to_memory_that_was_freed() -> None:
    """FSDP frees the memory of a parameter and keeps the storage. ``unbind`` leaves it as it is."""
    with fake_run():
        x = torch.empty(8, 8)
        assert len(x.unbind()) == 8  # now the cache knows the result
        x.untyped_storage().resize_(0)
        assert len(x.unbind()) == 8
    assert x.untyped_storage().nbytes() == 0
