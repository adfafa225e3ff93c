"""Law 8, same names.

"In-place attachment changes no parameter name, no `state_dict` key, no class name, no `isinstance`. A wrapper module
keeps `state_dict` keys as if it were not there, loads checkpoints made without it, and composes with auto-wrap
policies."

This file shows what a checkpoint, a policy, a copy and a reader of the model see. Its sibling shows what
torch.nn.utils does to a wrapped module.
"""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.models import Block, Tiny, identical, step, tokens
from tests.support.stores.pairs import ones

# --- In place


def _shape(model: nn.Module) -> tuple:
    return (
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [
            (name, type(module).__name__)
            for name, module in model.named_modules()
            if not isinstance(module, dh.SaveWith)
        ],
    )


def test_in_place_changes_nothing_to_be_seen(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    before, classes = _shape(model), [type(m) for m in model.modules()]
    saving = dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path))
    assert _shape(model) == before
    assert [type(m) for m in model.modules()] == classes
    assert all(m.__class__ is type(m) for m in model.modules())
    saving.remove()
    assert [type(m) for m in model.modules()] == classes
    assert not any("disthooks" in key for m in model.modules() for key in m.__dict__)


def test_a_policy_by_class_finds_every_block(tmp_path: pathlib.Path) -> None:
    """A wrap policy takes the class of the first block it finds, and must find them all."""
    model = Tiny(blocks=3)
    with dh.save_activations(model, "blocks.1", dh.OnDisk(tmp_path)) as saving:
        first = type(model.blocks[0])
        assert all(type(block) is first for block in model.blocks)
        model(tokens()).sum().backward()
        one = saving.report().stored
    with dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path)) as saving:
        model(tokens()).sum().backward()
        assert saving.report().stored > 2 * one


