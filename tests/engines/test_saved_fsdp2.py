"""Laws 1, 2 and 6 on the options of DDP and ``fully_shard`` that change when weights and gradients move."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.models import Tiny, identical, stores, tokens
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import (
    FEW,
    FEW_GOOD,
    FOUR,
    HOWS,
    KINDS,
    Proof,
    alive_with_and_without,
    numbers,
    prove,
    run,
    trainer,
)

pytestmark = pytest.mark.dist


# --- DDP


class Branching(Tiny):
    """The second block is used by some ranks only."""

    def forward(self, tokens: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = self.blocks[0](self.embed(tokens))
        return self.norm(self.blocks[1](x) if both else x)


def _unused(rank: int, how: str, folder: str) -> dict[str, tuple[bool, bool, int]]:
    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for i in range(3):
            torch.manual_seed(i)
            model(tokens(seed=10 * i + rank), both=i < 2 and rank != i).square().mean().backward()
            optimizer.step()
            found += numbers(model)
            optimizer.zero_grad()
        return found

    engine = functools.partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
    truth = run(Branching, engine, train, how, None)
    found = {}
    for kind, line in stores(folder).items():
        results, report = run(Branching, engine, train, how, line)
        moved = report.loaded + report.kept_by.get("in place", 0)
        found[kind] = (identical(results, truth.numbers), moved > 100_000, report.held)
    return found


@pytest.mark.parametrize("how", HOWS)
def test_ddp_with_a_branch_not_used_on_one_rank(ranks: Ranks, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_unused, how, str(tmp_path)) == [{kind: (True, True, 0) for kind in KINDS}] * 2


# --- FSDP2


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


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_hybrid_sharding(ranks: Ranks, shape: tuple[int, int], tmp_path: pathlib.Path) -> None:
    assert ranks(_options, "", "before", str(tmp_path), shape) == [FEW_GOOD, FEW_GOOD]


@pytest.mark.parametrize("how", HOWS)
def test_hybrid_sharding_of_four(how: str, tmp_path: pathlib.Path) -> None:
    assert FOUR(_options, "", how, str(tmp_path), (2, 2)) == [FEW_GOOD] * 4


def _alive(rank: int, name: str, how: str, folder: str) -> list[tuple[int, int]]:
    line = dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder))
    return alive_with_and_without(Tiny, functools.partial(_fsdp2, name=name), how, line, rank)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["nested", "keep"])
def test_gathered_weights_are_freed_after_forward(ranks: Ranks, name: str, how: str, tmp_path: pathlib.Path) -> None:
    for (gathered, left), with_hooks in ranks(_alive, name, how, str(tmp_path)):
        assert gathered > 100_000
        assert left == (gathered if name == "keep" else 0)
        assert with_hooks == (gathered, left)
