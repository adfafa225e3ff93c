"""Law 1 on engines: two ranks, gradients with every lossless pipeline bit-identical to those without."""

from __future__ import annotations

import functools
import gc
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
from disthooks.saved.report import SavedReport
from tests.support.engines import flat, unsynced
from tests.support.models import Tiny, identical, stores, tokens
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist
KINDS = list(stores("/tmp"))


def _engine(model: nn.Module, name: str) -> nn.Module:
    if name == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    if name == "ddp static":
        return nn.parallel.DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict = {"mesh": init_device_mesh("cpu", (2,))}
    if name == "fsdp2 mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=name != "fsdp2 keep", **options)
    fully_shard(model, **options)
    return model


def _train(model: nn.Module, rank: int, accumulate: bool) -> list[torch.Tensor]:
    """Three steps on this rank's part of the data; the gradients of each, the local part of a shard."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for i in range(3):
        if accumulate:
            with unsynced(model):
                model(tokens(seed=100 + 10 * i + rank)).float().square().mean().backward()
        torch.manual_seed(i)
        model(tokens(seed=10 * i + rank)).float().square().mean().backward()
        # A rank of FSDP1 has no gradient of a parameter whose elements are all on other ranks.
        grads = [torch.empty(0) if p.grad is None else p.grad for p in model.parameters()]
        found += [getattr(g, "_local_tensor", g).clone() for g in grads]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _run(rank: int, engine: str, how: str, kind: str | None, folder: str, accumulate: bool) -> tuple[list, int, int]:
    torch.manual_seed(0)
    model = Tiny()
    line = stores(folder)[kind] if kind else None
    reports = []
    if line is not None and how == "wrappers":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = dh.SaveWith(block, line)
        reports = [block.report for block in model.blocks]
    if line is not None and how == "before":
        reports = [dh.save_activations(model, "blocks.*", line).report]
    model = _engine(model, engine)
    if line is not None and how == "after":
        reports = [dh.save_activations(model, "blocks.*", line).report]
    grads = _train(model, rank, accumulate)
    gc.collect()
    loaded = sum(report().loaded + report().kept_by.get("in place", 0) for report in reports)
    return grads, loaded, sum(report().held for report in reports)


def _compare(rank: int, engine: str, how: str, folder: str, accumulate: bool) -> dict[str, object]:
    truth, _, _ = _run(rank, engine, how, None, folder, accumulate)
    results = {}
    for kind in KINDS:
        grads, loaded, held = _run(rank, engine, how, kind, folder, accumulate)
        results[kind] = (identical(grads, truth), loaded > 100_000, held)
    return results


@pytest.mark.full_tier(engine=("ddp static", "fsdp2 keep", "fsdp2 mixed"), how=("after", "wrappers"))
@pytest.mark.first_tier(engine=("ddp", "fsdp2"), how=("before", "after"))
@pytest.mark.parametrize("how", ["before", "after", "wrappers"])
@pytest.mark.parametrize("engine", ["ddp", "ddp static", "fsdp2", "fsdp2 keep", "fsdp2 mixed"])
def test_gradients_are_bit_identical(ranks: Ranks, engine: str, how: str, tmp_path: pathlib.Path) -> None:
    # no_sync in the first iteration is an assertion inside torch for a static graph
    for result in ranks(_compare, engine, how, str(tmp_path), engine != "ddp static"):
        assert result == {kind: (True, True, 0) for kind in KINDS}


def _products(rank: int, engine: str, pattern: str, folder: str) -> tuple[bool, bool, int, int]:
    """Whether gradients are those without hooks with matrix products that are computed again, and how many ran."""

    def run(line: object) -> tuple[list[torch.Tensor], SavedReport | None]:
        torch.manual_seed(0)
        model = Tiny()
        if engine.startswith("fsdp1"):
            model = flat(model, engine, [f"blocks.{i}" for i in range(len(model.blocks))])
        else:
            model = _engine(model, engine)
        saving = None if line is None else dh.save_activations(model, pattern, line)
        grads = _train(model, rank, engine != "ddp static")
        return grads, saving and saving.report()

    truth, _ = run(None)
    grads, report = run(pipeline(dh.Recompute(products=2), dh.OnDisk(folder), at_least=0))
    gc.collect()
    return identical(grads, truth), not report.differed, report.rerun_flops, report.held


@pytest.mark.first_tier(engine=("ddp", "fsdp2"), pattern=("",))
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

    def run(selective: bool | None) -> tuple[list[torch.Tensor], SavedReport | None]:
        torch.manual_seed(0)
        model = Tiny()
        context = functools.partial(create_selective_checkpoint_contexts, keep_products)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, context_fn=context)
        model = _engine(model, engine)
        if selective is None:
            return _train(model, rank, True), None
        line = pipeline(dh.OnDisk(folder), selective_checkpoints=selective, at_least="1 KiB")
        with dh.save_activations(model, "", line) as saving:
            return _train(model, rank, True), saving.report()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (truth, _), (left, without), (grads, report) = (run(selective) for selective in (None, False, True))
    gc.collect()
    same = identical(grads, truth) and identical(left, truth)
    assert without.kept_by["selective checkpoint"] > 0
    assert "selective checkpoint" not in report.kept_by
    texts = [str(each.message) for each in told if "selective" in str(each.message)]
    return same, report.stored - without.stored, report.held, texts


@pytest.mark.first_tier(engine=("ddp", "fsdp2"))
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp2 keep", "fsdp2 mixed"])
def test_what_a_selective_checkpoint_keeps_is_stored(ranks: Ranks, engine: str, tmp_path: pathlib.Path) -> None:
    for same, stored, held, told in ranks(_selective, engine, str(tmp_path)):
        assert (same, held, told) == (True, 0, [])
        assert stored > 100_000


def _weights(rank: int, folder: str) -> dict[str, int]:
    """FSDP2's gathered weights are never stored: what is stored does not depend on their number."""
    torch.manual_seed(0)
    model = Tiny()
    with dh.save_activations(model, "blocks.*", pipeline(dh.OnDisk(folder), at_least=0)) as saving:
        model(tokens()).sum().backward()
        plain = saving.report()
    model = _engine(model, "fsdp2")
    with dh.save_activations(model, "blocks.*", pipeline(dh.OnDisk(folder), at_least=0)) as saving:
        model(tokens()).sum().backward()
        return {"plain": plain.stored, "fsdp2": saving.report().stored, "kept": saving.report().kept_by["parameter"]}