class Recursive(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super(self.__class__, self).forward(x)  # a common way to write it, which never ends in a subclass


def test_code_that_asks_for_the_type_finds_it(tmp_path: pathlib.Path) -> None:
    """Initialisers, registries and quantization ask for ``type(module)``, as in torch's documentation."""
    model, line = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Recursive(64, 64)), dh.OnDisk(tmp_path)
    registry = {nn.Linear: "linear", nn.Tanh: "tanh", Recursive: "recursive"}

    def init(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            nn.init.constant_(module.weight, 1.0)

    with dh.save_activations(model, "?", line) as saving:
        model.apply(init)
        assert bool((model[0].weight == 1).all())
        assert [registry.get(type(module)) for module in model] == ["linear", "tanh", "recursive"]
        model(torch.randn(64, 64)).sum().backward()
        assert saving.report().moved > 0
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        assert type(quantized[0]) is not nn.Linear


class Own(Block):
    pass


def _functions(model: nn.Module) -> list[dict[str, object]]:
    """What the classes of a model have in their dictionaries."""
    return [dict(vars(type(module))) for module in model.modules() if type(module).__module__ == __name__]


def test_attachments_to_overlapping_parts_leave_every_class_as_it_was(tmp_path: pathlib.Path) -> None:
    """When the last attachment that needs a class goes, in whichever order, the class has its own functions again."""
    for order in ((0, 1), (1, 0)):
        model = Tiny(blocks=3)
        for block in model.blocks:
            block.__class__ = Own  # a class that no other test attaches
        before = _functions(model)
        attached = [
            dh.save_activations(model, "blocks.0", dh.OnDisk(tmp_path)),
            dh.save_activations(model.blocks[1], "", dh.OnDisk(tmp_path)),
        ]
        attached[order[0]].remove()
        model(tokens()).sum().backward()
        assert attached[order[0]].report().calls == 0
        assert attached[order[1]].report().calls == 1
        for i in order:
            attached[i].remove()
            attached[i].remove()  # a second time does nothing
        assert _functions(model) == before


class Quiet(nn.Linear):
    pass


class Loud(Quiet):
    """Has a ``__call__`` of its own, which saves something, and a base class that is attached, too."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x.sin())


def test_classes_in_one_line_of_descent_open_the_hooks_once(tmp_path: pathlib.Path) -> None:
    """Both classes are changed; the hooks of each module open once, around all that its call does."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Quiet(64, 64), Loud(64, 64)), torch.randn(64, 64, requires_grad=True)
    before = _functions(model)
    model(x).sum().backward()
    wanted, x.grad = x.grad, None
    with dh.save_activations(model, "?", pipeline(dh.OnDisk(tmp_path), at_least=0)) as saving:
        model(x).sum().backward()
        report = saving.report()
        assert (report.calls, report.inner) == (2, 0)
        assert report.sites["1"].saved == 2 * x.nbytes  # the input of the sine, and its output
    assert torch.equal(x.grad, wanted)
    assert _functions(model) == before


def test_somebody_else_may_change_the_call_of_the_class(tmp_path: pathlib.Path) -> None:
    class Mine(nn.Linear):
        pass

    model, x, calls = Mine(64, 64), torch.randn(64, 64), []
    first = dh.save_activations(model, "", dh.OnDisk(tmp_path))
    ours = Mine.__call__

    def theirs(self: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        calls.append(args)
        return ours(self, *args)

    Mine.__call__ = theirs
    model(x)
    assert first.report().calls == 1
    first.remove()
    assert Mine.__call__ is theirs
    model(x)
    with dh.save_activations(model, "", dh.OnDisk(tmp_path)) as second:
        model(x).sum().backward()
    assert (first.report().calls, second.report().calls, second.report().inner, len(calls)) == (1, 1, 0, 3)
    assert Mine.__call__ is theirs


def test_a_model_that_is_gone_leaves_its_class_as_it_was(tmp_path: pathlib.Path) -> None:
    """The handle does not keep the model alive. The class is restored when hooks are next removed from any model."""
    kind = type("Gone", (nn.Linear,), {})
    saving = dh.save_activations(kind(4, 4), "", dh.OnDisk(tmp_path))
    with dh.save_activations(nn.Linear(4, 4), "", dh.OnDisk(tmp_path)):
        pass
    assert "__call__" not in vars(kind)
    saving.remove()


def test_what_cannot_be_attached_in_place_says_so(tmp_path: pathlib.Path) -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    for model in (traced, torch.jit.script(nn.Linear(2, 2))):
        with pytest.raises(dh.errors.AttachError, match="SaveWith"):
            dh.save_activations(model, "", dh.OnDisk(tmp_path))
    model = Tiny()
    with (
        dh.save_activations(model, "blocks.0", dh.OnDisk(tmp_path)),
        pytest.raises(dh.errors.AttachError, match=r"'blocks\.0' has saved-tensor hooks already"),
    ):
        dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path))
    assert _shape(model) == _shape(Tiny())


