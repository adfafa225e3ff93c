"""Law 1, exact, beside other tools.

Nested attachments, the hooks of others, checkpoints, adapters, lazy modules.

The gradients are those without hooks, or an error says what to do.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import disthooks as dh
from disthooks.saved.attach import SavingHandle
from disthooks.saved.pipeline import pipeline
from tests.support import no_warning
from tests.support.models import Block, Tiny, identical, step, tokens

pytestmark = pytest.mark.any_device


# --- Nested attachments and the hooks of others


def test_the_inner_attachment_wins_and_the_outer_one_says_so(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    truth = step(model, tokens())
    model.blocks[0].mlp = dh.SaveWith(model.blocks[0].mlp, dh.OnDisk(tmp_path), at_least=4096)
    inner = model.blocks[0].mlp
    with dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path)) as outer:
        assert identical(step(model, tokens()), truth)
    assert outer.report().inner == 1
    assert inner.report().inner == 0
    assert inner.report().moved > 0
    assert "calls inside that another attachment took: 1" in str(outer.report())
    assert outer.report().calls == 2


def test_a_module_that_calls_itself_is_one_attachment(tmp_path: pathlib.Path) -> None:
    """Nested modules of one attachment share their contents, and are not counted as modules of another attachment."""

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor, deep: bool = True) -> torch.Tensor:
            return self(super().forward(x), deep=False) if deep else super().forward(x)

    model, x = Twice(64, 64), torch.randn(64, 64)
    truth = step(model, x)
    with dh.save_activations(model, "", dh.OnDisk(tmp_path)) as saving:
        assert identical(step(model, x), truth)
    assert (saving.report().calls, saving.report().inner) == (2, 0)


def _everything(folder: pathlib.Path) -> dh.saving:
    return dh.saving(pipeline(dh.OnDisk(folder), at_least=0))


def _gradients(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the input and the parameters, from fixed seeds."""
    model.zero_grad()
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(1)
    run(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_hooks_of_others_work_outside_and_inside(tmp_path: pathlib.Path) -> None:
    block = Block()
    truth = _gradients(block, block)
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    theirs = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, lambda t: t)
    wrapped = dh.SaveWith(block, dh.OnDisk(tmp_path), at_least=4096)

    def outside(x: torch.Tensor) -> torch.Tensor:
        with theirs():
            return wrapped(x.sin()).cos()

    def inside(x: torch.Tensor) -> torch.Tensor:
        with _everything(tmp_path), theirs():
            return block(x)

    plain = _gradients(block, lambda x: block(x.sin()).cos())
    assert identical(_gradients(block, outside), plain)
    assert len(seen) == 2  # the sine and the cosine: what the block saves is ours
    assert wrapped.report().moved > 0
    assert identical(_gradients(block, inside), truth)
    assert len(seen) > 10


# --- Functions, modules of all kinds, torch.func


class Tied(nn.Module):
    """One weight in two layers, one layer called three times, and a cell unrolled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 64), nn.Linear(64, 64)
        self.leave.weight = self.enter.weight
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.enter(x).tanh()
        state = (x[:, 0] * 0, x[:, 0] * 0)
        for t in range(5):
            state = self.cell(x[:, t], state)
        return self.leave(state[0])


@pytest.mark.parametrize("pattern", ["", "?*"])
def test_modules_that_share_weights_and_are_called_often_are_exact(pattern: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    truth = _gradients(model, model)
    with dh.save_activations(model, pattern, pipeline(dh.OnDisk(tmp_path), at_least=0)) as saving:
        assert identical(_gradients(model, model), truth)
    assert saving.report().moved > 10_000
    assert saving.report().held == 0


@pytest.mark.second_tier
def test_adapters_of_the_real_peft_are_exact(tmp_path: pathlib.Path) -> None:
    """Adapters put in before and after attaching; their own class checks still find the layers."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")

    def build(attach: str) -> tuple[nn.Module, SavingHandle | None]:
        torch.manual_seed(0)
        model, saving = Tiny(), None
        if attach == "before":
            saving = dh.save_activations(model, ["blocks.*.mlp", "blocks.*.qkv"], dh.OnDisk(tmp_path))
        torch.manual_seed(1)
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["qkv", "mlp.0", "mlp.2"], r=4, lora_dropout=0.1)
        )
        if attach == "after":
            saving = dh.save_activations(model, "*.blocks.*", dh.OnDisk(tmp_path))
        return model, saving

    truth = step(build("")[0], tokens())
    for attach in ("before", "after"):
        model, saving = build(attach)
        assert identical(step(model, tokens()), truth)
        assert saving is not None
        assert saving.report().moved > 0
        assert saving.report().held == 0


