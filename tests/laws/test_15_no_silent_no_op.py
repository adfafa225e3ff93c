"""Law 15, no silent no-op.

"A pattern that matches nothing is an error that lists near names. A hook that could not fire on this engine is an
error that says what to do."

This file shows it for rules and for saved tensors; its sibling shows it for loops that clip by themselves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import pathlib
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import AttachError, MatchError, UsageError
from disthooks.saved.pipeline import pipeline
from tests.support import no_warning
from tests.support.engines import Net, loss_of, make, sharded
from tests.support.models import identical, step
from tests.support.ranks.harness import Ranks

# --- Arguments that can never work


def attach(**options: Any) -> Any:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dh.gradients(model, optimizer, **{"rules": [dh.ClipNorm(1.0)], **options})


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "max_norm zero": (lambda: dh.ClipNorm(0.0), UsageError, "positive, finite"),
    "max_norm inf": (lambda: dh.ClipNorm(math.inf), UsageError, "positive, finite"),
    "max_norm nan": (lambda: dh.ClipNorm(math.nan), UsageError, "positive, finite"),
    "max_norm text": (lambda: dh.ClipNorm("1"), UsageError, "positive, finite"),
    "norm_type": (lambda: dh.ClipNorm(1.0, 0), UsageError, "above 0"),
    "norm_type nan": (lambda: dh.stats.Norm(math.nan), UsageError, "above 0"),
    "low above high": (lambda: dh.ClipValue(1.0, -1.0), UsageError, "lower bound comes first"),
    "negative bound": (lambda: dh.ClipValue(-1.0), UsageError, "a single bound is positive"),
    "nan bound": (lambda: dh.ClipValue(math.nan, 1.0), UsageError, "finite numbers"),
    "every": (lambda: attach(every=0), UsageError, "at least 1"),
    "every half": (lambda: attach(every=0.5), UsageError, "at least 1"),
    "nothing to do": (lambda: attach(rules=()), UsageError, "do nothing"),
    "no rule": (lambda: attach(rules=[1.0]), UsageError, "is no rule"),
    "a class": (lambda: attach(rules=[dh.ClipNorm]), UsageError, "is no rule"),
    "only of nothing": (lambda: dh.only([], dh.ClipNorm(1.0)), UsageError, "at least one pattern"),
    "no stat": (lambda: attach(stats=["norm"]), UsageError, "is no statistic"),
    "no sink": (lambda: attach(sinks=["file"]), UsageError, "is no sink"),
    "no match": (lambda: attach(rules=[dh.only("heads.*", dh.ClipNorm(1.0))]), MatchError, "near names.*head.weight"),
    "no match for a function": (lambda: dh.on_gradient(make("plain"), "embe.bias", print), MatchError, "embed.bias"),
    "at": (lambda: dh.on_gradient(make("plain"), "*", print, at="reduced"), UsageError, "'final'.*'local'"),
    "not callable": (lambda: dh.on_gradient(make("plain"), "*", 3), UsageError, "cannot be called"),
    "not a module": (lambda: dh.on_gradient([], "*", print), UsageError, "torch.nn.Module"),
    "no parameters": (lambda: dh.on_gradient(nn.ReLU(), "*", print), AttachError, "no parameters"),
    "frozen": (lambda: dh.on_gradient(make("plain").requires_grad_(False), "*", print), AttachError, "requires_grad"),
    "no optimizer at all": (lambda: dh.gradients(Net(), rules=[dh.ClipNorm(1.0)]), UsageError, "which optimizer"),
    "another model's optimizer": (
        lambda: dh.gradients(Net(), torch.optim.SGD(Net().parameters(), lr=0.1), rules=[dh.ClipNorm(1.0)]),
        AttachError,
        r"not in the model.*scale.*after fully_shard",
    ),
    "no optimizer": (lambda: dh.gradients(make("plain"), object(), rules=[print]), AttachError, "register_step_pre"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_that_can_never_work_is_refused(case: str) -> None:
    call, error, says = WRONG[case]
    with pytest.raises(error, match=says):
        call()


def test_replaced_parameters_are_an_error() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = dh.on_gradient(model, "head.weight", torch.zeros_like)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]):
        model.head.weight = nn.Parameter(torch.ones(3, 5))
        with pytest.raises(AttachError, match=r"'head.weight' is no longer.*attach after"):
            optimizer.step()
    with pytest.raises(AttachError, match=r"'head.weight' is no longer"):
        model(torch.ones(1, 6))
    hook.remove()
    model(torch.ones(1, 6))
    optimizer.step()


def test_added_parameters_are_an_error() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]):
        optimizer.step()
        optimizer.add_param_group({"params": list(model.embed.parameters())})
        with pytest.raises(AttachError, match=r"other parameters \(3\).*\(1\)"):
            optimizer.step()


def test_gradients_that_are_still_scaled_are_refused() -> None:
    """A fused optimizer: a GradScaler lets its kernel divide by the scale."""
    model, scaler = make("plain"), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler.scale(loss_of(model, 0, "plain")).backward()
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]), pytest.raises(UsageError, match="unscale_"):
        scaler.step(optimizer)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[dh.stats.NonFinite()]):
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(UsageError, match=r"'weight' is torch.sparse_coo.*sparse=False"):
            optimizer.step()


RESULTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "shape": (lambda grad: grad[:1], r"'head.weight' on rank 0 must return a tensor of shape \(3, 5\).*got shape"),
    "dtype": (lambda grad: grad.double(), r"torch.float32.*got shape \(3, 5\) and torch.float64"),
    "kind": (lambda grad: 1.0, r"got 1.0"),
}


@pytest.mark.parametrize("case", RESULTS)
@pytest.mark.parametrize("at", ["local", "final"])
def test_a_function_that_returns_something_else_is_an_error(case: str, at: str) -> None:
    function, says = RESULTS[case]
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        loss_of(model, 0, "plain").backward()
        optimizer.step()

    with dh.on_gradient(model, "head.weight", function, at), pytest.raises(UsageError, match=says):
        run()


def test_a_rule_that_returns_something_else_is_an_error() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, "plain").backward()
    says = r"must return torch.float32 \(7, 6\) for 'embed.weight'"
    watch = dh.gradients(model, optimizer, rules=[dh.only("embed.*", lambda name, grad: grad[:1])])
    with watch, pytest.raises(UsageError, match=says):
        optimizer.step()


def _refusals(rank: int) -> dict[str, str]:
    """The message in each case in which a hook would silently do nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    said: dict[str, str] = {}

    @contextlib.contextmanager
    def saying(case: str) -> Any:
        try:
            yield
        except AttachError as error:
            said[case] = str(error)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded(model)
    with saying("optimizer before fully_shard"):
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)])
    for at in ("local", "final"):
        model = Net()
        with dh.on_gradient(model, "head.weight", print, at):
            sharded(model)
            with saying(f"{at} hook before fully_shard"):
                model(torch.ones(1, 6))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]):
        sharded(model)
        with saying("rules before fully_shard"):
            optimizer.step()
    with saying("a part in DDP"):
        dh.on_gradient(nn.Sequential(nn.parallel.DistributedDataParallel(Net()), nn.Linear(3, 1)), "*", print)
    ignoring = Net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["scale"])
    with saying("ignored by DDP"):
        optimizer = torch.optim.SGD(ignoring.parameters(), lr=0.1)
        dh.gradients(nn.parallel.DistributedDataParallel(ignoring), optimizer, rules=[dh.ClipNorm(1.0)])

    class Encoder(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x)

    encoder = Encoder(4, 4)
    fully_shard(encoder, mesh=init_device_mesh("cpu", (2,)))
    register_fsdp_forward_method(encoder, "encode")
    with dh.on_gradient(encoder, "weight", print, at="local"), saying("another method than forward"):
        encoder.encode(torch.ones(1, 4)).sum().backward()
    two = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    fully_shard(two[0], mesh=meshes["a"])
    fully_shard(two[1], mesh=meshes["b"])
    with saying("different meshes"):
        dh.on_gradient(two, "*", print)
    return said