@pytest.mark.any_device
@pytest.mark.parametrize("own", [{}, {"__call__": lambda self, x: self.forward(x)}], ids=["inherits", "has its own"])
@pytest.mark.parametrize("sealed", [None, "__call__", "__reduce_ex__"])
def test_nothing_is_attached_when_a_class_cannot_be_changed(
    tmp_path: pathlib.Path, sealed: str | None, own: dict[str, Any]
) -> None:
    """A class that accepts some of our functions and refuses others has its own functions again."""

    class Sealed(type):
        def __setattr__(cls, name: str, value: object) -> None:
            if sealed is None or (name == sealed and value is not own.get(name)):
                raise TypeError("sealed")
            super().__setattr__(name, value)

    Fixed: Any = Sealed("Fixed", (nn.Linear,), own)

    class Registered(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise ValueError("registered already")

    class Mine(nn.Linear):
        pass

    model = nn.Sequential(Mine(64, 64), Fixed(64, 64), Registered(64, 64))
    before = [dict(vars(type(part))) for part in model]
    with pytest.raises(dh.errors.AttachError, match=r"Fixed .*sealed.*SaveWith"):
        dh.save_activations(model, ["0", "1"], dh.OnDisk(tmp_path))
    assert [dict(vars(type(part))) for part in model] == before
    assert not any("disthooks" in key for part in model for key in vars(part))
    with dh.save_activations(model, "2", dh.OnDisk(tmp_path)) as saving:  # a class that refuses to be derived from
        model(torch.randn(64, 64)).sum().backward()
    assert saving.report().moved > 0


# --- Wrappers


def _wrapped(folder: pathlib.Path) -> Tiny:
    torch.manual_seed(0)
    model = Tiny()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = dh.SaveWith(block, dh.OnDisk(folder), at_least=4096)
    model.norm = dh.SaveWith(model.norm, dh.OnCpu())
    return model


def test_wrappers_keep_names_and_checkpoints_go_both_ways(tmp_path: pathlib.Path) -> None:
    plain, wrapped = Tiny(), _wrapped(tmp_path)
    assert _shape(wrapped) == _shape(plain)
    plain.load_state_dict(wrapped.state_dict())
    other = _wrapped(tmp_path)
    nn.init.zeros_(other.embed.weight)
    other.load_state_dict(plain.state_dict())
    assert identical(step(other, tokens()), step(plain, tokens()))
    assert other.blocks[0].heads == 4
    assert other.get_parameter("blocks.0.norm1.weight") is other.blocks[0].norm1.weight


def test_missing_and_unexpected_keys_have_their_own_names(tmp_path: pathlib.Path) -> None:
    model, state = _wrapped(tmp_path), Tiny().state_dict()
    del state["blocks.0.out.bias"]
    state["blocks.0.extra"] = torch.ones(1)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["blocks.0.out.bias"]
    assert result.unexpected_keys == ["blocks.0.extra"]


def test_what_is_set_on_a_wrapper_is_set_inside(tmp_path: pathlib.Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self._scale = nn.BatchNorm1d(4), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self._scale

    wrapped = dh.SaveWith(Scaled(), dh.OnDisk(tmp_path), at_least=4096)
    wrapped._scale = 5.0
    assert wrapped.unwrapped._scale == 5.0
    wrapped.training = False
    assert not wrapped.unwrapped.training
    wrapped.adapter = nn.Linear(4, 4)
    wrapped.add_module("head", nn.Linear(4, 2))
    names = {name for name, _ in wrapped.named_parameters()}
    assert {"adapter.weight", "head.bias"} < names
    wrapped.load_state_dict(wrapped.state_dict())
    del wrapped.head
    assert "head.bias" not in wrapped.state_dict()
    assert set(wrapped.unwrap().state_dict()) == set(wrapped.state_dict())


def test_a_module_attached_in_place_can_be_called_with_other_parameters(tmp_path: pathlib.Path) -> None:
    """``torch.func.functional_call`` does so in meta-learning and ensembles. Through a wrapper it is an error."""
    plain, attached = Tiny(), Tiny()
    others = {name: (torch.randn_like(p) / 8).requires_grad_() for name, p in plain.named_parameters()}

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss = torch.func.functional_call(model, others, (tokens(),)).square().mean()
        return list(torch.autograd.grad(loss, list(others.values())))

    with dh.save_activations(attached, "blocks.*", dh.OnDisk(tmp_path), at_least=4096) as saving:
        assert identical(gradients(attached), gradients(plain))
        assert saving.report().moved > 0
    with pytest.raises(TypeError, match="cannot assign"):
        gradients(_wrapped(tmp_path))


def test_unwrap_gives_the_model_back(tmp_path: pathlib.Path) -> None:
    model = _wrapped(tmp_path)
    truth = step(model, tokens())
    model.blocks[0].mlp = dh.SaveWith(dh.SaveWith(model.blocks[0].mlp, dh.OnDisk(tmp_path), at_least=4096), dh.OnCpu())
    inner = model.blocks[0].unwrapped
    assert dh.unwrap(model) is model
    assert _shape(model) == _shape(Tiny())
    assert [type(m) for m in model.modules()] == [type(m) for m in Tiny().modules()]
    assert model.blocks[0] is inner
    assert identical(step(model, tokens()), truth)
    whole = dh.SaveWith(dh.SaveWith(model, dh.OnDisk(tmp_path), at_least=4096), dh.OnCpu())
    assert whole.unwrap() is model
    assert "OnDisk" in repr(whole)  # the pipeline is shown


def test_a_wrapper_with_an_engines_hooks_is_not_unwrapped(tmp_path: pathlib.Path) -> None:
    model = _wrapped(tmp_path)
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: None)
    with pytest.raises(dh.errors.UsageError, match=r"'blocks\.1' cannot be unwrapped"):
        dh.unwrap(model)
    assert isinstance(model.blocks[0], dh.SaveWith)
    handle.remove()
    assert not any(isinstance(module, dh.SaveWith) for module in dh.unwrap(model).modules())


@pytest.mark.any_device
def test_versions_of_the_module_inside_reach_its_loading(tmp_path: pathlib.Path) -> None:
    """Without the ``_metadata`` of a checkpoint a module takes a new checkpoint for an old one."""

    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *rest: object) -> None:
            if metadata.get("version", 1) < 2:
                state[prefix + "weight"] = -state[prefix + "weight"]
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    plain, wrapped = (
        nn.Sequential(Versioned(3, 3)),
        nn.Sequential(dh.SaveWith(Versioned(3, 3), dh.OnDisk(tmp_path), at_least=4096)),
    )
    checkpoint = plain.state_dict()
    names, versions = list(checkpoint), dict(checkpoint._metadata)
    for _ in range(2):
        wrapped.load_state_dict(checkpoint)
        assert torch.equal(wrapped[0].weight, plain[0].weight)
        assert (list(checkpoint), dict(checkpoint._metadata)) == (names, versions)  # the user's, and left as it was


