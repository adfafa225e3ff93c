"""Law 15: what could not fire is an error that says what to do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import AttachError, MatchError, UsageError
from tests.support.engines import Net, loss_of, make, sharded
from tests.support.ranks.harness import Ranks


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
    "no optimizer": (lambda: dh.gradients(make("plain"), object(), rules=[print]), AttachError, "register_step_pre"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_that_can_never_work(case: str) -> None:
    call, error, says = WRONG[case]
    with pytest.raises(error, match=says):
        call()


def test_an_optimizer_of_another_model() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(AttachError, match=r"not in the model.*scale.*after fully_shard"):
        dh.gradients(Net(), optimizer, rules=[dh.ClipNorm(1.0)])


def test_parameters_that_were_replaced() -> None:
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


def test_parameters_that_were_added() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]):
        optimizer.step()
        optimizer.add_param_group({"params": list(model.embed.parameters())})
        with pytest.raises(AttachError, match=r"other parameters \(3\).*\(1\)"):
            optimizer.step()


def test_a_step_that_makes_its_own_gradients() -> None:
    model = make("plain")
    optimizer = torch.optim.LBFGS(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]), pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: 0.0)


def _scaled() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    """A fused optimizer, which a GradScaler leaves to divide by the scale inside its kernel."""
    model = make("plain")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, 0, "plain")).backward()
    return model, torch.optim.AdamW(model.parameters(), fused=True), scaler


def test_gradients_that_are_still_scaled() -> None:
    model, optimizer, scaler = _scaled()
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]), pytest.raises(UsageError, match="unscale_"):
        scaler.step(optimizer)


def test_gradients_that_were_unscaled() -> None:
    model, optimizer, scaler = _scaled()
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]) as watch:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    loss_of(fresh := make("plain"), 0, "plain").backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in fresh.parameters()])
    assert watch.latest["grad_norm"] == pytest.approx(float(norm), rel=1e-6)


def test_sparse_gradients() -> None:
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
def test_a_function_that_returns_something_else(case: str, at: str) -> None:
    function, says = RESULTS[case]
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        loss_of(model, 0, "plain").backward()
        optimizer.step()

    with dh.on_gradient(model, "head.weight", function, at), pytest.raises(UsageError, match=says):
        run()


def test_a_rule_that_returns_something_else() -> None:
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, "plain").backward()
    says = r"must return torch.float32 \(7, 6\) for 'embed.weight'"
    watch = dh.gradients(model, optimizer, rules=[dh.only("embed.*", lambda name, grad: grad[:1])])
    with watch, pytest.raises(UsageError, match=says):
        optimizer.step()


def _refusals(rank: int) -> dict[str, str]:
    """What is said in each case where another library would do nothing."""
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
        dh.on_gradient(nn.parallel.DistributedDataParallel(ignoring), "*", print)

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
def test_what_would_do_nothing_on_an_engine(ranks: Ranks) -> None:
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


def test_only_deepspeed_has_an_optimizer_of_its_own() -> None:
    with pytest.raises(UsageError, match="which optimizer"):
        dh.gradients(Net(), rules=[dh.ClipNorm(1.0)])
