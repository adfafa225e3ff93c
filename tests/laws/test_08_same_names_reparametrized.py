"""Law 8, same names, for what torch.nn.utils does to a module inside a wrapper; on a wrapper it is an error."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import disthooks as dh
from disthooks.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")


def _twice(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", amount=0.3)
    prune.random_unstructured(module, "weight", amount=0.3)


THROUGH: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": nn.utils.weight_norm,
    "l1_unstructured": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    "global_unstructured": lambda module: prune.global_unstructured(
        [(module, "weight"), (module, "bias")], prune.L1Unstructured, amount=0.4
    ),
    "twice": _twice,
}
REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "spectral_norm": nn.utils.spectral_norm,
    "register_parametrization": lambda module: parametrize.register_parametrization(module, "weight", nn.Tanh()),
    "of a buffer": lambda module: parametrize.register_parametrization(module, "scale", nn.Tanh()),
    "parametrizations.orthogonal": parametrizations.orthogonal,
}


class Scaled(nn.Linear):
    """A Linear with a buffer, which saves something large."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.scale).tanh()


def _build() -> nn.Module:
    torch.manual_seed(0)
    return Scaled()


def _change(function: Callable[[nn.Module], object], module: nn.Module) -> None:
    torch.manual_seed(1)
    function(module)


def _trained(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """The gradients of three steps, and what the model has after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for i in range(3):
        torch.manual_seed(10 + i)
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return [*found, {name: value.clone() for name, value in model.state_dict().items()}]


def _same(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("where", ["before", "inside"])
@pytest.mark.parametrize("name", [*THROUGH, *REFUSED])
def test_a_module_inside_a_wrapper_is_reparametrized(name: str, where: str, tmp_path: pathlib.Path) -> None:
    function = {**THROUGH, **REFUSED}[name]
    plain, module = _build(), _build()
    _change(function, plain)
    if where == "before":
        _change(function, module)
    wrapper = dh.SaveWith(module, dh.OnDisk(tmp_path), at_least=0)
    if where == "inside":
        _change(function, wrapper.unwrapped)
    assert _same(_trained(wrapper), _trained(plain))
    assert wrapper.report().moved > 3 * 32 * 64 * 4
    wrapper.load_state_dict(plain.state_dict())
    assert _same(_trained(wrapper), _trained(plain))


@pytest.mark.parametrize("name", [*THROUGH, *REFUSED])
def test_on_a_wrapper_it_is_an_error_that_changes_nothing(name: str, tmp_path: pathlib.Path) -> None:
    plain, inner = _build(), _build()
    model = dh.SaveWith(inner, dh.OnDisk(tmp_path), at_least=0)
    before = {module: (type(module), set(vars(module))) for module in model.modules()}
    with pytest.raises((UsageError, KeyError, ValueError)):
        {**THROUGH, **REFUSED}[name](model)
    assert {module: (type(module), set(vars(module))) for module in model.modules()} == before
    assert list(inner._parameters) == list(plain._parameters)
    assert not any(
        module._forward_pre_hooks or (module is not inner and module._parameters) for module in model.modules()
    )
    assert _same(_trained(model), _trained(plain))


@pytest.mark.parametrize("function", ["register_parameter", "register_buffer"])
def test_what_is_registered_on_a_wrapper_says_where_to_register_it(function: str, tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(_build(), dh.OnDisk(tmp_path))
    with pytest.raises(UsageError, match=r"before it is wrapped, or on `wrapper\.unwrapped`"):
        getattr(model, function)("gain", nn.Parameter(torch.ones(1)))
    assert "gain" not in model.state_dict()


def test_parametrizations_of_the_module_inside_stay_there(tmp_path: pathlib.Path) -> None:
    plain, model = _build(), dh.SaveWith(_build(), dh.OnDisk(tmp_path), at_least=0)
    for module in (plain, model.unwrapped):
        _change(parametrizations.spectral_norm, module)
    before = copy.deepcopy(model.state_dict())
    for function in (parametrize.remove_parametrizations, REFUSED["register_parametrization"]):
        with pytest.raises(ValueError, match="does not have a param"):
            function(model, "weight") if function is parametrize.remove_parametrizations else function(model)
    assert _same([model.state_dict()], [before])
    assert parametrize.type_before_parametrizations(model) is dh.SaveWith
    assert _same(_trained(model), _trained(plain))