def test_gathered_weights_are_kept(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    for found in ranks(_weights, str(tmp_path)):
        assert found["plain"] == found["fsdp2"] > 0
        assert found["kept"] > 0


def _checkpoint(rank: int, folder: str) -> tuple[list[str], bool]:
    """A distributed checkpoint of a wrapped, sharded model loads into a plain, sharded one, and back."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make(wrap: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Tiny()
        if wrap:
            model.blocks[0] = dh.SaveWith(model.blocks[0], dh.OnDisk(folder), at_least=4096)
            dh.save_activations(model, "blocks.1", dh.OnDisk(folder))
        model = _engine(model, "fsdp2")
        optimizer = torch.optim.AdamW(model.parameters())
        model(tokens(seed=rank)).sum().backward()
        optimizer.step()
        return model, optimizer

    same, names = True, []
    for i, (one, two) in enumerate([(True, False), (False, True)]):
        source, source_optimizer = make(one, 1)
        target, target_optimizer = make(two, 2)
        model_state, optimizer_state = get_state_dict(source, source_optimizer)
        names = sorted(model_state)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/checkpoint{i}")
        model_state, optimizer_state = get_state_dict(target, target_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=f"{folder}/checkpoint{i}")
        set_state_dict(target, target_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for a, b in zip(source.parameters(), target.parameters(), strict=True):
            same &= torch.equal(a._local_tensor, b._local_tensor)
    return names, same


def test_a_distributed_checkpoint_goes_both_ways(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    for names, same in ranks(_checkpoint, str(tmp_path)):
        assert names == sorted(Tiny().state_dict())
        assert same


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
