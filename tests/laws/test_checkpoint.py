"""Checkpointing on either side: its inputs are stored when it is inside, and it is left to work when it is outside."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import disthooks as dh
from tests.support.models import Block, identical


def _everything(folder: pathlib.Path) -> dh.saving:
    return dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder)))


def _gradients(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Of the input and the parameters, from fixed seeds."""
    model.zero_grad()
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(1)
    run(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _selective() -> object:
    """Keep matrix products, recompute the rest."""
    keep = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


KINDS: dict[str, dict] = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": _selective},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_inside_has_its_inputs_stored(kind: str, tmp_path: pathlib.Path) -> None:
    """The useful order: of all that the block saves, only the checkpoint's input goes to the store."""
    block = Block()
    x_bytes = 4 * 32 * 64 * 4
    truth = _gradients(block, lambda x: checkpoint(block, x.sin(), **KINDS[kind]))
    saved = _everything(tmp_path)

    def run(x: torch.Tensor) -> torch.Tensor:
        with saved:
            return checkpoint(block, x.sin(), **KINDS[kind])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert identical(_gradients(block, run), truth)
    # x and sin(x), and the state of the random numbers that a checkpoint saves
    assert 2 * x_bytes <= saved.report().moved < 2.5 * x_bytes
    assert saved.report().held == 0


@pytest.mark.parametrize("how", ["wrapper", "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_outside_makes_hooks_step_back(kind: str, how: str, tmp_path: pathlib.Path) -> None:
    """Nothing is stored that would be computed again; recompute is not lost; the remedy is said once."""
    block, calls = Block(), []
    block.norm1.register_forward_hook(lambda *_: calls.append(1))
    truth = _gradients(block, lambda x: checkpoint(block, x, **KINDS[kind]))
    recomputed = len(calls)
    assert recomputed == 2
    attached: dh.SaveWith | dh.Saving
    if how == "wrapper":
        model = attached = dh.SaveToDisk(block, tmp_path)
    else:
        model, attached = block, dh.save_activations(block, "", dh.OnDisk(tmp_path))
    calls.clear()
    with pytest.warns(UserWarning, match=r"stepped back in 'Block'.*SaveWith\(checkpointed"):
        assert identical(_gradients(block, lambda x: checkpoint(model, x, **KINDS[kind])), truth)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        assert identical(_gradients(block, lambda x: checkpoint(model, x, **KINDS[kind])), truth)
    assert len(calls) == 2 * recomputed
    report = attached.report()
    assert (report.calls, report.stored, report.kept) == (0, 0, 0)
    assert report.passed["backward" if kind == "reentrant" else "checkpoint"] >= 2


def test_attached_modules_under_a_checkpoint_under_ours(tmp_path: pathlib.Path) -> None:
    """Ours, a checkpoint, ours again: the inner one steps back, the outer one stores the checkpoint's input."""
    block = Block()
    truth = _gradients(block, lambda x: checkpoint(block, x, use_reentrant=False))
    block.mlp = dh.SaveToDisk(block.mlp, tmp_path)
    saved = _everything(tmp_path)

    def run(x: torch.Tensor) -> torch.Tensor:
        with saved:
            return checkpoint(block, x, use_reentrant=False)

    with pytest.warns(UserWarning, match="stepped back in 'Sequential'"):
        assert identical(_gradients(block, run), truth)
    assert block.mlp.report().stored == 0
    assert saved.report().moved > 0
