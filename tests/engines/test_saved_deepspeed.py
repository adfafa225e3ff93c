"""Laws 1, 2, 6 and 8 on DeepSpeed's ZeRO, whose stage 3 gathers each parameter when its module runs."""

from __future__ import annotations

import functools
import gc
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support import needs
from tests.support.models import Tiny, tokens
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import (
    FEW,
    FEW_GOOD,
    GOOD,
    HOWS,
    KINDS,
    Train,
    alive_with_and_without,
    prove,
    run,
    trainer,
)

pytestmark = [pytest.mark.dist, needs("deepspeed")]
STAGES = [0, 1, 2, 3]


def _config(stage: int, half: bool = False) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # nothing stays gathered because it is small, or because it is wanted again soon
        zero |= {name: 0 for name in ("stage3_param_persistence_threshold", "stage3_max_live_parameters")}
        zero |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
        "bf16": {"enabled": half},
    }


def _engine(model: nn.Module, stage: int, half: bool = False) -> Any:
    import deepspeed

    _forget_the_past()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    return deepspeed.initialize(model=model, config=_config(stage, half), dist_init_required=False)[0]


@functools.cache
def _forget_the_past() -> None:
    """ZeRO-3 collects garbage whenever it begins; what was made before it is looked through once."""
    gc.collect()
    gc.freeze()


def _trainer(rank: int, steps: int = 2) -> Train:
    """Steps of two batches each; the whole gradients before, and this rank's part of the weights after."""

    def train(engine: Any) -> list[torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found = []
        for i in range(steps):
            torch.manual_seed(i)
            for batch in (100 + 10 * i, 10 * i):
                loss = engine(tokens(seed=batch + rank)).float().square().mean()
                engine.backward(loss)
                if batch == 10:  # of the last step: they are reduced one by one
                    grads = [safe_get_full_grad(p) for p in engine.module.parameters()]
                    found += [torch.empty(0) if g is None else g.clone() for g in grads]
                engine.step()
            found += [getattr(p, "ds_tensor", p).detach().clone() for p in engine.module.parameters()]
        return found

    return train


def _prove(rank: int, stage: int, half: bool, how: str, folder: str, kinds: list[str]) -> dict:
    engine = functools.partial(_engine, stage=stage, half=half)
    plain = trainer(rank, accumulate=True)
    make = _half if half else Tiny
    # ZeRO-3 detaches what goes into and out of every module: no aliases of one another any more
    return prove(Tiny, engine, _trainer(rank), how, folder, plain=make, plain_train=plain, once=stage < 3, kinds=kinds)


def _half() -> nn.Module:
    return Tiny().bfloat16()


@pytest.mark.first_tier(stage=(2,), how=("before", "after"))
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_bit_identical(ranks: Ranks, stage: int, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_prove, stage, False, how, str(tmp_path), KINDS) == [GOOD, GOOD]


@pytest.mark.parametrize(("stage", "how"), [(2, "before"), *((3, how) for how in HOWS)])
def test_in_bfloat16(ranks: Ranks, stage: int, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_prove, stage, True, how, str(tmp_path), FEW) == [FEW_GOOD, FEW_GOOD]


def _born_sharded() -> nn.Module:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=_config(3)):
        return Tiny()


def _prove_born_sharded(rank: int, how: str, folder: str) -> dict:
    _engine(Tiny(), 0)  # zero.Init wants DeepSpeed's own process group
    plain, engine = trainer(rank, accumulate=True), functools.partial(_engine, stage=3)
    return prove(
        _born_sharded, engine, _trainer(rank), how, folder, plain=Tiny, plain_train=plain, once=False, kinds=FEW
    )


@pytest.mark.parametrize("how", HOWS)
def test_a_model_built_under_zero_init(ranks: Ranks, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_prove_born_sharded, how, str(tmp_path)) == [FEW_GOOD, FEW_GOOD]


def _alive(rank: int, how: str, folder: str) -> list[tuple[int, int]]:
    line = dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder))
    return alive_with_and_without(Tiny, functools.partial(_engine, stage=3), how, line, rank)


@pytest.mark.parametrize("how", HOWS)
def test_gathered_weights_are_freed_after_forward(ranks: Ranks, how: str, tmp_path: pathlib.Path) -> None:
    for (gathered, left), with_hooks in ranks(_alive, how, str(tmp_path)):
        assert gathered > 100_000 > left == 0
        assert with_hooks == (gathered, left)


def _exported(rank: int, stage: int, how: str, folder: str) -> tuple[list[str], bool]:
    """Names in what ``zero_to_fp32`` makes of a checkpoint, and whether it has the bits of a plain model's."""
    import torch.distributed as dist
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    states = []
    for line in (None, dh.OnDisk(folder)):
        where = f"{folder}/{'plain' if line is None else how}"

        def train(engine: Any) -> list[torch.Tensor]:
            found = _trainer(rank, steps=1)(engine)
            engine.save_checkpoint(where, tag="last")  # noqa: B023
            return found

        run(Tiny, functools.partial(_engine, stage=stage), train, how, line)
        dist.barrier()
        states.append(get_fp32_state_dict_from_zero_checkpoint(where, tag="last"))
    plain, hooked = states
    Tiny().load_state_dict(hooked)
    return sorted(hooked), all(torch.equal(plain[name], hooked[name]) for name in plain)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_consolidated_export_has_the_plain_names(ranks: Ranks, stage: int, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_exported, stage, how, str(tmp_path)) == [(sorted(Tiny().state_dict()), True)] * 2
