"""Law 8, same names, and law 15, for what torch.nn.utils does to a module: on a wrapper, and inside one."""

from __future__ import annotations

import copy
import pathlib
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import disthooks as dh
from disthooks.errors import UsageError
from tests.support.replicas import replicate

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")


def _twice(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", amount=0.3)
    prune.random_unstructured(module, "weight", amount=0.3)


THROUGH: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": nn.utils.weight_norm,
    "weight_norm of all": lambda module: nn.utils.weight_norm(module, dim=None),
    "identity": lambda module: prune.identity(module, "weight"),
    "l1_unstructured": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    "random_unstructured": lambda module: prune.random_unstructured(module, "bias", amount=0.5),
    "ln_structured": lambda module: prune.ln_structured(module, "weight", amount=0.5, n=2, dim=0),
    "random_structured": lambda module: prune.random_structured(module, "weight", amount=0.5, dim=1),
    "custom_from_mask": lambda module: prune.custom_from_mask(module, "weight", torch.eye(64)),
    "global_unstructured": lambda module: prune.global_unstructured(
        [(module, "weight"), (module, "bias")], prune.L1Unstructured, amount=0.4
    ),
    "twice": _twice,
}
REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "spectral_norm": nn.utils.spectral_norm,
    "register_parametrization": lambda module: parametrize.register_parametrization(module, "weight", nn.Tanh()),
    "of a buffer": lambda module: parametrize.register_parametrization(module, "scale", nn.Tanh()),
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
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


def _line(folder: pathlib.Path) -> dh.Pipeline:
    return dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder))


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
    wrapper = dh.SaveWith(module, _line(tmp_path))
    if where == "inside":
        _change(function, wrapper.unwrapped)
    assert _same(_trained(wrapper), _trained(plain))
    assert wrapper.report().moved > 3 * 32 * 64 * 4
    wrapper.load_state_dict(plain.state_dict())
    assert _same(_trained(wrapper), _trained(plain))


@pytest.mark.parametrize("wrappers", [1, 2])
@pytest.mark.parametrize("name", THROUGH)
def test_a_wrapper_is_reparametrized_as_the_plain_module(name: str, wrappers: int, tmp_path: pathlib.Path) -> None:
    """Parameters, hooks and checkpoints are those of the plain module. So is what is left when the change is undone."""
    plain, model = _build(), _build()
    inner, line = model, _line(tmp_path)
    for _ in range(wrappers):
        model = dh.SaveWith(model, line)
    for module in (plain, model):
        _change(THROUGH[name], module)
    assert list(inner._parameters) == list(plain._parameters)
    assert list(inner._buffers) == list(plain._buffers)
    assert not any(module is not inner and (module._parameters or module._buffers) for module in model.modules())
    assert _same(_trained(model), _trained(plain))
    assert (model if wrappers == 1 else model.unwrapped).report().moved > 3 * 32 * 64 * 4
    saved = {key: torch.randn_like(value) for key, value in plain.state_dict().items()}
    for module in (plain, model):
        module.load_state_dict(saved)
    assert _same(_trained(model), _trained(plain))
    with pytest.raises(UsageError, match="pruning"):
        dh.unwrap(model)
    for module in (plain, model):
        if "norm" in name:
            nn.utils.remove_weight_norm(module)
        else:
            for tensor in ("weight", "bias"):
                if hasattr(module, tensor + "_orig"):
                    prune.remove(module, tensor)
    assert sorted(model.state_dict()) == sorted(_build().state_dict())
    assert _same(_trained(model), _trained(plain))
    assert dh.unwrap(model) is inner


@pytest.mark.parametrize("wrappers", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_wrapper_refuses_changes_nothing(name: str, wrappers: int, tmp_path: pathlib.Path) -> None:
    plain, model = _build(), _build()
    inner, line = model, _line(tmp_path)
    for _ in range(wrappers):
        model = dh.SaveWith(model, line)
    tensor = "scale" if name == "of a buffer" else "weight"
    before = {module: (type(module), set(vars(module))) for module in model.modules()}
    with pytest.raises(UsageError, match=rf"'{tensor}'.*before it is wrapped, or to `wrapper\.unwrapped`"):
        REFUSED[name](model)
    assert {module: (type(module), set(vars(module))) for module in model.modules()} == before
    assert not inner._forward_pre_hooks
    assert not model._forward_pre_hooks
    assert _same(_trained(model), _trained(plain))


def test_parametrizations_are_taken_from_the_module_inside(tmp_path: pathlib.Path) -> None:
    """Without a check of ours torch would change the weight first, and then fail at the class of the wrapper."""
    plain, model = _build(), dh.SaveWith(_build(), _line(tmp_path))
    for module in (plain, model.unwrapped):
        _change(parametrizations.spectral_norm, module)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r"remove_parametrizations.*`wrapper\.unwrapped`"):
        parametrize.remove_parametrizations(model, "weight")
    with pytest.raises(UsageError, match=r"register_parametrization.*'bias'"):
        parametrize.register_parametrization(model, "bias", nn.Tanh())
    assert _same([model.state_dict()], [before])
    assert parametrize.type_before_parametrizations(model) is dh.SaveWith
    assert parametrize.is_parametrized(model, "weight")  # like every attribute that is read from a wrapper
    for module in (plain, model):  # torch appends to a list of parametrizations that is there
        parametrize.register_parametrization(module, "weight", nn.Tanh())
    assert _same(_trained(model), _trained(plain))
    for module in (plain, model.unwrapped):
        parametrize.remove_parametrizations(module, "weight")
    assert _same(_trained(model), _trained(plain))


