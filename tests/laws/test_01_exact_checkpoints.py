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
from disthooks.saved.pipeline import pipeline

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
    line = pipeline(dh.OnDisk(tmp_path), selective_checkpoints=False)
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


HANDED: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "position": lambda layer, h: checkpoint(layer, h, use_reentrant=False),
    "keyword": lambda layer, h: checkpoint(layer, x=h, use_reentrant=False),
    "partial": lambda layer, h: checkpoint(functools.partial(layer, x=h), use_reentrant=False),
    "partial position": lambda layer, h: checkpoint(functools.partial(layer, h), use_reentrant=False),
    "tuple": lambda layer, h: checkpoint(lambda pair: layer(pair[0]), (h,), use_reentrant=False),
    "tuple by keyword": lambda layer, h: checkpoint(lambda pair: layer(pair[0]), pair=(h,), use_reentrant=False),
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


KEYWORDS = pytest.mark.skipif(not hasattr(CheckpointFrame, "save_inputs"), reason="torch 2.11 saves keywords elsewhere")


@KEYWORDS
@pytest.mark.parametrize("handed", HANDED)
def test_the_input_of_a_checkpoint_is_stored_however_it_is_handed_over(handed: str, tmp_path: pathlib.Path) -> None:
    model, x = Chain(handed), torch.randn(ROWS, WIDTH, requires_grad=True)
    arguments = [x, *model.parameters()]
    truth = torch.autograd.grad(model(x), arguments)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with dh.save_activations(model, "", pipeline(dh.OnDisk(tmp_path), at_least="16 KiB")) as saving:
            for _ in range(2):
                model.inputs.clear()
                loss = model(x)
                alive = sum(each() is not None for each in model.inputs)
                assert all(map(torch.equal, torch.autograd.grad(loss, arguments), truth))
    report = saving.report()
    if handed.startswith(("variable", "tuple")):
        assert alive == LAYERS
        assert report.kept_by["held by a checkpoint"] == 2 * LAYERS * PRODUCT
        (message,) = told
        assert "as an argument of the checkpoint" in str(message.message)
    else:
        assert (alive, told) == (0, [])
        assert report.stored >= 2 * LAYERS * PRODUCT
    assert report.held == 0


@KEYWORDS
@pytest.mark.parametrize("changed", ["inside", "afterwards"])
def test_a_keyword_that_requires_no_gradient_may_be_changed_in_place(changed: str, tmp_path: pathlib.Path) -> None:
    layer, x = Layer(), torch.randn(ROWS, WIDTH, requires_grad=True)

    def run() -> torch.Tensor:
        mask = torch.ones(ROWS, WIDTH)

        def masked(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = layer(h * 2)
            if changed == "inside":
                mask.zero_()
            return out

        out = checkpoint(masked, x * 1, mask=mask, use_reentrant=False)
        mask.zero_()
        return out.mean()

    truth = torch.autograd.grad(run(), [x, *layer.parameters()])
    with dh.saving(dh.OnDisk(tmp_path)) as saving:
        loss = run()
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, *layer.parameters()]), truth))
    assert saving.report().stored == PRODUCT


@KEYWORDS
def test_a_keyword_that_requires_a_gradient_may_not_be_changed(tmp_path: pathlib.Path) -> None:
    """Without hooks the layer would run again on what the change left, and the gradient would be wrong."""
    layer, x = Layer(), torch.randn(ROWS, WIDTH, requires_grad=True)
    h = x * 1
    with dh.saving(dh.OnDisk(tmp_path)):
        loss = checkpoint(layer, x=h, use_reentrant=False).square().mean()
    h.zero_()
    with pytest.raises(dh.errors.MutationError, match="clone"):
        loss.backward()


def test_a_sparse_variable_is_no_error(tmp_path: pathlib.Path) -> None:
    layer, x = Layer(), torch.randn(ROWS, WIDTH, requires_grad=True)

    def run() -> torch.Tensor:
        sparse = (torch.eye(WIDTH) * x.sum()).to_sparse()
        out = checkpoint(lambda: torch.sparse.mm(sparse, layer.first.weight).tanh(), use_reentrant=False)
        return out.square().mean()

    truth = torch.autograd.grad(run(), [x, layer.first.weight])
    with dh.saving(dh.OnDisk(tmp_path)):
        loss = run()
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, layer.first.weight]), truth))


@pytest.mark.parametrize("takes", [True, False])
def test_an_error_inside_a_selective_checkpoint_is_the_users(takes: bool, tmp_path: pathlib.Path) -> None:
    layer, x = Layer(), torch.randn(ROWS, WIDTH, requires_grad=True)

    def fails(h: torch.Tensor) -> torch.Tensor:
        layer(h)
        raise ValueError("of the user")

    plan = pipeline(dh.OnDisk(tmp_path), selective_checkpoints=takes)
    with pytest.raises(ValueError, match="of the user"), dh.saving(plan) as saving:
        checkpoint(fails, x, use_reentrant=False, context_fn=CONTEXT)
    assert saving.report().held == 0


@pytest.mark.parametrize("case", ["selective", "selective, left", "keyword", "partial position", "tuple"])
def test_a_prediction_knows_what_a_checkpoint_holds(case: str, tmp_path: pathlib.Path) -> None:
    if case in HANDED and not hasattr(CheckpointFrame, "save_inputs"):
        pytest.skip("torch 2.11 saves keywords elsewhere")

    def build() -> tuple[nn.Module, torch.Tensor]:
        return Chain(case) if case in HANDED else Net("partial"), torch.randn(ROWS, WIDTH, requires_grad=True)

    plan = pipeline(dh.OnDisk(tmp_path), selective_checkpoints=case != "selective, left")
    said = dh.explain(build, plan=plan, device="cpu", loss=lambda out: out.square().mean())
    model, x = build()
    with warnings.catch_warnings(), dh.save_activations(model, "", plan) as saving:
        warnings.simplefilter("ignore")
        model(x).square().mean().backward()
    (predicted,), measured = said.reports, saving.report()
    # A prediction does not count what stays inside of a checkpoint; its memory is in the peak.
    kept_by = {what: n for what, n in measured.kept_by.items() if "checkpoint" not in what}
    assert (predicted.stored, predicted.shared, predicted.kept_by) == (measured.stored, measured.shared, kept_by)
