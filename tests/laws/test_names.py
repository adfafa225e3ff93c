"""Law 8, same names: nothing that a checkpoint, a policy or a reader of the model sees has changed."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle

import pytest
import torch
from models import Tiny, identical, step, tokens
from torch import nn

import disthooks as dh


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


def _wrapped(folder: pathlib.Path) -> Tiny:
    torch.manual_seed(0)
    model = Tiny()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = dh.SaveToDisk(block, folder)
    model.norm = dh.SaveToCpu(model.norm)
    return model


def test_in_place_changes_nothing_to_be_seen(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    before, classes = _shape(model), [type(m) for m in model.modules()]
    saving = dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path))
    assert _shape(model) == before
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), classes, strict=True))
    assert type(model.blocks[0]) is type(model.blocks[1])
    saving.remove()
    assert [type(m) for m in model.modules()] == classes
    assert not any("disthooks" in key for m in model.modules() for key in m.__dict__)


def test_every_instance_of_a_class_stays_of_one_class(tmp_path: pathlib.Path) -> None:
    """A wrap policy takes the class of the first block it finds, and must find them all."""
    model = Tiny(blocks=3)
    with dh.save_activations(model, "blocks.1", dh.OnDisk(tmp_path)) as saving:
        first = type(model.blocks[0])
        assert all(isinstance(block, first) for block in model.blocks)
        model(tokens()).sum().backward()
        one = saving.report().stored
    with dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path)) as saving:
        model(tokens()).sum().backward()
        assert saving.report().stored > 2 * one


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


def test_a_wrapper_around_the_whole_model_and_a_wrapper(tmp_path: pathlib.Path) -> None:
    model = dh.SaveToCpu(dh.SaveToDisk(nn.Linear(4, 4), tmp_path))
    assert list(model.state_dict()) == ["weight", "bias"]
    model.load_state_dict(nn.Linear(4, 4).state_dict())
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]


def test_missing_and_unexpected_keys_have_their_own_names(tmp_path: pathlib.Path) -> None:
    model, state = _wrapped(tmp_path), Tiny().state_dict()
    del state["blocks.0.out.bias"]
    state["blocks.0.extra"] = torch.ones(1)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["blocks.0.out.bias"]
    assert result.unexpected_keys == ["blocks.0.extra"]


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


def test_copies_of_a_wrapped_model_save_on_their_own(tmp_path: pathlib.Path) -> None:
    model = _wrapped(tmp_path)
    truth = step(model, tokens())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.blocks[0].report().stored == 0
        assert identical(step(twin, tokens()), truth)
        assert twin.blocks[0].report().moved == model.blocks[0].report().moved > 0


def test_what_cannot_be_attached_in_place_says_so(tmp_path: pathlib.Path) -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    for model in (traced, nn.LazyLinear(3), torch.jit.script(nn.Linear(2, 2))):
        with pytest.raises(dh.errors.AttachError, match="SaveWith"):
            dh.save_activations(model, "", dh.OnDisk(tmp_path))
    model = Tiny()
    with (
        dh.save_activations(model, "blocks.0", dh.OnDisk(tmp_path)),
        pytest.raises(dh.errors.AttachError, match=r"'blocks\.0' has saved-tensor hooks already"),
    ):
        dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path))
    assert _shape(model) == _shape(Tiny())


def test_two_attachments_side_by_side(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    truth = step(model, tokens())
    first = dh.save_activations(model, "blocks.0", dh.OnDisk(tmp_path))
    second = dh.save_activations(model, "blocks.1", dh.OnDisk(tmp_path))
    assert identical(step(model, tokens()), truth)
    assert first.report().moved == second.report().moved > 0
    first.remove()
    before = first.report().moved
    assert identical(step(model, tokens()), truth)
    assert first.report().moved == before < second.report().moved
    second.remove()
    assert type(model.blocks[0]) is type(Tiny().blocks[0])