@pytest.mark.dist
def test_what_would_do_nothing_on_an_engine_is_refused(ranks: Ranks) -> None:
    for said in ranks(_refusals):
        expected = {
            "optimizer before fully_shard": "after fully_shard",
            "local hook before fully_shard": "attach after the engine",
            "final hook before fully_shard": "attach after the engine",
            "rules before fully_shard": "attach after the engine",
            "a part in DDP": "wrap the whole model",
            "ignored by DDP": "'scale'",
            "another method than forward": "call the FSDP module itself",
            "different meshes": "one device mesh",
        }
        assert said.keys() == expected.keys()
        assert {case for case, says in expected.items() if says not in said[case]} == set()


def test_an_engine_inside_of_a_module_is_refused() -> None:
    class DeepSpeedEngine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

    with pytest.raises(AttachError, match="wrapped in DeepSpeedEngine and the rest of the model is not"):
        dh.on_gradient(nn.Sequential(DeepSpeedEngine()), "*", print)


# --- Saved tensors: modules that are never called, or save nothing where the hooks are


@pytest.mark.any_device
@pytest.mark.parametrize("pattern", ["blocks*", "blocks", nn.ModuleList])
def test_a_container_that_is_never_called_takes_no_place(pattern: object, tmp_path: pathlib.Path) -> None:
    """A ModuleList is never called. Hooks on it would do nothing, and the modules inside would have none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).relu()
            return x

    model = Model()
    try:
        saving = dh.save_activations(model, pattern, dh.OnDisk(tmp_path))
    except dh.errors.AttachError:
        return
    model(torch.randn(32, 64)).sum().backward()
    assert saving.report().stored > 0


@pytest.mark.any_device
def test_a_wrapper_around_a_container_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(dh.errors.UsageError):
        dh.SaveWith(nn.ModuleList([nn.Linear(64, 64)]), dh.OnDisk(tmp_path), at_least=4096)


class Streams(nn.Module):
    """Runs its branches in threads of its own, as an inference server's model or a pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            left, right = pool.map(lambda layer: layer(x).tanh(), (self.left, self.right))
        return left + right


