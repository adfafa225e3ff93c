"""Law 1, Exact: what a selective checkpoint keeps goes to the store, same bits, whoever calls the checkpoint."""

from __future__ import annotations

import functools
import pathlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import disthooks as dh
from disthooks._torch import CheckpointFrame, hooks_around_checkpoint

ROWS, WIDTH, LAYERS = 64, 128, 3
PRODUCT = ROWS * WIDTH * 4  # bytes of the output of one matrix product, which is kept
#: Whether this torch gives what a selective checkpoint keeps to hooks.
GIVES = hooks_around_checkpoint is not None


def keep_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXT = functools.partial(create_selective_checkpoint_contexts, keep_products)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).tanh()).sigmoid()


class Net(nn.Module):
    """Its layers under a selective checkpoint, called as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Layer() for _ in range(LAYERS)]
        if how == "checkpoint_wrapper":  # of torch, which FSDP's users and torchtitan take
            layers = [checkpoint_wrapper(layer, context_fn=CONTEXT, preserve_rng_state=False) for layer in layers]
        self.layers, self.how = nn.ModuleList(layers), how
        self.run: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False, context_fn=CONTEXT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            # transformers puts a partial of the checkpoint on each layer, and calls it with the layer's own __call__.
            x = self.run(layer.__call__, x) if self.how == "partial" else layer(x)
        return x


def grads(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


@pytest.mark.parametrize("how", ["partial", "checkpoint_wrapper"])
@pytest.mark.parametrize("store", [dh.OnDisk, dh.Tiered], ids=["disk", "tiers"])
def test_kept_tensors_go_to_the_store(how: str, store: Any, tmp_path: pathlib.Path) -> None:
    model, x = Net(how), torch.randn(ROWS, WIDTH)
    truth = grads(model, x)
    to = store(tmp_path) if store is dh.OnDisk else dh.Tiered(dh.OnDevice("64 KiB"), dh.OnDisk(tmp_path))
    with warnings.catch_warnings(record=True) as told, dh.save_activations(model, "", to) as saving:
        warnings.simplefilter("always")
        for _ in range(3):
            assert all(map(torch.equal, grads(model, x), truth))
    report, kept = saving.report(), 3 * 2 * LAYERS * PRODUCT
    assert report.held == 0
    inputs = 3 * (LAYERS - 1) * PRODUCT  # of the layers; the first one's input is not stored by every store
    assert kept + inputs <= report.stored + report.shared <= kept + inputs + 6 * PRODUCT
    assert "selective checkpoint" not in report.kept_by
    assert not told


@pytest.mark.parametrize("how", ["partial", "checkpoint_wrapper"])
def test_the_pipeline_may_leave_them(how: str, tmp_path: pathlib.Path) -> None:
    model, x = Net(how), torch.randn(ROWS, WIDTH)
    truth = grads(model, x)
    line = dh.pipeline(dh.OnDisk(tmp_path), selective_checkpoints=False)
    with warnings.catch_warnings(record=True) as told, dh.save_activations(model, "", line) as saving:
        warnings.simplefilter("always")
        assert all(map(torch.equal, grads(model, x), truth))
    assert not told
    assert saving.report().kept_by["selective checkpoint"] == 2 * LAYERS * PRODUCT


@pytest.mark.skipif(not GIVES, reason="this version of torch gives them to no hook")
def test_what_the_caller_of_the_checkpoint_chose_is_done(tmp_path: pathlib.Path) -> None:
    layer, x = Layer(), torch.randn(ROWS, WIDTH, requires_grad=True)
    stored = []
    for chosen in (False, True):
        with dh.saving(dh.OnDisk(tmp_path)) as saving:
            y = checkpoint(layer, x, use_reentrant=False, context_fn=CONTEXT, respect_saved_tensors_hooks=chosen)
        y.sum().backward()
        stored.append(saving.report().stored)
    assert stored[1] - stored[0] == 2 * PRODUCT


@pytest.mark.skipif(not GIVES, reason="this version of torch has no such warning")
def test_hooks_that_are_not_ours_are_warned_as_before() -> None:
    layer, x = Layer(), torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(), pytest.warns(FutureWarning, match="selective activation checkpoint"):
        checkpoint(layer, x, use_reentrant=False, context_fn=CONTEXT).sum().backward()


def test_a_prediction_knows_them(tmp_path: pathlib.Path) -> None:
    def build() -> tuple[nn.Module, torch.Tensor]:
        return Net("partial"), torch.randn(ROWS, WIDTH, requires_grad=True)

    said = dh.explain(build, plan=dh.OnDisk(tmp_path), device="cpu", loss=lambda out: out.square().mean())
    model, x = build()
    with warnings.catch_warnings(), dh.save_activations(model, "", dh.OnDisk(tmp_path)) as saving:
        warnings.simplefilter("ignore")
        model(x).square().mean().backward()
    (predicted,), measured = said.reports, saving.report()
    assert (predicted.stored, predicted.shared, predicted.kept_by) == (
        measured.stored,
        measured.shared,
        measured.kept_by,
    )


HANDED: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "position": lambda layer, h: checkpoint(layer, h, use_reentrant=False),
    "keyword": lambda layer, h: checkpoint(layer, x=h, use_reentrant=False),
    "partial": lambda layer, h: checkpoint(functools.partial(layer, x=h), use_reentrant=False),
    "variable": lambda layer, h: checkpoint(lambda: layer(h), use_reentrant=False),
}


class Chain(nn.Module):
    def __init__(self, handed: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.handed = nn.ModuleList(Layer() for _ in range(LAYERS)), handed
        self.inputs: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in self.layers:
            self.inputs.append(weakref.ref(x.untyped_storage()))
            x = HANDED[self.handed](layer, x)
        return x.square().mean()


@pytest.mark.skipif(not hasattr(CheckpointFrame, "save_inputs"), reason="torch 2.11 saves keywords elsewhere")
@pytest.mark.parametrize("handed", HANDED)
def test_the_input_of_a_checkpoint_is_stored_however_it_is_handed_over(handed: str, tmp_path: pathlib.Path) -> None:
    model, x = Chain(handed), torch.randn(ROWS, WIDTH, requires_grad=True)
    arguments = [x, *model.parameters()]
    truth = torch.autograd.grad(model(x), arguments)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with dh.save_activations(model, "", dh.pipeline(dh.AtLeast("16 KiB"), dh.OnDisk(tmp_path))) as saving:
            for _ in range(2):
                model.inputs.clear()
                loss = model(x)
                alive = sum(each() is not None for each in model.inputs)
                assert all(map(torch.equal, torch.autograd.grad(loss, arguments), truth))
    report = saving.report()
    if handed == "variable":
        assert alive == LAYERS
        assert report.kept_by["variable of a checkpoint"] == 2 * LAYERS * PRODUCT
        (message,) = told
        assert "pass them as arguments of the checkpoint" in str(message.message)
    else:
        assert (alive, told) == (0, [])
        assert report.stored >= 2 * LAYERS * PRODUCT
    assert report.held == 0
