"""Law 1 on engines: two ranks, gradients with every lossless pipeline bit-identical to those without."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.engines import flat
from tests.support.models import Tiny, identical, tokens
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import GOOD, HOWS, Proof, fsdp2, prove, run, trainer, wrap

pytestmark = pytest.mark.dist


def _engine(model: nn.Module, name: str) -> nn.Module:
    if name == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    if name == "ddp static":
        return nn.parallel.DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    return fsdp2(model, name.removeprefix("fsdp2").strip())


def _prove(rank: int, engine: str, how: str, folder: str) -> dict[str, Proof]:
    # no_sync in the first iteration is an assertion inside torch for a static graph
    train = trainer(rank, accumulate=engine != "ddp static")
    return prove(Tiny, functools.partial(_engine, name=engine), train, how, folder)


@pytest.mark.full_tier(engine=("ddp static",), how=("after", "wrappers"))
@pytest.mark.first_tier(engine=("ddp", "fsdp2"), how=("before", "after"))
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("engine", ["ddp", "ddp static", "fsdp2"])
def test_gradients_are_bit_identical(ranks: Ranks, engine: str, how: str, tmp_path: pathlib.Path) -> None:
    """Weights that FSDP2 has gathered are never stored: the bytes are those of one process."""
    assert ranks(_prove, engine, how, str(tmp_path)) == [GOOD, GOOD]


def _products(rank: int, engine: str, pattern: str, folder: str) -> tuple[bool, bool, int, int]:
    """Whether gradients are those without hooks with matrix products that are computed again, and how many ran."""
    take = functools.partial(flat, engine=engine, parts=("blocks.0", "blocks.1"))
    if not engine.startswith("fsdp1"):
        take = functools.partial(_engine, name=engine)
    train = trainer(rank, accumulate=engine != "ddp static", steps=3)
    line = pipeline(dh.Recompute(products=2), dh.OnDisk(folder), at_least=0)
    truth, (found, report) = (run(Tiny, take, train, "after", each, pattern) for each in (None, line))
    return identical(found, truth.numbers), not report.differed, report.rerun_flops, report.held


@pytest.mark.first_tier(engine=("ddp", "fsdp2"), pattern=("",))
@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"))
@pytest.mark.parametrize("pattern", ["", "*blocks.?"])
@pytest.mark.parametrize("engine", ["ddp", "ddp static", "fsdp2", "fsdp2 keep", "fsdp2 mixed", "fsdp1", "fsdp1flat"])
def test_products_are_computed_again_with_the_bits(
    ranks: Ranks, engine: str, pattern: str, tmp_path: pathlib.Path
) -> None:
    """Also if the hooks are around units that free their weights when their forward ends."""
    for same, proven, flops, held in ranks(_products, engine, pattern, str(tmp_path)):
        assert same
        assert proven
        # With FSDP1 a bias is a piece of a flat parameter, and the graph does not say which: such a product is stored.
        assert flops == 0 if engine.startswith("fsdp1") else flops > 0
        assert held == 0


def _selective(rank: int, engine: str, folder: str) -> tuple[bool, int, int, list[str]]:
    """Whether gradients are those without hooks; bytes stored of what checkpoints keep, bytes held, and warnings."""

    def keep_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def make() -> nn.Module:
        model = Tiny()
        context = functools.partial(create_selective_checkpoint_contexts, keep_products)
        model.blocks = nn.ModuleList(checkpoint_wrapper(block, context_fn=context) for block in model.blocks)
        return model

    take, train = functools.partial(_engine, name=engine), trainer(rank, accumulate=True)
    lines = [pipeline(dh.OnDisk(folder), selective_checkpoints=each, at_least="1 KiB") for each in (False, True)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        truth, left, moved = (run(make, take, train, "after", line, "") for line in (None, *lines))
    same = identical(moved.numbers, truth.numbers) and identical(left.numbers, truth.numbers)
    assert left.report.kept_by["selective checkpoint"] > 0
    assert "selective checkpoint" not in moved.report.kept_by
    texts = [str(each.message) for each in told if "selective" in str(each.message)]
    return same, moved.report.stored - left.report.stored, moved.report.held, texts


@pytest.mark.first_tier(engine=("ddp", "fsdp2"))
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp2 keep", "fsdp2 mixed"])
def test_what_a_selective_checkpoint_keeps_is_stored(ranks: Ranks, engine: str, tmp_path: pathlib.Path) -> None:
    for same, stored, held, told in ranks(_selective, engine, str(tmp_path)):
        assert (same, held, told) == (True, 0, [])
        assert stored > 100_000


def _trained(engine: str, how: str, seed: int, rank: int, folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Tiny()
    parts = ["blocks.0", "blocks.1"]
    if how == "wrappers":
        wrap(model, dh.OnDisk(folder))
    elif how == "in place":
        dh.save_activations(model, "blocks.*", dh.OnDisk(folder))
    # FSDP1 outside of the wrapper: inside of one, torch's own too, set_state_dict does not find the optimizer's names.
    model = _engine(model, engine) if engine == "fsdp2" else flat(model, engine, parts)
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(seed=rank)).sum().backward()
    optimizer.step()
    return model, optimizer


def _checkpoint(rank: int, engine: str, one: str, two: str, folder: str) -> tuple[list[str], list[str], bool]:
    """From one model to another; names, and whether all of it arrived."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    source, source_optimizer = _trained(engine, one, 1, rank, folder)
    target, target_optimizer = _trained(engine, two, 2, rank, folder)
    model_state, optimizer_state = get_state_dict(source, source_optimizer)
    names = sorted(model_state), sorted(optimizer_state["state"])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/checkpoint")
    model_state, optimizer_state = get_state_dict(target, target_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(target, target_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    pairs = [pair for pair in zip(source.parameters(), target.parameters(), strict=True) if pair[0].numel()]
    moments = [(source_optimizer.state[a]["exp_avg"], target_optimizer.state[b]["exp_avg"]) for a, b in pairs]
    both = [[getattr(each, "_local_tensor", each) for each in pair] for pair in (*pairs, *moments)]
    return *names, len(moments) > 0 and all(torch.equal(*pair) for pair in both)


@pytest.mark.parametrize("how", ["in place", "wrappers"])
@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_distributed_checkpoint_goes_both_ways(ranks: Ranks, engine: str, how: str, tmp_path: pathlib.Path) -> None:
    names = sorted(Tiny().state_dict())
    for one, two in [(how, "plain"), ("plain", how)]:
        folder = tmp_path / one
        folder.mkdir()
        assert ranks(_checkpoint, engine, one, two, str(folder)) == [(names, names, True)] * 2


VICTIM = """
import os, signal, sys, torch, torch.distributed as dist, disthooks as dh
from torch import nn
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], 2), rank=rank, world_size=2)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]))
saving = dh.save_activations(model, "?", dh.OnDisk(sys.argv[1]))
for i in range(1000):
    loss = model(torch.randn(512, 256)).sum()
    if i == 3:
        print(saving.report().held, flush=True)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
"""


def test_a_rank_killed_in_mid_step_leaves_no_file(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    victims = [
        subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(folder), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [victim.communicate(timeout=300) for victim in victims]
    assert victims[1].returncode == -signal.SIGKILL
    assert victims[0].returncode != 0  # its peer is gone: an error, and no hang
    assert all(int(out.splitlines()[-1]) > 1_000_000 for out, _ in outputs)  # some gloos print a line of their own
    assert os.listdir(folder) == []


def _full(rank: int, folder: str) -> str:
    """One rank's store is full; it says so, and the other is not left waiting for ever."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Tiny())
    line = dh.OnDisk(folder, limit="100 KiB" if rank == 1 else None)
    with dh.save_activations(model, "blocks.*", line):
        try:
            loss = model(tokens())
        except dh.errors.StoreError as error:
            return str(error)
    del loss
    return "fine"


def test_a_full_store_is_an_error_of_its_rank(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    fine, full = ranks(_full, str(tmp_path))
    assert fine == "fine"
    assert "is full: wanted" in full
    assert ranks(_sum) == [3, 3]  # the ranks are in step


def _sum(rank: int) -> int:
    tensor = torch.tensor(rank + 1)
    dist.all_reduce(tensor)
    return int(tensor)
