"""Engines on fake ranks: the totals by closed formulas, at a thousand ranks, and nothing left afterwards.

tests/engines/test_explained.py compares them with real ranks.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from disthooks.errors import UsageError
from disthooks.predict.engines import spec as engines
from disthooks.predict.engines.spec import EngineSpec, Prepared, apply_engine, block_classes, blocks, state_bytes
from disthooks.predict.engines.worlds import current_world, fake_world
from disthooks.predict.fake.fake_run import fake_run
from tests.support.decoder import Decoder

WORLD = 1024
SHAPES = [tuple(weight.shape) for weight in Decoder().parameters()]
TOTAL = sum(map(math.prod, SHAPES))
LARGEST, SMALLEST = "largest", "smallest"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(
    spec: EngineSpec, rank: Any = 0, steps: int = 2, model: nn.Module | None = None
) -> dict[str, dict[str, int]]:
    """The state of the model on that rank: after the last backward, and after the step."""
    with fake_world(spec.world, rank), fake_run():
        model = model or Decoder()
        if spec.kind.startswith("zero"):
            model.to(torch.bfloat16)
        prepared = apply_engine(model, spec, torch.optim.AdamW)
        for _ in range(steps):
            backward(prepared)
            found = {"backward": state_bytes(prepared)}
            prepared.step()
        return found | {"step": state_bytes(prepared)}


def backward(prepared: Prepared) -> None:
    prepared.backward(prepared.model(torch.ones(2, 8, dtype=torch.int64)).float().sum())


def adam(elements: int, scalars: int) -> int:
    """Two moments in fp32 for each element, and for each tensor the number of steps in four bytes."""
    return 8 * elements + 4 * scalars


def rows(shape: tuple[int, ...], world: int) -> int:
    """The elements of a shard of FSDP2, padded as the largest: whole rows of the first dimension."""
    return math.ceil(shape[0] / world) * math.prod(shape[1:])


# -------------------------------------------------------------------------------------------- totals by closed formulas


def test_plain_holds_everything() -> None:
    found = trained(EngineSpec())
    assert found["backward"]["parameters"] == found["backward"]["gradients"] == 4 * TOTAL
    assert found["step"]["optimizer"] == adam(TOTAL, len(SHAPES))
    assert found["step"]["gradients"] == 0
    assert found["step"]["buffers"] == 12


NAMED_BY_THE_PLAN = 2 * (4 * 37 * 24 + 3 * 37 * 56)
CUT = [
    (37,),
    (37,),
    *[(6, 37)] * 3,
    (37, 6),
    *[(14, 37)] * 2,
    (37, 14),
]  # a layer on four ranks of the tensor dimension
#: The elements that a rank has.
SHARDS: dict[str, tuple[EngineSpec, int]] = {
    **{f"fsdp2 on {n}": (EngineSpec("fsdp2", n), sum(rows(shape, n) for shape in SHAPES)) for n in (2, 8, WORLD)},
    "hsdp, over the second dimension": (EngineSpec("hsdp", WORLD), sum(rows(shape, 8) for shape in SHAPES)),
    "tp, what the plan names": (EngineSpec("tp", 4), TOTAL - NAMED_BY_THE_PLAN + NAMED_BY_THE_PLAN // 4),
    "fsdp2 of what tp leaves": (
        EngineSpec("fsdp2+tp", WORLD, mesh=(WORLD // 4, 4)),
        sum(rows(shape, WORLD // 4) for shape in [(101, 37), *CUT, *CUT, (37,), (101, 37)]),
    ),
}


@pytest.mark.parametrize("case", SHARDS)
def test_a_rank_has_its_shards_padded(case: str) -> None:
    spec, elements = SHARDS[case]
    found = trained(spec)
    assert found["backward"]["parameters"] == found["backward"]["gradients"] == 4 * elements
    assert found["step"]["parameters"] == 4 * elements


def test_fsdp2_first_and_last_rank() -> None:
    """101 rows on 8 ranks are 13 on each rank but the last, which has 10; its memory is as long, its state is not."""
    largest, smallest = (trained(EngineSpec("fsdp2", 8), rank)["step"] for rank in (LARGEST, SMALLEST))
    whole = [math.prod(shape[1:]) * min(shape[0], math.ceil(shape[0] / 8)) for shape in SHAPES]
    last = [math.prod(shape[1:]) * max(0, shape[0] - 7 * math.ceil(shape[0] / 8)) for shape in SHAPES]
    assert largest["optimizer"] == adam(sum(whole), len(SHAPES))
    assert smallest["optimizer"] == adam(sum(last), len(SHAPES))
    assert largest["parameters"] == smallest["parameters"]


# ------------------------------------------------------------------------------------------------------------ DeepSpeed


@pytest.mark.second_tier
@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_offloads_is_the_hosts(stage: int) -> None:
    zero: dict[str, Any] = {"reduce_bucket_size": 10_000, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    if stage == 3:
        zero |= {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    spec = EngineSpec(f"zero{stage}", 8, dtype=torch.bfloat16, options={"zero_optimization": zero})
    found = trained(spec)["step"]
    state = found["master"] + found["optimizer"] + found["gradients"]
    assert found["optimizer"] > 0
    assert found["host"] == (state + found["parameters"] if stage == 3 else state)


# ---------------------------------------------------------------------------------------------------- a user's own code


def test_a_user_may_call_the_engine() -> None:
    with fake_world(WORLD) as world, fake_run():
        quiet: list[int] = []

        class Told:
            def __enter__(self) -> None:
                quiet.append(1)

            def __exit__(self, *error: object) -> None: ...

        world.around_propagation = Told
        assert DeviceMesh("cpu", [0, 1, 2, 3]).size() == 4
        mesh = init_device_mesh("cpu", (WORLD // 4, 4), mesh_dim_names=("data", "tensor"))
        model = nn.Linear(1024, 8)
        fully_shard(model, mesh=mesh["data"])
        assert mesh["tensor"].size() == 4
        assert tuple(mesh.get_coordinate() or ()) == (0, 0)
        assert mesh.mesh.shape == (WORLD // 4, 4)
        weight: Any = model.weight
        assert weight.to_local().shape == (1, 1024)
        assert isinstance(weight.to_local(), FakeTensor)
        assert weight.sum().full_tensor().shape == ()
        assert quiet, "the shape of the sum of the whole was computed"
        assert isinstance(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), nn.Module)
        assert isinstance(nn.parallel.DistributedDataParallel(nn.BatchNorm1d(4))(torch.ones(2, 4)), FakeTensor)


# ---------------------------------------------------------------------------------------------- nothing left afterwards


def _state() -> dict[str, Any]:
    """What a fake world replaces."""
    from torch.distributed import _functional_collectives
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.nn.parallel import distributed

    owners = (dist, DeviceMesh, ShardingPropagator, torch.UntypedStorage, FakeTensor, distributed)
    owners = (*owners, _functional_collectives, nn.functional, nn.Module)
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}


def _same(before: dict[str, Any]) -> None:
    after = _state()
    fickle = {"__dict__", "__weakref__", "__warningregistry__", "__annotations__"}
    changed = {name for name in before if name.rpartition(".")[2] not in fickle and after.get(name) is not before[name]}
    assert not changed
    assert not [name for name in after.keys() - before.keys() if "_pytest" not in name]


@pytest.mark.parametrize("kind", [*engines.KINDS[:7], pytest.param("zero3", marks=pytest.mark.second_tier)])
def test_everything_is_put_back(kind: str) -> None:
    spec = EngineSpec(kind, 4, mesh=(2, 2) if "+" in kind or kind == "hsdp" else ())
    trained(spec, steps=1)  # lazy imports come first
    before, environment, filters = _state(), dict(os.environ), list(warnings.filters)
    trained(spec, steps=1)
    _same(before)
    assert os.environ == environment
    assert warnings.filters == filters
    assert not dist.is_initialized()
    assert current_world() is None


def test_an_error_inside_ends_the_world() -> None:
    before = _state()
    with pytest.raises(KeyError), fake_world(4):
        raise KeyError
    _same(before)
    assert not dist.is_initialized()


# ------------------------------------------------------------------------------------------------------ what is refused


def _inside(world: int, run: Callable[[], object], rank: Any = 0) -> object:
    with fake_world(world, rank), fake_run():
        return run()


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: _inside(2, lambda: _inside(4, list)), "already rank 0 of 2"),
    *((functools.partial(_inside, 4, list, rank), "is not in a world of 4 ranks") for rank in (4, -1, "middle")),
    (lambda: EngineSpec("zero4"), "there is no engine 'zero4'"),
    (lambda: EngineSpec("hsdp", 12), r"two sizes whose product is 12, not \(1, 8\)"),
    (lambda: EngineSpec("fsdp2", 8, mesh=(2, 4)), "one dimension"),
    (lambda: EngineSpec("ddp", dtype=torch.bfloat16), "ddp has no dtype"),
    (
        lambda: apply_engine(nn.Linear(2, 2), EngineSpec("ddp", 2)),
        "needs a process group of as many; there is one of 0",
    ),
    (lambda: _inside(4, lambda: apply_engine(nn.Linear(2, 2), EngineSpec("ddp", 2))), "there is one of 4"),
    (lambda: apply_engine(nn.Linear(2, 2), EngineSpec()).step(), "no optimizer"),
    (lambda: engines.tensor_plan(nn.Sequential(nn.Linear(2, 2)), None), "has no plan"),
    (lambda: engines.tensor_plan(nn.Sequential(nn.Linear(2, 2)), {"9": "colwise"}), "'9' matches no module"),
    (lambda: engines.tensor_plan(nn.Sequential(nn.Linear(2, 2)), {"0": "diagonal"}), "style 'diagonal' of 0"),
    (lambda: blocks(Mixture(), ("Layer",)), "no module to wrap is a Layer; the classes are Block, Expert"),
    (lambda: trained(EngineSpec("ddp", 2, options={"mixed_precision": object()})), "mixed precision"),
    (lambda: _inside(4, lambda: DeviceMesh("cpu", torch.arange(4))), "has no ranks"),
]


@pytest.mark.parametrize(("run", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_is_refused(run: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        run()


@pytest.mark.second_tier
def test_another_stage_in_the_configuration_is_refused() -> None:
    spec = EngineSpec("zero2", 2, options={"zero_optimization": {"stage": 3}})
    with pytest.raises(UsageError, match="has stage 3, not 2"):
        _inside(2, lambda: apply_engine(Decoder(), spec))


# ------------------------------------------------------------------------------------------------ the blocks of a model


class Expert(nn.Linear):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(8, 8) for _ in range(4))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.small = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))


def test_blocks_are_the_outermost_that_hold_most() -> None:
    assert block_classes(Mixture()) == ("Block",)
    assert list(blocks(Mixture())) == ["layers.0", "layers.1"]
    assert list(blocks(Mixture(), ("Expert",)))[:2] == ["layers.0.experts.0", "layers.0.experts.1"]


def test_the_model_names_its_blocks() -> None:
    model: Any = Mixture()
    model._no_split_modules = ["Expert", "NotThere"]
    assert block_classes(model) == ("Expert",)


def test_what_dtensor_remembers_of_one_rank_is_not_used_for_another() -> None:
    plan = {"head": "colwise_gather_output"}  # 101 rows: 51 on the first rank, and 50 on the second
    found = [trained(EngineSpec("tp", 2, tp_plan=plan), rank) for rank in (0, 1, 0)]
    assert found[0] == found[2]


def test_fsdp1_that_offloads_is_explained() -> None:
    from torch.distributed.fsdp import CPUOffload

    found = trained(EngineSpec("fsdp1", 4, options={"cpu_offload": CPUOffload(True)}))["backward"]
    assert found["host"] == found["parameters"] + found["gradients"] + found["optimizer"] > 0