def test_a_functional_gradient_inside_says_what_to_do(tmp_path: pathlib.Path) -> None:
    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda y: super(Inner, self).forward(y).square().sum())(x)

    model = nn.Sequential(nn.Linear(8, 8), Inner(8, 8))
    truth = step(model, torch.ones(4, 8))
    with (
        dh.save_activations(model, "1", dh.OnDisk(tmp_path)),
        pytest.raises(dh.errors.AttachError, match=r"'1' calls torch\.func\.grad.*attach to other modules"),
    ):
        model(torch.ones(4, 8))
    with dh.save_activations(model, "0", dh.OnDisk(tmp_path)):
        assert identical(step(model, torch.ones(4, 8)), truth)


# --- Modules that get their weights in the first call


def _lazy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(32, 32, 1), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(64), nn.Tanh(), nn.Linear(64, 64)
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("pattern", ["", "?", nn.modules.lazy.LazyModuleMixin, "0"])
def test_lazy_modules_are_attached_and_materialise_in_the_first_call(
    pattern: str | type, autocast: bool, tmp_path: pathlib.Path
) -> None:
    """Batch norm makes its running statistics in that call.

    It writes them uncounted, so they are kept as buffers in that call already.
    """

    def run(model: nn.Module) -> list[list[torch.Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return [_gradients(model, model) for _ in range(2)]

    truth, model, reports = run(_lazy()), _lazy(), []
    with dh.save_activations(model, pattern, pipeline(dh.OnDisk(tmp_path), at_least=0)) as saving:
        for i, wanted in enumerate(truth):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert identical(_gradients(model, model), wanted)
            reports.append(saving.report())
            assert reports[-1].calls == len(saving.names) * (i + 1)
    assert [type(part).__name__ for part in model[1:4]] == ["BatchNorm1d", "Tanh", "Linear"]
    first, both = reports
    assert both.moved == 2 * first.moved > 0
    assert both.recast == 2 * first.recast
    assert {why: 2 * nbytes for why, nbytes in first.kept_by.items()} == both.kept_by
    assert first.kept_by.get("buffer", 0) == (0 if pattern == "0" else 2 * 32 * 4)


def test_gradients_of_a_lazy_model_name_the_remedy() -> None:
    model = _lazy()
    for attach in (
        lambda: dh.on_gradient(model, "*", torch.zeros_like),
        lambda: dh.gradients(model, torch.optim.SGD([torch.ones(1)], 0.1), stats=[dh.stats.Norm()]),
    ):
        with pytest.raises(dh.errors.AttachError, match=r"'1\.weight' has no shape yet.*run the model once"):
            attach()


# --- Activation checkpoints, inside the hooks and around them


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


@pytest.mark.parametrize("how", ["wrapper", "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_outside_makes_hooks_step_back(kind: str, how: str, tmp_path: pathlib.Path) -> None:
    """Tensors that the checkpoint computes again are not stored.

    The checkpoint still works, and one warning names the remedy.
    """
    block, calls = Block(), []
    block.norm1.register_forward_hook(lambda *_: calls.append(1))
    truth = _gradients(block, lambda x: checkpoint(block, x, **KINDS[kind]))
    recomputed = len(calls)
    assert recomputed == 2
    attached: dh.SaveWith | SavingHandle
    if how == "wrapper":
        model = attached = dh.SaveWith(block, dh.OnDisk(tmp_path), at_least=4096)
    else:
        model, attached = block, dh.save_activations(block, "", dh.OnDisk(tmp_path))
    calls.clear()
    with pytest.warns(UserWarning, match=r"stepped back in 'Block'.*SaveWith\(checkpointed"):
        assert identical(_gradients(block, lambda x: checkpoint(model, x, **KINDS[kind])), truth)
    with no_warning():  # the warning comes once
        assert identical(_gradients(block, lambda x: checkpoint(model, x, **KINDS[kind])), truth)
    assert len(calls) == 2 * recomputed
    report = attached.report()
    assert (report.calls, report.stored, report.kept) == (0, 0, 0)
    assert report.passed["backward" if kind == "reentrant" else "checkpoint"] >= 2