@pytest.mark.any_device
def test_the_user_is_told_of_a_forward_in_threads_of_its_own(tmp_path: pathlib.Path) -> None:
    model, line = nn.Sequential(Streams(), nn.Linear(64, 64)), pipeline(dh.OnDisk(tmp_path), at_least=0)
    x = torch.randn(32, 64)
    truth = step(model, x)
    with dh.save_activations(model, "?", line) as saving:
        with pytest.warns(UserWarning, match="'0' saved nothing in the thread that called it.*attach to the layers"):
            assert identical(step(model, x), truth)
        with no_warning():  # the warning comes once
            step(model, x)
    assert any("saved nothing in the thread" in advice for advice in saving.report().advice())
    with warnings.catch_warnings(), dh.save_activations(model, nn.Linear, line) as saving:  # the remedy
        warnings.simplefilter("error")
        assert identical(step(model, x), truth)
    assert {"0.left", "0.right", "1"} == set(saving.report().sites)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Identity()),
        nn.Sequential(nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), nn.Identity()),
        nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Tanh()),
        nn.Sequential(nn.Sequential(dh.SaveWith(nn.Linear(64, 64), dh.OnDisk("/tmp"))), nn.Tanh()),  # it takes all
    ],
)
def test_nobody_is_told_of_a_forward_in_the_callers_thread(model: nn.Module, tmp_path: pathlib.Path) -> None:
    with no_warning(), dh.save_activations(model, "?", dh.OnDisk(tmp_path)):
        model(torch.randn(4, 64).requires_grad_()).sum().backward()


