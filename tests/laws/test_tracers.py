"""Export, traces and transforms of models with hooks: what they make is as if no hooks were there."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import disthooks as dh
from tests.support.models import Tiny, tokens

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def plain() -> Tiny:
    torch.manual_seed(0)
    return Tiny().eval()


def in_place(folder: pathlib.Path) -> Tiny:
    dh.save_activations(model := plain(), "blocks.*", dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder)))
    return model


def wrapped(folder: pathlib.Path) -> Tiny:
    model = plain()
    model.blocks = nn.ModuleList(dh.SaveToDisk(block, folder, at_least=0) for block in model.blocks)
    return model


ways = pytest.mark.parametrize("attached", [in_place, wrapped])


@ways
@pytest.mark.parametrize("strict", [False, True])
def test_export_gives_the_program_of_the_plain_model(
    attached: Callable[..., Tiny], strict: bool, tmp_path: Any
) -> None:
    got, want = (torch.export.export(m, (tokens(),), strict=strict) for m in (attached(tmp_path), plain()))
    assert str(got.graph).replace("__checkpoint_wrapped_module", "") == str(want.graph)
    assert got.graph_signature.parameters == want.graph_signature.parameters


@ways
def test_make_fx_records_nothing_of_ours(attached: Callable[..., Tiny], tmp_path: Any) -> None:
    def operators(model: nn.Module) -> list[str]:
        graph = make_fx(lambda x: torch.autograd.grad(model(x).sum(), list(model.parameters())))(tokens()).graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    assert operators(attached(tmp_path)) == operators(plain())


@ways
def test_symbolic_and_jit_traces_compute_the_same(attached: Callable[..., Tiny], tmp_path: Any) -> None:
    model, wanted = attached(tmp_path), plain()(tokens())
    assert torch.equal(torch.fx.symbolic_trace(model)(tokens()), wanted)
    with pytest.warns(UserWarning, match=r"torch\.jit\.trace records the forward of .* without the hooks"):
        traced = torch.jit.trace(model, (tokens(),), check_trace=False)
    assert torch.equal(traced(tokens()), wanted)


def test_a_script_of_an_attached_model_is_told_and_can_be_wrapped(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Sequential(nn.Tanh(), nn.Linear(64, 4))), torch.randn(8, 16)
    wanted = str(torch.jit.script(model).code)
    line = dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))
    with dh.save_activations(model, ["0", "1"], line) as saving:
        with pytest.warns(UserWarning, match=r"torch\.jit\.script records the forward of '0' without") as told:
            scripted = torch.jit.script(model)
        assert len([it for it in told if "disthooks" in str(it.message)]) == 1
        assert str(scripted.code) == wanted
        assert saving.report().passed == {"torch.jit.script": 2}
        scripted(x).sum().backward()
        assert saving.report().calls == 0
    wrapped = dh.SaveWith(scripted, line)
    wrapped(x).sum().backward()
    assert wrapped.report().moved > 0


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacfwd, torch.func.jacrev])
def test_transforms_with_weights_that_train(transform: Any, tmp_path: Any) -> None:
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)), torch.randn(8, 16)
    wanted = transform(copy.deepcopy(model))(x)
    saving = dh.save_activations(model, nn.Linear, dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path)))
    assert torch.equal(transform(model)(x), wanted)
    assert set(saving.report().passed) == {"hooks disabled"}