def test_errors_of_torch_stay(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(_build(), _line(tmp_path))
    with pytest.raises(ValueError, match="does not have a parameter"):
        parametrize.register_parametrization(model, "wieght", nn.Tanh())
    with pytest.raises(ValueError, match="does not have a parametrization"):
        parametrize.remove_parametrizations(model, "weight")
    with pytest.raises(KeyError, match="wieght"):
        nn.utils.spectral_norm(model, "wieght")
    with pytest.raises(AttributeError):
        nn.utils.weight_norm(model, "wieght")


@pytest.mark.parametrize("wrappers", [1, 2])
def test_the_dictionaries_of_a_wrapper(wrappers: int, tmp_path: pathlib.Path) -> None:
    """A key finds the tensor of the module inside, and listing the dictionaries of a wrapper finds nothing."""
    model = inner = _build()
    for _ in range(wrappers):
        model = dh.SaveWith(model, _line(tmp_path))
    weight, scale = inner.weight, inner.scale
    assert model._parameters["weight"] is weight
    assert model._buffers["scale"] is scale
    assert not model._parameters
    assert list(model.named_parameters(recurse=False)) == []
    with pytest.raises(KeyError):
        model._parameters["wieght"]
    with pytest.raises(KeyError):
        del model._buffers["weight"]
    model._parameters["weight"] = other = nn.Parameter(torch.ones(64, 64))
    assert inner.weight is other
    assert model._parameters.pop("weight") is other
    assert model._parameters.pop("weight", None) is None
    assert "weight" not in inner._parameters
    model.register_parameter("weight", weight)
    del model._buffers["scale"]
    assert "scale" not in inner._buffers


def prune_half(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", amount=0.5)


def test_copies_reach_what_they_have_themselves(tmp_path: pathlib.Path) -> None:
    plain, model = _build(), dh.SaveWith(dh.SaveWith(_build(), _line(tmp_path)), _line(tmp_path))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        changed = _build()
        for module in (twin, changed):
            _change(prune_half, module)
        assert _same(_trained(twin), _trained(changed))
    assert copy.copy(model)._parameters["weight"] is model.weight
    assert b"_Inside" not in pickle.dumps(model)  # a file needs no more names than it did
    assert _same(_trained(model), _trained(plain))


def test_replicas_of_a_pruned_wrapper_compute_their_own_weights(tmp_path: pathlib.Path) -> None:
    """Each replica of DataParallel computes the pruned weight from its own copies."""
    plain, model, x = _build(), dh.SaveWith(_build(), _line(tmp_path)), torch.randn(8, 64)
    found = []
    for module in (plain, model):
        _change(prune_half, module)
        copies = replicate(module, 2)
        sum(twin(part).square().sum() for twin, part in zip(copies, x.chunk(2), strict=True)).backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    assert _same(found[1:], found[:1])
    assert model.report().moved > 0


def test_a_pruned_wrapper_in_compiled_code_is_right(tmp_path: pathlib.Path) -> None:
    """A pruned wrapper is part of a compiled model.

    Compiled code reads the weight of a wrapper without a graph break.
    """

    class Tied(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.layer.weight.t() * self.layer.scale

    tied = Tied(dh.SaveWith(_build(), _line(tmp_path)))
    x = torch.randn(8, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.compile(tied, backend="eager", fullgraph=True)(x), Tied(_build())(x))
        plain, model = nn.Sequential(_build()), nn.Sequential(dh.SaveWith(_build(), _line(tmp_path)))
        for module in (plain, model):
            _change(prune_half, module[0])
        assert _same(_trained(torch.compile(model, backend="eager")), _trained(torch.compile(plain, backend="eager")))
    assert model[0].report().moved > 0


def test_functional_call_goes_through_several_wrappers(tmp_path: pathlib.Path) -> None:
    plain = nn.Sequential(_build())
    model = nn.Sequential(dh.SaveWith(dh.SaveWith(_build(), _line(tmp_path)), _line(tmp_path)))
    given = {"0.weight": torch.ones(64, 64, requires_grad=True)}
    x = torch.randn(8, 64)
    truth = torch.func.functional_call(plain, given, x)
    assert torch.equal(torch.func.functional_call(model, given, x), truth)
    assert type(model[0].weight) is nn.Parameter
