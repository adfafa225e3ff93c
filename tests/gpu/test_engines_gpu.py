"""Engines on GPUs: saved tensors by bits, rules and statistics by the truth of one process.

One process is a group of one, with nccl; two share a device by gloo, which knows DDP's collectives and no others, or
have one each, with nccl and every engine. ``DISTHOOKS_DEVICE=cpu`` runs the same on the CPU.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.engines.test_truth import PLANS
from tests.support.engines import close
from tests.support.models import Tiny
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import FEW, FEW_GOOD, prove, trainer
from tests.support.ranks.truth import run
from tests.support.switch import KIND, repeatable

DEVICES = torch.cuda.device_count() if KIND == "cuda" else 2
SITUATIONS = ["step", "no_sync", "tied", "groups"]

pytestmark = [
    pytest.mark.dist,
    pytest.mark.gpu,
    pytest.mark.skipif(KIND == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("DISTHOOKS_DEVICE" not in os.environ, reason="DISTHOOKS_DEVICE names the device to run it on"),
    pytest.mark.skipif(KIND == "sim", reason="no process group takes tensors of the simulated accelerator"),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    pool = Ranks(1, timeout=300, device=KIND)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pool = Ranks(2, timeout=300, device=KIND)
    yield pool
    pool.stop()


def _engine(model: nn.Module, name: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    if name == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    if name == "fsdp1":
        from tests.support.engines import flat

        return flat(model, "fsdp1", ("blocks.0", "blocks.1"))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _proven(rank: int, engine: str, how: str, folder: str) -> dict[str, Any]:
    repeatable()
    of = functools.partial(_engine, name=engine)
    found = prove(Tiny, of, trainer(rank), how, folder, kinds=[*FEW, "cpu"])
    return {kind: tuple(proof) for kind, proof in found.items()}


def _truths(rank: int, world: int, engine: str, situation: str) -> tuple[Any, Any]:
    """What the engine gives, and one process of this rank's own, on the same device and on the CPU."""
    repeatable()
    found, truth = (run(at, world, name, situation, PLANS) for at, name in ((rank, engine), (0, "plain")))
    return _cpu(found), _cpu(truth)


def _cpu(found: dict[str, Any]) -> dict[str, Any]:
    return {name: (record, {n: g.cpu() for n, g in grads.items()}) for name, (record, grads) in found.items()}


def _check_truths(answers: list[tuple[Any, Any]]) -> None:
    for found, truth in answers:
        for name, _, _ in PLANS:
            (record, grads), (their_record, their_grads) = found[name], truth[name]
            assert record.keys() == their_record.keys()
            for key, value in their_record.items():
                nothing = isinstance(value, float) and abs(value) < 1e-12  # the mean of what adds up to nothing
                assert close(record[key], value, 1e-10) or (nothing and abs(record[key]) < 1e-12), (name, key)
            assert close(grads, their_grads, 1e-10), name


GOOD = {kind: tuple(FEW_GOOD[FEW[0]]) for kind in [*FEW, "cpu"]}


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("how", ["before", "after"])
def test_saved_tensors_in_a_group_of_one(alone: Ranks, engine: str, how: str, tmp_path: pathlib.Path) -> None:
    if engine == "fsdp1" and how == "after":
        pytest.skip("test_saved_fsdp has the patterns for what FSDP1 wraps")
    assert alone(_proven, engine, how, str(tmp_path)) == [GOOD]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1", "tp"])
def test_rules_and_statistics_in_a_group_of_one(alone: Ranks, engine: str, situation: str) -> None:
    if (engine, situation) == ("tp", "tied"):
        pytest.skip("parallelize_module gives the two names a parameter each")
    _check_truths(alone(_truths, 1, engine, situation))


def test_ddp_on_two_ranks(pair: Ranks, tmp_path: pathlib.Path) -> None:
    """Each has a device, or both have the same."""
    assert pair(_proven, "ddp", "before", str(tmp_path)) == [GOOD] * 2
    _check_truths(pair(_truths, 2, "ddp", "no_sync"))


@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices: nccl refuses two ranks on one, gloo has no all_gather")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_sharded_engines_on_two_ranks(pair: Ranks, engine: str, tmp_path: pathlib.Path) -> None:
    assert pair(_proven, engine, "before", str(tmp_path)) == [GOOD] * 2
    _check_truths(pair(_truths, 2, engine, "no_sync"))
