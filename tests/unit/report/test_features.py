"""features(): values, order, structures, lifetime, and that watching changes nothing."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import AttachError, MutationError, UsageError
from tests.support.functions import Made
from tests.support.threads import together


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def net(inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2))


def test_shows_what_the_layers_returned() -> None:
    model, x = net(), torch.randn(5, 3)
    with dh.features(model, "2", "0") as seen:
        y = model(x)
    assert torch.equal(seen["2"], y)
    assert torch.equal(seen["0"], model[0](x))
    assert list(seen) == ["0", "2"]
    assert len(seen) == 2
    assert dict(seen).keys() == {"0", "2"}


def test_values_are_aliases_without_graph_unless_asked() -> None:
    model = net()
    with dh.features(model, "2") as bare, dh.features(model, "2", detach=False) as live:
        y = model(torch.randn(5, 3))
    assert bare["2"].grad_fn is None
    assert bare["2"].data_ptr() == y.data_ptr()
    assert live["2"] is y


def test_inplace_change_is_caught_on_reading() -> None:
    model, x = net(inplace=True), torch.randn(5, 3)
    with dh.features(model, "0", "1") as seen, dh.features(model, "0", copy=True) as copied:
        model(x)
    with pytest.raises(MutationError, match=r"'0' was changed in place .* copy=True"):
        seen["0"]
    assert seen["1"].min() >= 0
    assert torch.equal(copied["0"], model[0](x))


@pytest.mark.parametrize(
    "made",
    [
        lambda t: (t, t + 1),
        lambda t: {"a": t, "b": [t * 2, None, "text"]},
        lambda t: Pair(t, t * 3),
        lambda t: None,
    ],
)
def test_structures_come_back_as_they_are_and_detached(made: Any) -> None:
    model = Made(lambda fc, x: made(fc(x)), nn.Linear(3, 3))
    with dh.features(model, "") as seen:
        output = model(torch.randn(2, 3))
    assert type(seen[""]) is type(output)
    flat = torch.utils._pytree.tree_leaves
    for value, kept in zip(flat(output), flat(seen[""]), strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, kept)
            assert not kept.requires_grad
        else:
            assert value == kept


def test_a_module_called_several_times() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu)
    x = torch.randn(2, 3)
    with dh.features(model, nn.ReLU) as last, dh.features(model, nn.ReLU, keep=None) as every:
        y = model(x)
        assert last.count("1") == 2
        model(x)
    assert torch.equal(last["1"], y)
    assert len(last.calls("1")) == 1
    assert len(every.calls("1")) == every.count("1") == 4
    assert torch.equal(every.calls("1")[0], torch.relu(model[0](x)))


def test_the_hooks_leave_also_after_an_error() -> None:
    model = net()
    with pytest.raises(RuntimeError, match="shapes"), dh.features(model, "*") as seen:
        model(torch.randn(5, 4))
    assert not any(part._forward_hooks for part in model.modules())
    model(torch.randn(5, 3))
    assert not seen
    seen.remove()


def test_without_a_pattern_it_is_an_error_and_before_a_forward_there_is_nothing() -> None:
    with pytest.raises(UsageError, match="at least one"):
        dh.features(net())
    seen = dh.features(net(), "0")
    assert "0" not in seen
    assert seen.get("0") is None


def test_a_compiled_module_is_refused() -> None:
    model = torch.compile(net(), backend="eager")
    with pytest.raises(AttachError, match="_orig_mod"):
        dh.features(model, "0")
    around = nn.Sequential(model)
    with dh.features(around, "") as seen:
        around(torch.randn(5, 3))
    assert seen[""].shape == (5, 2)


@pytest.mark.parametrize(
    ("watch", "found"),
    [
        (lambda model: dh.features(model, "0"), lambda seen: len(seen)),
        (lambda model: dh.trace(model, print=None), lambda seen: len(seen.events)),
        (dh.blame, lambda seen: seen.report().calls),
    ],
    ids=["features", "trace", "blame"],
)
def test_a_copy_of_the_model_is_not_watched_and_nothing_is_kept_alive(watch: Any, found: Any) -> None:
    model = net()
    seen = watch(model)
    for twin in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        twin(torch.randn(5, 3)).sum().backward()
    assert found(seen) == 0
    y = model(torch.randn(5, 3)).sum()
    seen.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    gone = weakref.ref(seen)
    del seen
    y.backward()
    gc.collect()
    assert gone() is None


def test_under_inference_mode() -> None:
    model = net(inplace=True)
    with dh.features(model, "0") as seen, torch.inference_mode():
        model(torch.randn(5, 3))
    assert seen["0"].shape == (5, 8)


def test_threads() -> None:
    model = net()
    with dh.features(model, "*", keep=None) as seen:
        together([functools.partial(model, torch.randn(n, 3)) for n in range(1, 33)])
    assert seen.count("2") == 32
    assert sorted(y.shape[0] for y in seen.calls("2")) == list(range(1, 33))


def test_replicas_are_kept_apart_and_never_read_as_the_whole_batch() -> None:
    model = net()
    with dh.features(model, "", keep=None) as seen:
        for rows in (4, 6):
            replica = model._replicate_for_data_parallel()
            replica(torch.randn(rows, 3))
    with pytest.raises(UsageError, match=r"replicas .* seen.calls\(''\)"):
        seen[""]
    assert [tuple(y.shape) for y in seen.calls("")] == [(4, 2), (6, 2)]
    assert "" in seen


def test_a_wrapper_and_what_it_wraps_are_one_name() -> None:
    model = nn.Sequential(nn.Linear(3, 8), dh.SaveWith(nn.Linear(8, 2), dh.OnCpu()))
    with dh.features(model, "1") as seen:
        y = model(torch.randn(5, 3))
    assert seen.count("1") == 1
    assert torch.equal(seen["1"], y)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_no_call(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(8, 4, requires_grad=True)
    with dh.features(block, "0", "1", keep=None, copy=True) as seen:
        for step in range(2):
            y = checkpoint(block, x * (step + 1), use_reentrant=reentrant)
            returned = y.detach().clone()
            y.sum().backward()
            assert [seen.count(name) for name in ("0", "1")] == [step + 1] * 2
            assert len(seen.calls("1")) == step + 1
            assert torch.equal(seen.calls("1")[-1], returned)
