"""Laws 1, 2, 6 and 8 on FullyShardedDataParallel, whose flat parameters are gathered, split into views and freed."""

from __future__ import annotations

import functools
import pathlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.models import Block, Tiny, identical, tokens
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import FEW, FEW_GOOD, GOOD, HOWS, alive_with_and_without, prove, run, trainer, wrap

pytestmark = pytest.mark.dist
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def _fsdp(
    model: nn.Module, strategy: str = "FULL_SHARD", orig: bool = True, kinds: Any = None, **options: Any
) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.filterwarnings("ignore", module="torch.distributed")  # of NO_SHARD, state dicts, ... to come
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        auto_wrap_policy=ModuleWrapPolicy(kinds or {Block}),
        device_id=torch.device("cpu"),
        **options,
    )


def _plain(rank: int, strategy: str, orig: bool, how: str, folder: str) -> dict:
    engine = functools.partial(_fsdp, strategy=strategy, orig=orig)
    return prove(Tiny, engine, trainer(rank, accumulate=True), how, folder)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("orig", [True, False], ids=["original parameters", "flat parameters"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_bit_identical(ranks: Ranks, strategy: str, orig: bool, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_plain, strategy, orig, how, str(tmp_path)) == [GOOD, GOOD]


def _with_options(rank: int, name: str, orig: bool, how: str, folder: str) -> dict:
    from torch.distributed.fsdp import MixedPrecision

    options: dict[str, Any] = {}
    if name == "mixed":
        options = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    if name == "prefetch":
        options = {"forward_prefetch": True, "limit_all_gathers": False}
    train = trainer(rank, accumulate=True, autocast=name == "autocast")
    engine = functools.partial(_fsdp, orig=orig, **options)
    return prove(Tiny, engine, train, how, folder, plain=_half if name == "mixed" else Tiny, kinds=FEW)


def _half() -> nn.Module:
    return Tiny().bfloat16()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("orig", [True, False], ids=["original parameters", "flat parameters"])
@pytest.mark.parametrize("name", ["mixed", "autocast", "prefetch"])
def test_options_change_nothing(ranks: Ranks, name: str, orig: bool, how: str, tmp_path: pathlib.Path) -> None:
    """CPUOffload is not among them: it pins memory and synchronizes streams, so it does not run without a GPU."""
    assert ranks(_with_options, name, orig, how, str(tmp_path)) == [FEW_GOOD, FEW_GOOD]


def _alive(rank: int, strategy: str, orig: bool, how: str, folder: str) -> list[tuple[int, int]]:
    line = dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder))
    return alive_with_and_without(Tiny, functools.partial(_fsdp, strategy=strategy, orig=orig), how, line, rank)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("orig", [True, False], ids=["original parameters", "flat parameters"])
def test_gathered_weights_are_freed_after_forward(ranks: Ranks, orig: bool, how: str, tmp_path: pathlib.Path) -> None:
    for (gathered, left), with_hooks in ranks(_alive, "FULL_SHARD", orig, how, str(tmp_path)):
        assert gathered > 100_000 > left == 0
        assert with_hooks == (gathered, left)


def _whole(rank: int, how: str, folder: str) -> dict:
    return prove(Tiny, _fsdp, trainer(rank), how, folder, patterns="")


@pytest.mark.parametrize("how", ["before", "after"])
def test_the_whole_model_in_one_attachment(ranks: Ranks, how: str, tmp_path: pathlib.Path) -> None:
    """The tied head's weight is the root's, which stays gathered from forward to backward."""
    assert ranks(_whole, how, str(tmp_path)) == [GOOD, GOOD]


def _checkpointed(rank: int, how: str, folder: str) -> tuple[bool, int, int, dict[str, int]]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    def engine(model: nn.Module) -> nn.Module:
        model = _fsdp(model)
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
        return model

    truth = run(Tiny, engine, trainer(rank), how, None).numbers
    numbers, report = run(Tiny, engine, trainer(rank), how, dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder)))
    return identical(numbers, truth), report.stored, report.held, report.passed


@pytest.mark.parametrize("how", HOWS)
def test_with_activation_checkpoints(ranks: Ranks, how: str, tmp_path: pathlib.Path) -> None:
    """Around the checkpoint, the inputs of two blocks in two steps are stored; inside it, hooks step back."""
    inputs = 2 * 2 * 4 * 32 * 64 * 4
    expected = (0, 0, {"checkpoint": 8}) if how == "before" else (inputs, 0, {})
    assert ranks(_checkpointed, how, str(tmp_path)) == [(True, *expected)] * 2


def _trained(how: str, seed: int, rank: int, folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tiny()
    kinds: set[type[nn.Module]] = {Block}
    if how == "wrappers":
        # FSDP outside the wrapper: inside one, torch's own too, set_state_dict does not find the optimizer's names
        kinds = {dh.SaveWith}
        wrap(model, dh.OnDisk(folder))
    elif how == "in place":
        dh.save_activations(model, "blocks.*", dh.OnDisk(folder))
    model = _fsdp(model, kinds=kinds)
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(seed=rank)).sum().backward()
    optimizer.step()
    return model, optimizer


def _checkpoint(rank: int, one: str, two: str, folder: str) -> tuple[list[str], list[str], bool, bool]:
    """From one model to another; names, and whether all of it arrived."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    source, source_optimizer = _trained(one, 1, rank, folder)
    target, target_optimizer = _trained(two, 2, rank, folder)
    model_state, optimizer_state = get_state_dict(source, source_optimizer)
    names = sorted(model_state), sorted(optimizer_state["state"])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/checkpoint")
    model_state, optimizer_state = get_state_dict(target, target_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(target, target_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    pairs = list(zip(source.parameters(), target.parameters(), strict=True))
    moments = [
        torch.equal(source_optimizer.state[a]["exp_avg"], target_optimizer.state[b]["exp_avg"])
        for a, b in pairs
        if a.numel() and b.numel()
    ]
    return *names, all(torch.equal(a, b) for a, b in pairs), len(moments) > 0 and all(moments)


@pytest.mark.parametrize("how", ["in place", "wrappers"])
def test_a_distributed_checkpoint_goes_both_ways(ranks: Ranks, how: str, tmp_path: pathlib.Path) -> None:
    names = sorted(Tiny().state_dict())
    for one, two in [(how, "plain"), ("plain", how)]:
        folder = tmp_path / one
        folder.mkdir()
        assert ranks(_checkpoint, one, two, str(folder)) == [(names, names, True, True)] * 2


def _consolidated(rank: int, orig: bool, folder: str) -> list[str]:
    """FSDP's own full state, which a plain model loads and which loads back."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    torch.manual_seed(1)
    model = Tiny()
    model.blocks[0] = dh.SaveToDisk(model.blocks[0], folder)
    dh.save_activations(model, "blocks.1", dh.OnDisk(folder))
    model = _fsdp(model, orig=orig)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
        Tiny().load_state_dict(state)
        model.load_state_dict(state)
    return sorted(state)


@pytest.mark.parametrize("orig", [True, False], ids=["original parameters", "flat parameters"])
def test_a_consolidated_state_has_the_plain_names(ranks: Ranks, orig: bool, tmp_path: pathlib.Path) -> None:
    assert ranks(_consolidated, orig, str(tmp_path)) == [sorted(Tiny().state_dict())] * 2
