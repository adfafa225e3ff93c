"""Laws 1, 2, 6 and 11 on ``fully_shard`` and its options that change when weights and gradients move."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.saved.pipeline import pipeline
from tests.support.models import Tiny
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import (
    FEW,
    FEW_GOOD,
    FOUR,
    HOWS,
    Proof,
    alive_with_and_without,
    prove,
    trainer,
)

pytestmark = pytest.mark.dist


def _fsdp2(model: nn.Module, name: str = "", shape: tuple[int, ...] = (2,)) -> nn.Module:
    """Blocks in a sharded model, and for ``nested`` linear layers in sharded blocks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    }
    if name == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    if name == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    reshard: bool | int = name != "keep"
    blocks = list(model.blocks)
    for block in blocks:
        if name == "nested":
            for linear in (block.qkv, block.out, block.mlp[0], block.mlp[2]):
                fully_shard(linear, **options)
        fully_shard(block, reshard_after_forward=2 if name == "part" else reshard, **options)
    fully_shard(model, **options)
    if name == "prefetch":
        blocks[0].set_modules_to_forward_prefetch([blocks[1]])
        blocks[1].set_modules_to_backward_prefetch([blocks[0]])
    return model


def _half() -> nn.Module:
    return Tiny().bfloat16()


def _options(rank: int, name: str, how: str, folder: str, shape: tuple[int, ...] = (2,)) -> dict[str, Proof]:
    train = trainer(rank, accumulate=True, autocast=name == "autocast")
    engine = functools.partial(_fsdp2, name=name, shape=shape)
    return prove(Tiny, engine, train, how, folder, plain=_half if name == "mixed" else Tiny, kinds=FEW)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["nested", "keep", "part", "mixed", "autocast", "prefetch", "offload"])
def test_options_change_nothing(ranks: Ranks, name: str, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_options, name, how, str(tmp_path)) == [FEW_GOOD, FEW_GOOD]


@pytest.mark.parametrize("how", HOWS)
def test_hybrid_sharding_of_four(how: str, tmp_path: pathlib.Path) -> None:
    assert FOUR(_options, "", how, str(tmp_path), (2, 2)) == [FEW_GOOD] * 4


def _alive(rank: int, name: str, how: str, folder: str) -> list[tuple[int, int]]:
    line = pipeline(dh.OnDisk(folder), at_least=0)
    return alive_with_and_without(Tiny, functools.partial(_fsdp2, name=name), how, line, rank)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["nested", "keep"])
def test_gathered_weights_are_freed_after_forward(ranks: Ranks, name: str, how: str, tmp_path: pathlib.Path) -> None:
    for (gathered, left), with_hooks in ranks(_alive, name, how, str(tmp_path)):
        assert gathered > 100_000
        assert left == (gathered if name == "keep" else 0)
        assert with_hooks == (gathered, left)


# --- Gradients


# --- Four ranks: one dimension of a mesh, with nothing that says that the other one is tensor parallelism


def _on_one_dimension(rank: int, names: str) -> float:
    """Two independent copies (names "same"), or two stages of a pipeline ("stages"), each sharded over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    key = "layer" if names == "same" else f"layer{rank // 2}"
    model = nn.Sequential()
    model.add_module(key, nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)) * (10 if rank > 1 else 1)
    with dh.gradients(model, optimizer, stats=[stats.Norm()], every=1) as watch:
        model(x).square().sum().backward()
        optimizer.step()
    truth = next(model.parameters()).grad.full_tensor().norm()  # over this mesh["dp"]
    return watch.latest["grad_norm"] / float(truth)


@pytest.mark.parametrize("names", ["same", "stages"])
def test_fsdp2_on_one_dimension_of_a_mesh(four: Ranks, names: str) -> None:
    """Each pair's own norm, never a mix of the two."""
    assert four(_on_one_dimension, names) == pytest.approx([1.0] * 4, rel=1e-4)
