"""Law 1, exact: a lossless pipeline gives gradients bit-identical to none."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.models import CASES, build, identical, step, stores
from tests.support.switch import KIND

KINDS = list(stores("/tmp"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_block_of_code(case: str, kind: str, tmp_path: pathlib.Path) -> None:
    model, x = build(case)
    truth = step(model, x)
    saved = dh.saving(stores(tmp_path)[kind])
    assert identical(step(model, x, saved), truth)
    _really_happened(kind, saved.report())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_in_place(case: str, kind: str, tmp_path: pathlib.Path) -> None:
    model, x = build(case)
    truth = step(model, x)
    with dh.save_activations(model, "*", stores(tmp_path)[kind]) as saving:
        assert identical(step(model, x), truth)
    _really_happened(kind, saving.report())


@pytest.mark.parametrize("kind", KINDS)
def test_wrappers(kind: str, tmp_path: pathlib.Path) -> None:
    model, x = build("transformer")
    truth = step(model, x)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = dh.SaveWith(block, stores(tmp_path)[kind])
    assert identical(step(model, x), truth)
    for block in model.blocks:
        _really_happened(kind, block.report())


def _really_happened(kind: str, report: object) -> None:
    if kind == "cpu" and KIND == "cpu":  # the tensors are in CPU memory already
        assert report.kept_by["in place"] > 0
        assert report.moved == 0
    else:
        assert report.stored > 1000
        assert report.loaded > 1000
        assert report.moved == (0 if kind == "functions" else report.stored)  # ours cannot know what theirs do
    assert report.held == 0


def test_training_in_lower_precision_and_twice_a_step(tmp_path: pathlib.Path) -> None:
    """Autocast, gradient accumulation and an optimizer: the same losses over three steps."""

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for i in range(6):
            torch.manual_seed(i)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    model, x = build("transformer")
    plain = train(copy.deepcopy(model))
    with dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path)) as saving:
        assert train(model) == plain
    assert saving.report().moved > 0
    assert saving.report().recast > 0


def test_a_lossy_codec_is_close_and_leaves_integers_alone(tmp_path: pathlib.Path) -> None:
    model, x = build("transformer")
    truth = step(model, x)
    exact = dh.saving(dh.OnDisk(tmp_path))
    step(model, x, exact)
    lossy = dh.saving(dh.pipeline(dh.Cast(torch.bfloat16), dh.OnDisk(tmp_path)))
    got = step(model, x, lossy)
    assert not identical(got, truth)
    for a, b in zip(got, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * b.abs().max().item())
    assert lossy.report().moved < 0.6 * exact.report().moved


def test_pack_functions_see_each_saved_tensor_once_as_torch_gives_it() -> None:
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        seen.append(tensor)
        return len(seen) - 1

    weight = nn.Parameter(torch.ones(3))
    x = torch.randn(3)
    with dh.saving(dh.Functions(pack, lambda index: seen[index])) as saved:
        y = weight * x
    assert {id(t) for t in seen} == {id(weight), id(x)} or [id(t) for t in seen] == [id(x)]
    assert y.grad_fn._saved_other.data_ptr() == x.data_ptr()
    y.sum().backward()
    assert torch.equal(weight.grad, x)
    assert saved.report().stored == sum(t.nbytes for t in seen)