# --- Copies and pickles


def test_copies_and_pickles_of_an_attached_model_are_plain(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    with dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path)) as saving:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
        truth, before = step(model, tokens()), saving.report().stored
        for twin in twins:
            assert [type(m) for m in twin.modules()] == [type(m) for m in Tiny().modules()]
            assert identical(step(twin, tokens()), truth)
        assert before > 0
        assert saving.report().stored == before


COPIES = [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]


@pytest.mark.any_device
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_wrapper_count_on_their_own(way: Callable, tmp_path: pathlib.Path) -> None:
    """A copy counts from zero, and the original keeps what it saved."""
    x, original = torch.ones(2, 4), dh.SaveWith(torch.nn.Linear(4, 4), dh.OnDisk(tmp_path), at_least=0)
    first = original(x)
    twin = way(original)
    twin(x).sum().backward()
    assert twin.report().stored == original.report().held == x.nbytes
    first.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(original.parameters(), twin.parameters(), strict=True))


@pytest.mark.any_device
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_block_count_on_their_own(way: Callable, tmp_path: pathlib.Path) -> None:
    """A model that keeps its block as an attribute is copied and pickled with it, as with torch's own contexts."""
    x, original = ones(5), dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=0))
    with original:
        first = x.exp()
        with way(original) as twin:
            second = x.exp()
    assert twin.report().held == original.report().held == x.nbytes
    (first + second).sum().backward()
    assert torch.equal(x.grad, 2 * x.exp())


# --- Modules that torch parametrizes


