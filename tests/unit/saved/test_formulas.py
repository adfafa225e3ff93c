"""Each formula gives the bits of what it stands for, whatever the dtype and the layout; and it is used."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from disthooks.saved.recompute.formulas import FORMULAS, Call, Finder, Formula
from disthooks.saved.recompute.graph import NodeReader
from disthooks.saved.report import SavedReport

Function = Callable[[torch.Tensor], torch.Tensor]
# One line for each: its name in reports, and a function of a matrix that nobody else saves the output of.
UNARY: dict[str, Function] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 1.5),
    "elu, selu": F.selu,
    "softplus": lambda x: F.softplus(x, 2, 10),
    "exp": torch.exp,
    "neg": torch.neg,
    "pow": lambda x: x**3,
    "add": lambda x: torch.add(x, x.sin(), alpha=2),
    "sub": lambda x: x - x.cos(),
    "mul": lambda x: x * x,
    "mul, a number": lambda x: x * 0.3,
    "div": lambda x: x / x.cos(),
    "cast": lambda x: x.to(torch.float64),
    "dropout": lambda x: torch.native_dropout(x, 0.1, True)[0],
    "clone": lambda x: x.t().contiguous(),
    "neg, behind views": lambda x: x.t().unsqueeze(1).permute(2, 1, 0).reshape(x.shape).neg(),
    "neg, expanded": lambda x: x.unsqueeze(0).expand(2, *x.shape).neg(),
    "add, of a sum": lambda x: (x + x.sin()) + x,
}
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch_norm": (lambda: nn.BatchNorm2d(8), (4, 8, 6, 6)),
    "batch_norm, plain": (lambda: nn.BatchNorm1d(8, affine=False), (16, 8)),
    "layer_norm": (lambda: nn.LayerNorm(24, eps=1e-3), (16, 24)),
    "layer_norm, no bias": (lambda: nn.LayerNorm((4, 24), bias=False), (16, 4, 24)),
    "group_norm": (lambda: nn.GroupNorm(2, 8), (4, 8, 6, 6)),
}


def _is_named(name: str, report: SavedReport) -> bool:
    return any(name.partition(",")[0] in how for how in report.recomputed_by)


def _used(
    run: Function,
    x: torch.Tensor,
    module: nn.Module | None,
    folder: pathlib.Path,
    recompute: dh.Recompute = dh.Recompute(),  # noqa: B008
) -> SavedReport:
    """Its gradient is the one without hooks; what became of the tensors."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            kept = x.sin()  # saves x
            return kept.sum() + run(x).sin().sum()  # saves what is to be computed again

    whole = Whole()
    torch.manual_seed(1)
    (truth,) = torch.autograd.grad(whole(x), x)
    line = pipeline(recompute, dh.OnDisk(folder), at_least=0)
    with dh.save_activations(whole, "", line) as saving:
        for _ in range(3):
            torch.manual_seed(1)
            (grad,) = torch.autograd.grad(whole(x), x)
            assert torch.equal(grad, truth)
        assert saving.report().held == 0
        return saving.report()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_a_function(name: str, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    x = (torch.randn(33, 65) * 3).to(dtype).requires_grad_()
    report = _used(UNARY[name], x, None, tmp_path)
    assert _is_named(name, report), report.recomputed_by
    assert report.differed == {}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_a_norm(name: str, training: bool, frozen: bool, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module = make().train(training)
    for weight in module.parameters():
        nn.init.normal_(weight)
        weight.requires_grad_(not frozen)
    x = torch.randn(shape).requires_grad_()
    report = _used(module, x, module, tmp_path)
    assert _is_named(name, report), report.recomputed_by
    assert report.differed == {}


#: Nodes that no function here makes. Those of a device; views that only the compiler, or torch's C++ code, makes.
ELSEWHERE = {
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    "FusedRmsNormBackward0",
    "AliasBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
}
#: The versions of torch with which this table was checked, and the formulas that do not act there.
INACTIVE: dict[str, set[str]] = {"2.11": set(), "2.13": set(), "2.14": set(), "2.15": set()}
OTHERS: dict[str, Function] = {
    "mm": lambda x: x @ x.t(),
    "bmm": lambda x: x.view(1, *x.shape) @ x.view(1, *x.shape).mT,
    "addmm": lambda x: torch.addmm(x.sum(1), x, x.t()),
    "baddbmm": lambda x: torch.baddbmm(x.sum(1), x.view(1, *x.shape), x.view(1, *x.shape).mT),
    "views": lambda x: x.unsqueeze(0).squeeze(0).transpose(0, 1).neg() + x.unsqueeze(0).squeeze((0,)).t().neg(),
}


def test_every_formula_acts(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """A node that lost an argument, as group norm lost eps in torch 2.14, gives right bits and saves no memory."""
    acted: set[str] = set()

    def noted(node: str, formula: Formula) -> Formula:
        def read(reader: NodeReader, find: Finder) -> Call:
            call = formula(reader, find)
            acted.add(node)
            return call

        return read

    for node, formula in FORMULAS.items():
        monkeypatch.setitem(FORMULAS, node, noted(node, formula))
    torch.manual_seed(0)
    for make, shape in MODULES.values():
        module = make()
        _used(module, torch.randn(shape).requires_grad_(), module, tmp_path)
    for function in (*UNARY.values(), *OTHERS.values()):
        _used(function, torch.randn(33, 33).requires_grad_(), None, tmp_path, dh.Recompute(products=2))
    version = ".".join(torch.__version__.split(".")[:2])
    assert set(FORMULAS) - acted - ELSEWHERE == INACTIVE.get(version, set())
    assert len(acted) >= 40