@pytest.mark.any_device
def test_the_user_is_told_of_a_module_that_is_never_called(tmp_path: pathlib.Path) -> None:
    """MultiheadAttention reads the weights of its out_proj and does not call it."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4, batch_first=True), "linear": nn.Linear(64, 64)})
    with pytest.warns(UserWarning, match=r"no hooks on 'attention\.out_proj': .*attach to the MultiheadAttention"):
        saving = dh.save_activations(model, nn.Linear, dh.OnDisk(tmp_path))
    assert saving.names == ("linear",)
    with pytest.raises(dh.errors.AttachError, match="attach to the MultiheadAttention"):
        dh.save_activations(model, "attention.out_proj", dh.OnDisk(tmp_path))
    with no_warning():  # the attention is attached, and all that is in it
        both = dh.save_activations(model, ["attention", "*out_proj"], dh.OnDisk(tmp_path))
    assert both.names == ("attention",)


@pytest.mark.parametrize(
    "call",
    [nn.Linear.forward, nn.Module.__call__, nn.Module._call_impl],
    ids=["forward", "Module.__call__", "_call_impl"],
)
def test_the_user_is_told_of_calls_that_open_no_hooks(call: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64)
    saving = dh.save_activations(model, "0", dh.OnDisk(tmp_path))
    with no_warning():
        saving.report()  # before the first step there is nothing to tell
    model[1](call(model[0], x)).sum().backward()
    with pytest.warns(UserWarning, match=r"weights of 0 have gradients.*not in module\.forward"):
        advice = saving.report().advice()
    assert any("call the module" in each for each in advice)
    with no_warning():
        saving.remove()
        again = dh.save_activations(model, "0", dh.OnDisk(tmp_path))  # the gradients were there before
        again.remove()


def test_removal_tells_of_calls_that_open_no_hooks(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(64, 64)
    saving = dh.save_activations(model, "*", dh.OnDisk(tmp_path))
    model.forward(torch.randn(64, 64)).sum().backward()
    with pytest.warns(UserWarning, match=r"weights of the model have gradients"):
        saving.remove()


def test_the_user_is_told_of_hooks_that_a_block_forbids(tmp_path: pathlib.Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    truth = step(model, x)
    with dh.save_activations(model, "0", pipeline(dh.OnDisk(tmp_path), at_least=0)) as saving:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            with pytest.warns(UserWarning, match="disable_saved_tensors_hooks forbids hooks") as told:
                assert identical(step(model, x), truth)
            assert identical(step(model, x), truth)
        with pytest.warns(UserWarning, match="inside a transform of torch.func"):  # another cause is said too
            torch.func.vmap(model)(x[None])
    assert len(told) == 1
    assert saving.report().passed == {"hooks disabled": 3}
    assert not any("torch.func" in str(each.message) for each in told)


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: self.row(row).tanh())(x)


@pytest.mark.any_device
def test_the_user_is_told_of_a_module_inside_vmap_and_the_one_around_it_stores(tmp_path: pathlib.Path) -> None:
    model, line = nn.Sequential(nn.Linear(64, 64), Mapped()), pipeline(dh.OnDisk(tmp_path), at_least=0)
    x = torch.randn(32, 64)
    truth = step(model, x)
    with dh.save_activations(model, "*row", line) as saving:
        with pytest.warns(UserWarning, match=r"'1\.row' is called inside a transform of torch\.func") as told:
            assert identical(step(model, x), truth)
        with no_warning():
            step(model, x)
    assert len(told) == 1
    assert saving.report().passed == {"hooks disabled": 2}
    assert any("torch.func (vmap" in advice for advice in saving.report().advice())
    with warnings.catch_warnings(), dh.save_activations(model, "1", line) as saving:  # the remedy
        warnings.simplefilter("error")
        assert identical(step(model, x), truth)
    assert saving.report().moved == 2 * x.nbytes


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ("layers.?", r"'layers\.\?' matches 10 of 24 modules.*'layers\.10' is not matched"),
        ("layers.?.0", r"matches 10 of 24 modules.*'layers\.10\.0' is not matched"),
        (["layers.?", "head"], "matches 10 of 24 modules"),
        ("layers.*", ""),
        ("layers.[0-3]", ""),
        ("layers.1?", ""),
        (["layers.?", "layers.1?"], ""),
        ("layer?.3", ""),
        ("hea?", ""),
    ],
)
def test_the_user_is_told_of_a_pattern_that_matches_ten_layers_of_more(
    patterns: str | list[str], text: str, tmp_path: pathlib.Path
) -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(24))
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 2)})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dh.save_activations(model, patterns, dh.OnDisk(tmp_path)).remove()
    assert len(told) == bool(text)
    assert not text or re.search(text, str(told[0].message))
    assert not text or told[0].filename == __file__


@pytest.mark.any_device
@pytest.mark.parametrize("to", [dh.OnCpu(), dh.Tiered(dh.OnDevice("1 GiB"), dh.OnCpu())])
def test_a_store_where_the_tensors_are_says_so(
    to: dh.OnCpu | dh.Tiered, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disthooks.saved.counters._given", {})
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64)
    with dh.save_activations(model, "?", to) as saving:
        with pytest.warns(UserWarning, match=r"stores nothing of '.'.*in CPU memory.*OnDisk\(directory\)"):
            step(model, x)
        with no_warning():  # the warning comes once
            step(model, x)
    assert saving.report().stored == 0
    assert any("stores nothing" in advice for advice in saving.report().advice())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            with dh.saving(to) as block:
                model(x)
            assert any("stores nothing" in advice for advice in block.report().advice())
    assert len(told) == 1  # each run of the block is an attachment, and the process is told once
    assert "stores nothing of this block" in str(told[0].message)
    for stages in ((dh.Compact(), to), (dh.Recompute(), to), (dh.Tiered(dh.OnCpu("1 KiB"), dh.OnDisk(tmp_path)),)):
        with no_warning(), dh.save_activations(model, "?", pipeline(*stages)):
            step(model, x)


@pytest.mark.parametrize(("to_none", "what"), [(True, "no gradient"), (False, "a gradient of 0")])
def test_an_optimizer_in_backward_beside_the_one_that_was_attached_to_is_told(to_none: bool, what: str) -> None:
    """It steps, and zeroes gradients, before the outer one begins: a rule there would do nothing, silently."""
    model = nn.Linear(4, 4)
    inner = {each: torch.optim.SGD([each], lr=1.0) for each in model.parameters()}
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda p: inner[p].step() or inner[p].zero_grad(to_none))
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    watch = dh.gradients(model, outer, rules=[dh.ClipNorm(1e-3)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(8, 4)).sum().backward()
            outer.step()
    watch.remove()
    another, none = (str(each.message) for each in told)
    assert "SGD has stepped 1 parameters that gradients() watches for another optimizer, SGD" in another
    assert f"{what} in 2 parameters" in none


def test_a_block_around_the_work_of_other_threads_says_that_it_saw_nothing(tmp_path: pathlib.Path) -> None:
    model, x = nn.Linear(256, 256), torch.ones(512, 256)
    with dh.saving(dh.OnDisk(tmp_path)) as saved:
        thread = threading.Thread(target=lambda: model(x).sum().backward())
        thread.start()
        thread.join()
    (said,) = saved.report().advice()
    assert said.startswith("in a saving(...) block autograd saved nothing. Hooks are of one thread: ")
    assert f"* {said}" in str(saved.report())
    for store in (dh.OnDisk(tmp_path), dh.Functions(torch.detach, torch.detach)):
        with dh.saving(store) as saved:
            model(x).sum().backward()  # its graph is gone before anything is stored, which is no mistake
        assert saved.report().advice() == []
