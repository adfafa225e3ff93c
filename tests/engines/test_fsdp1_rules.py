"""Laws 11 and 15 on FSDP1: parameters beside flat ones, the part that a final function gets, and what is refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from disthooks.engines.detect import detect_engine
from disthooks.errors import DisthooksError, UsageError
from tests.support.engines import Net, close, flat, grads_of, loss_of, make, train
from tests.support.ranks.harness import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.full_tier]
MODES = ["fsdp1", "fsdp1flat"]
EVERY = [*MODES, "fsdp1hybrid", "fsdp1flathybrid", "fsdp1none", "fsdp1flatnone"]


# --- some of the parameters


def _beside(rank: int, engine: str, how: str) -> Any:
    """Parameters that no FSDP module has: ignored ones, or those of a plain model around FSDP modules."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    net = Net()
    if how == "ignored":
        return _trained_beside(flat(net, engine, parts=(), ignored_states=[net.scale]), rank, engine)
    options = {"use_orig_params": engine == "fsdp1", "device_id": torch.device("cpu")}
    net.embed = FullyShardedDataParallel(net.embed, **options)
    net.mid = FullyShardedDataParallel(net.mid, **options)
    return _trained_beside(net, rank, engine)


@pytest.mark.parametrize("how", ["ignored", "a plain root"])
@pytest.mark.parametrize("engine", MODES)
def test_parameters_beside_flat_ones(ranks: Ranks, engine: str, how: str) -> None:
    truth = train(0, "plain", [dh.ClipNorm(1.0)], steps=1)
    for found in ranks(_beside, engine, how):
        assert close(found, truth)


def _trained_beside(model: nn.Module, rank: int, engine: str) -> Any:
    apart = [shard.parameter for shard in detect_engine(model).shards if shard.sharding == "unreduced"]
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False), []
    with (
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], every=1) as watch,
        dh.on_gradient(model, "scale", lambda grad: seen.append(grad.shape), at="local"),
    ):
        loss_of(model, 0, engine, rank).backward()
        for parameter in apart:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
    assert [shard.name for shard in detect_engine(model).shards if shard.sharding == "unreduced"]
    assert seen == [(1, 5)]
    return [watch.latest], grads_of(model)


# --- "final"


def _final(rank: int, engine: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, int], str]:
    """One function on this rank's flat parts, of which it doubles the elements and may see none."""
    model, seen = make(engine), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shapes: list[tuple[int, ...]] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(grad.shape))
        return grad * 2

    with dh.on_gradient(model, "*", double) as hook:
        loss_of(model, 0, engine, rank).backward()
        optimizer.step()
    has = {s.name: s.part.local_shape for s in detect_engine(model).shards if math.prod(s.part.local_shape)}
    assert sorted(shapes) == sorted(has.values())
    seen = {name: count for name, count in hook.report().items() if count}
    said = ""
    with dh.on_gradient(model, "embed.weight", lambda grad: grad[:-1]):
        try:
            optimizer.step()
        except UsageError as error:
            said = str(error)
    return has, grads_of(model), seen, said


@pytest.mark.parametrize("engine", EVERY)
def test_a_final_function_gets_the_part_that_is_here(ranks: Ranks, engine: str) -> None:
    model = make("plain")
    loss_of(model, 0, "plain").backward()
    names = set()
    for has, grads, seen, said in ranks(_final, engine):
        assert close(grads, {name: 2 * grad for name, grad in grads_of(model).items()}, 1e-5)
        assert seen == dict.fromkeys(has, 1)
        assert all(len(shape) == 1 for shape in has.values()) or "none" in engine
        assert said == "" or "'embed.weight'" in said
        names |= has.keys()
    assert names == grads_of(model).keys()


# --- what is refused


def _refused(rank: int) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

    said: dict[str, str] = {}

    @contextlib.contextmanager
    def saying(case: str) -> Any:
        try:
            yield
        except DisthooksError as error:
            said[case] = str(error)

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with saying("replicas that are never averaged"):
        detect_engine(flat(Net(), "fsdp1hybrid", device_mesh=mesh))
    with saying("replicas without a mesh"):
        groups = {"process_group": (dist.group.WORLD, mesh.get_group("shard"))}
        detect_engine(flat(Net(), "fsdp1", sharding_strategy=ShardingStrategy.HYBRID_SHARD, **groups))
    with saying("channels last without shards"):
        detect_engine(
            flat(nn.Sequential(nn.Conv2d(2, 3, 3)).to(memory_format=torch.channels_last), "fsdp1none", parts=())
        )
    with saying("other ranks"):
        net = Net()
        net.mid = FullyShardedDataParallel(net.mid, device_mesh=mesh["shard"], device_id=torch.device("cpu"))
        detect_engine(flat(net, "fsdp1", parts=()))
    with saying("inside DDP"):
        detect_engine(nn.parallel.DistributedDataParallel(flat(Net(), "fsdp1none"), init_sync=False))
    with saying("beside FSDP2"):
        net = Net()
        fully_shard(net.embed, mesh=init_device_mesh("cpu", (2,)))
        detect_engine(flat(net, "fsdp1", parts=(), ignored_states=list(net.embed.parameters())))
    model = flat(Net(), "fsdp1")
    loss = loss_of(model, 0, "fsdp1", rank)
    with saying("after forward"), dh.on_gradient(model, "mid.1.weight", print, at="local"):
        loss.backward()
    for engine in MODES:
        for at in ("local", "final"):
            net = Net()
            with dh.on_gradient(net, "*", print, at), saying(f"{at} hook before {engine}"):
                loss_of(flat(net, engine), 0, engine, rank).backward()
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with dh.gradients(net, optimizer, rules=[dh.ClipNorm(1.0)]), saying(f"rules before {engine}"):
            loss_of(flat(net, engine), 0, engine, rank).backward()
            optimizer.step()
        net = Net()
        optimizer, model = torch.optim.SGD(net.parameters(), lr=0.0), flat(net, engine)
        with saying(f"optimizer before {engine}"):
            dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)])
    model = flat(Net(), "fsdp1")
    with dh.on_gradient(model, "mid.1.weight", print, at="local"), saying("a module replaced"):
        model.module.mid = nn.Linear(7, 5)
        loss_of(model, 0, "fsdp1", rank)
    model = flat(Net(), "fsdp1")
    with dh.gradients(model, torch.optim.SGD(model.parameters()), rules=[dh.ClipNorm(1.0)]) as watch:
        model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))
        with saying("a parameter replaced"):
            watch._checks.engine.check()
    return said


def test_what_cannot_be_right_says_so(ranks: Ranks) -> None:
    expected = {
        "channels last without shards": "'0.weight' lies in another order than its indices",
        "replicas that are never averaged": "never averages gradients over the replicas [0, 1]",
        "replicas without a mesh": "HYBRID_SHARD without a mesh, so disthooks cannot tell which ranks train together",
        "other ranks": "the same process_group or device_mesh",
        "inside DDP": "FSDP1 has 'the model' and the engine of the model is DDP",
        "beside FSDP2": "'embed.weight' is a DTensor beside FSDP1",
        "after forward": "attach before the forward pass",
        "a module replaced": "is no longer in the model",
        "a parameter replaced": "'head.weight' is no longer the parameter",
        "optimizer before fsdp1flat": "after fully_shard or whatever else",
    } | {
        f"{what} before {engine}": "attach after the engine"
        for what in ("local hook", "final hook", "rules")
        for engine in MODES
    }
    for said in ranks(_refused):
        assert said.keys() == expected.keys()
        assert {case: said[case] for case, says in expected.items() if says not in said[case]} == {}