@pytest.mark.parametrize("order", ["before", "after"])
def test_parametrized_modules_can_be_attached_in_any_order(order: str, tmp_path: pathlib.Path) -> None:
    """``parametrize`` gives a module a class of its own and edits that class.

    Hooks and parametrization can come and go in any order.
    """
    from torch.nn.utils import parametrizations, parametrize

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def reparametrize(model: nn.Sequential) -> None:
        torch.manual_seed(1)
        parametrizations.weight_norm(model[0], "weight")
        parametrizations.orthogonal(model[2], "weight")

    plain, model, x = build(), build(), torch.randn(64, 64)
    reparametrize(plain)
    truth = step(plain, x)
    line = pipeline(dh.OnDisk(tmp_path), at_least=0)
    if order == "before":
        saving = dh.save_activations(model, "?", line)
    reparametrize(model)
    if order == "after":
        saving = dh.save_activations(model, "?", line)
    assert type(model[0]).__name__ == "ParametrizedLinear"
    assert identical(step(model, x), truth)
    moved = saving.report().moved
    assert moved > 3 * x.nbytes
    twin = copy.deepcopy(model)
    assert identical(step(twin, x), truth)
    assert saving.report().moved == moved  # the copy is not attached
    parametrize.remove_parametrizations(model[0], "weight")
    assert parametrize.is_parametrized(model[2])
    step(model, x)
    assert saving.report().moved > moved
    saving.remove()
    assert type(model[0]) is nn.Linear
    parametrize.remove_parametrizations(model[2], "weight")
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, nn.Linear]


def test_a_parameter_that_an_engine_put_on_the_wrapper_is_loaded_there(tmp_path: pathlib.Path) -> None:
    """FSDP1 writes its flat parameter into the dictionary of the module that it gets."""
    wrapped = dh.SaveWith(nn.Linear(4, 4), dh.OnDisk(tmp_path))
    wrapped._parameters["_flat_param"] = nn.Parameter(torch.ones(3))
    saved = {name: torch.full_like(tensor, 7.0) for name, tensor in wrapped.state_dict().items()}
    assert sorted(saved) == ["_flat_param", "bias", "weight"]
    wrapped.load_state_dict(saved)
    assert all(bool((tensor == 7.0).all()) for tensor in wrapped.state_dict().values())


def test_a_wrapper_has_the_length_and_the_truth_of_the_module_inside(tmp_path: pathlib.Path) -> None:
    for module in (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential()):
        wrapped = dh.SaveWith(module, dh.OnDisk(tmp_path))
        assert (len(wrapped), list(wrapped), bool(wrapped)) == (len(module), list(module), bool(module))
    single = dh.SaveWith(nn.Linear(4, 4), dh.OnDisk(tmp_path))
    assert single
    with pytest.raises(TypeError, match="'Linear' has no len"):
        len(single)


def test_the_report_counts_calls_of_methods_that_store_nothing(tmp_path: pathlib.Path) -> None:
    class Autoencoder(nn.Sequential):
        def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            """What the docs say."""
            return self[0](x) * scale

    torch.manual_seed(0)
    wrapped = dh.SaveWith(Autoencoder(nn.Linear(64, 64), nn.ReLU()), dh.OnDisk(tmp_path), at_least=0)
    assert (wrapped.encode.__self__, wrapped.encode.__doc__) == (wrapped.unwrapped, "What the docs say.")
    wrapped.encode(torch.ones(8, 64), scale=2.0).sum().backward()
    with torch.no_grad():
        wrapped.encode(torch.ones(8, 64))
    wrapped.append(nn.Identity())
    assert wrapped.report().passed == {"a method other than forward": 1}
    assert "a method other than forward 1" in str(wrapped.report())
    assert wrapped.report().stored == 0
    with dh.saving(dh.OnDisk(tmp_path), at_least=0) as saving:  # the hooks of this block take what it saves
        wrapped.encode(torch.ones(8, 64)).sum().backward()
        kept = wrapped.encode(torch.ones(8, 64))
    assert kept.requires_grad
    assert saving.report().stored > 0
    assert wrapped.report().passed == {"a method other than forward": 1}
