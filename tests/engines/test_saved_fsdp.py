"""Laws 1, 2, 6 and 8 on FSDP1, which gathers, splits and frees flat parameters, and on ``fully_shard``."""

from __future__ import annotations

import functools
import pathlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.models import Block, Tiny
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import (
    FEW,
    FEW_GOOD,
    FOUR,
    GOOD,
    HOWS,
    KINDS,
    alive_with_and_without,
    fsdp2,
    prove,
    trainer,
)

pytestmark = pytest.mark.dist
FSDP1 = ["fsdp1", "fsdp1flat"]


def _fsdp1(model: nn.Module, flat: bool, option: str) -> nn.Module:
    """Blocks in units of their own; ``option`` is a strategy, or says what else differs."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.filterwarnings("ignore", module="torch.distributed")  # of NO_SHARD, state dicts, ... to come
    options: dict[str, Any] = {"sharding_strategy": getattr(ShardingStrategy, option, ShardingStrategy.FULL_SHARD)}
    if option == "mixed":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if option == "prefetch":
        options |= {"forward_prefetch": True, "limit_all_gathers": False}
    wrap = ModuleWrapPolicy({Block})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=not flat, auto_wrap_policy=wrap, device_id=cpu, **options)


def _engine(model: nn.Module, engine: str, option: str = "", **more: Any) -> nn.Module:
    return fsdp2(model, option, **more) if engine == "fsdp2" else _fsdp1(model, engine == "fsdp1flat", option)


def _half() -> nn.Module:
    return Tiny().bfloat16()


def _prove(rank: int, engine: str, option: str, how: str, folder: str, kinds: list[str], **more: Any) -> dict:
    take = functools.partial(_engine, engine=engine, option=option, **more)
    train = trainer(rank, accumulate=True, autocast=option == "autocast")
    return prove(Tiny, take, train, how, folder, plain=_half if option == "mixed" else Tiny, kinds=kinds)


@pytest.mark.full_tier
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("engine", FSDP1)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_gradients_are_bit_identical(
    ranks: Ranks, strategy: str, engine: str, how: str, tmp_path: pathlib.Path
) -> None:
    assert ranks(_prove, engine, strategy, how, str(tmp_path), KINDS) == [GOOD, GOOD]


OPTIONS = [(engine, option) for engine in FSDP1 for option in ("mixed", "autocast", "prefetch")]
OPTIONS += [("fsdp2", each) for each in ("nested", "keep", "part", "mixed", "autocast", "prefetch", "offload")]


@pytest.mark.full_tier(engine=FSDP1)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("engine", "option"), OPTIONS)
def test_options_change_nothing(ranks: Ranks, engine: str, option: str, how: str, tmp_path: pathlib.Path) -> None:
    """FSDP1's CPUOffload is not among them: it pins memory and synchronizes streams, so it needs a GPU."""
    assert ranks(_prove, engine, option, how, str(tmp_path), FEW) == [FEW_GOOD, FEW_GOOD]


def _hybrid(rank: int, how: str, folder: str) -> dict:
    return _prove(rank, "fsdp2", "", how, folder, FEW, shape=(2, 2))


@pytest.mark.parametrize("how", HOWS)
def test_hybrid_sharding(how: str, tmp_path: pathlib.Path) -> None:
    assert FOUR(_hybrid, how, str(tmp_path)) == [FEW_GOOD] * 4


def _alive(rank: int, engine: str, option: str, how: str, folder: str) -> list[tuple[int, int]]:
    line = pipeline(dh.OnDisk(folder), at_least=0)
    return alive_with_and_without(Tiny, functools.partial(_engine, engine=engine, option=option), how, line, rank)


@pytest.mark.full_tier(engine=FSDP1)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("engine", "option"), [*((each, "") for each in FSDP1), ("fsdp2", "nested"), ("fsdp2", "keep")]
)
def test_gathered_weights_are_freed_after_forward(
    ranks: Ranks, engine: str, option: str, how: str, tmp_path: pathlib.Path
) -> None:
    for (gathered, left), with_hooks in ranks(_alive, engine, option, how, str(tmp_path)):
        assert gathered > 100_000
        assert left == (gathered if option == "keep" else 0)
        assert with_hooks == (gathered, left)


def _whole(rank: int, how: str, folder: str) -> dict:
    return prove(Tiny, functools.partial(_engine, engine="fsdp1"), trainer(rank), how, folder, patterns="")


@pytest.mark.parametrize("how", ["before", "after"])
def test_the_whole_model_in_one_attachment(ranks: Ranks, how: str, tmp_path: pathlib.Path) -> None:
    """The tied head's weight is the root's, which stays gathered from forward to backward."""
    assert ranks(_whole, how, str(tmp_path)) == [GOOD, GOOD]


def _loaded_whole(rank: int, engine: str, folder: str) -> bool:
    """torch's ``set_model_state_dict`` loads the plain model's state into FSDP units that are inside of wrappers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    torch.manual_seed(1)
    full = {name: torch.randn_like(tensor) for name, tensor in Tiny().state_dict().items()}
    model: Any = _engine(Tiny(), engine)
    inner = model.module if hasattr(model, "module") else model
    inner.blocks[0] = dh.SaveWith(inner.blocks[0], dh.OnDisk(folder))
    for whole in (model, dh.SaveWith(model, dh.OnDisk(folder))):
        given = {name: tensor.clone() for name, tensor in full.items()}
        set_model_state_dict(whole, given, options=StateDictOptions(full_state_dict=True))
        found = get_model_state_dict(whole, options=StateDictOptions(full_state_dict=True))
        if list(found) != list(full) or not all(torch.equal(found[name], full[name]) for name in full):
            return False
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    return True


@pytest.mark.full_tier(engine=FSDP1)
@pytest.mark.parametrize("engine", [*FSDP1, "fsdp2"])
def test_a_whole_state_loads_into_a_wrapper_around_the_engine(
    ranks: Ranks, engine: str, tmp_path: pathlib.Path
) -> None:
    assert ranks(_loaded_whole, engine, str(tmp_path)) == [True, True]
