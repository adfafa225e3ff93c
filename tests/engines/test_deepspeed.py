"""Laws 1, 2, 6, 8 and 11 to 15 on DeepSpeed's ZeRO, whose stage 3 gathers each parameter when its module runs."""

from __future__ import annotations

import functools
import gc
import math
import pathlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.engines.detect import detect_engine
from disthooks.engines.step import StepFunctions
from disthooks.saved.pipeline import pipeline
from tests.support import needs
from tests.support.engines import close
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
from tests.support.zero import (
    HALVES,
    Shared,
    engine_of,
    kept,
    loss_of,
    near,
    norm,
    our_all_reduces,
    step,
    truth,
    weights_of,
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
    line = pipeline(dh.OnDisk(folder), at_least=0)
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


# --- Gradients: what a rule or a statistic gives in a single process, and only at real steps


def shrink(name: str, grad: torch.Tensor) -> torch.Tensor:
    return grad * 0.5 if name.endswith("weight") else grad


RULES: dict[str, list[Any]] = {
    "none": [lambda name, grad: grad],
    "value": [dh.ClipValue(0.05)],
    "norm": [dh.ClipNorm(1.0)],
    "norm inf": [dh.ClipNorm(0.1, math.inf)],
    "norm of each": [dh.ClipNorm(0.5, by="parameter")],
    "only": [dh.only("*.bias", dh.ClipNorm(0.5)), dh.only(["embed.*", "gain"], dh.ClipValue(0.01))],
    "value then norm": [dh.ClipValue(0.5), dh.ClipNorm(1.0)],
    "function": [shrink, dh.ClipNorm(1.0)],
    "units": [dh.SkipNonFinite(), dh.ClipAdaptive(0.5)],
}
RULES["adagc"] = [dh.SkipNonFinite(), dh.AdaGC(warmup_steps=1, max_norm=0.5)]
RULES["spike"] = [dh.SkipSpike(loss=False), dh.ClipNorm({0: 0.5})]
EVERYTHING = [stats.Norm(per_parameter=True), stats.MaxAbs(), stats.NonFinite()]


# --- rules and statistics, for each stage one engine


def _rules(rank: int, stage: int, dtype: str, names: list[str], options: dict[str, Any]) -> list[str]:
    """What differs from a single process; nothing of it should."""
    engine = engine_of(stage, dtype, **options)
    half, wrong = HALVES.get(dtype), []
    rounding = 2e-5 if half is None else 5e-3
    for name in names:
        weights = weights_of(engine)
        exact, _ = truth(weights, half=half)
        calls: list[str] = []
        grads: dict[str, torch.Tensor] = {}
        handle = kept(engine, grads)
        with (
            mock.patch.object(dist, "all_reduce", our_all_reduces(calls)),
            dh.gradients(engine, rules=RULES[name], stats=EVERYTHING, every=1) as watch,
        ):
            del calls[:]  # attaching compares what the ranks attach
            found = step(engine, rank)
            here = list(calls)
        handle.remove()
        wanted, log = truth(weights, RULES[name], EVERYTHING, grads=grads)
        checks = {
            "gradients": near(grads, exact, 2e-5 if half is None else 3e-2),
            "update": near(found, wanted, rounding),
            "log": close({key: watch.latest[key] for key in log}, log, 1e-5),
            "steps": watch.steps == 1,
            "collectives": len(here) == watch.report().collectives[1],
            "removed": "_take_model_step" not in engine.__dict__,
        }
        wrong += [f"{name}: {what} {watch.latest}, wanted {log}" for what, right in checks.items() if not right]
    return wrong


@pytest.mark.first_tier(stage=(2,))
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_equals_one_process(ranks: Ranks, stage: int) -> None:
    assert ranks(_rules, stage, "fp32", list(RULES), {}) == [[], []]


HALF = ["value", "norm", "norm inf", "only"]


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "bf16"), *((stage, dtype) for stage in (1, 2, 3) for dtype in HALVES)]
)
def test_in_half_precision(ranks: Ranks, stage: int, dtype: str) -> None:
    assert ranks(_rules, stage, dtype, HALF, {}) == [[], []]


OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (1, {"round_robin_gradients": True, "overlap_comm": True}),
    (2, {"round_robin_gradients": True, "contiguous_gradients": False}),
    (2, {"overlap_comm": True, "reduce_scatter": False, "reduce_bucket_size": 50}),
    (2, {"parameter_alignment": True}),
    (3, {"sub_group_size": 30, "reduce_scatter": False, "stage3_param_persistence_threshold": 0}),
]


@pytest.mark.parametrize(("stage", "options"), OPTIONS, ids=str)
def test_however_gradients_are_partitioned(ranks: Ranks, stage: int, options: dict[str, Any]) -> None:
    assert ranks(_rules, stage, "fp32", ["norm", "only"], options) == [[], []]


# --- one function; a step that is skipped; who owns what


def _functions(rank: int, stage: int, dtype: str) -> dict[str, Any]:
    engine, found = engine_of(stage, dtype), {}
    half = HALVES.get(dtype)
    tolerance = 2e-5 if half is None else 2e-2
    wanted, _ = truth(weights_of(engine), half=half)
    seen: list[torch.Tensor] = []
    order: list[str] = []

    def third(grad: torch.Tensor) -> torch.Tensor:
        order.append("one")
        seen.append(grad.clone())
        return grad / 3

    with (
        dh.gradients(engine, rules=[lambda name, grad: order.append("rule") or grad]),
        dh.on_gradient(engine, "mid.1.*", third) as hook,
    ):
        changed = step(engine, rank)
    for name in ("mid.1.weight", "mid.1.bias"):
        wanted[name] = wanted[name] / 3
    found["final"] = near(changed, wanted, tolerance)
    found["order"] = order == sorted(order) and set(order) == {"one", "rule"}
    found["called"] = sum(hook.report().values()) == len(seen) > 0
    total = torch.tensor(sum(float(g.double().square().sum()) for g in seen))
    if stage and not (stage == 1 and dtype == "bf16 in fp32"):  # else each rank has seen all of it
        dist.all_reduce(total)
    part = {name: 3 * wanted[name] for name in ("mid.1.weight", "mid.1.bias")}
    found["seen in the user's units"] = close(math.sqrt(total), norm(part), tolerance)
    found["local"] = _local(engine, rank, half, tolerance)
    return found


def _local(engine: Any, rank: int, half: Any, tolerance: float) -> bool:
    """Rank 0 makes its own gradient three times as large; each rank sees its own, divided by the micro-batches."""
    weights = weights_of(engine)
    seen: list[torch.Tensor] = []

    def triple(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.double().clone())
        return grad * 3 if rank == 0 else grad

    with dh.on_gradient(engine, "mid.1.weight", triple, at="local") as hook:
        changed = step(engine, rank)
    ours = [_own(weights, half, batch, rank) / 2 for batch in (0, 1)]
    theirs = [_own(weights, half, batch, 1 - rank) / 2 for batch in (0, 1)]
    mine, other = (3, 1) if rank == 0 else (1, 3)
    wanted = {"mid.1.weight": (mine * sum(ours) + other * sum(theirs)) / 2}
    return (
        hook.report() == {"mid.1.weight": 2}
        and all(near({"": a}, {"": b}, tolerance) for a, b in zip(seen, ours, strict=True))
        and near({"mid.1.weight": changed["mid.1.weight"]}, wanted, tolerance)
    )


def _own(weights: dict[str, torch.Tensor], half: Any, batch: int, rank: int) -> torch.Tensor:
    """The gradient of one rank's half of a batch."""
    model = Shared().double()
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data = weights[name].to(half or torch.float64).double()
    loss_of(model, batch, rank).backward()
    assert model.mid[1].weight.grad is not None
    return model.mid[1].weight.grad


def _skipped(rank: int, stage: int, dtype: str) -> dict[str, bool]:
    """One step that a decision skips, between two that are made."""
    engine = engine_of(stage, dtype)
    step(engine, rank)
    ours, decision, found = detect_engine(engine), torch.tensor(True), {}
    scale, weights, state = ours.gradient_scale(), weights_of(engine), _state(engine)
    handle = ours.before_step(ours.step_of(None), StepFunctions(lambda step: decision))
    before = (engine.global_steps, engine.skipped_steps)
    for batch in (4, 5):
        engine.backward(loss_of(engine, batch, rank).float())
        engine.step()
    found["still"] = close(weights_of(engine), weights, 0.0) and close(_state(engine), state, 0.0)
    found["counted"] = (engine.global_steps, engine.skipped_steps) == (before[0] + 1, before[1] + 1)
    found["told"] = not engine.was_step_applied()
    found["same scale"] = ours.gradient_scale() == scale
    decision = torch.tensor(False)
    half = HALVES.get(dtype)
    wanted, _ = truth(weights, half=half)
    found["next"] = near(step(engine, rank), wanted, 2e-5 if half is None else 2e-2) and engine.was_step_applied()
    handle.remove()
    found["removed"] = not {"_take_model_step"} & set(engine.__dict__) and "step" not in vars(engine.optimizer)
    return found


def _state(engine: Any) -> list[torch.Tensor]:
    return [
        value.clone()
        for state in engine.basic_optimizer.state.values()
        for value in state.values()
        if value is not None
    ]


def _overflow(rank: int, stage: int, skip: bool) -> dict[str, bool]:
    """In float16 a step that overflowed on rank 1 is DeepSpeed's to skip, whatever rules make of the gradients."""
    engine = engine_of(stage, "fp16")
    step(engine, rank)
    ours, weights, seen = detect_engine(engine), weights_of(engine), []
    handle = ours.before_step(ours.step_of(None), StepFunctions(lambda step: torch.tensor(True) if skip else None))
    scale, before = ours.gradient_scale(), engine.skipped_steps
    with dh.gradients(engine, rules=[lambda name, grad: seen.append(bool(grad.isnan().any())) or grad.nan_to_num(0.0)]):
        for batch in (4, 5):
            spoilt = loss_of(engine, batch, rank).float()
            engine.backward(spoilt * math.nan if rank == 1 else spoilt)
            engine.step()
    handle.remove()
    return {
        "seen": any(seen),
        "skipped": engine.skipped_steps == before + 1 and close(weights_of(engine), weights, 0.0),
        "lowered": ours.gradient_scale() == scale / 2,
    }


CHECKED: list[tuple[Any, int, Any]] = [
    *((part, stage, "fp32") for part in (_functions, _skipped) for stage in STAGES),
    *((_functions, stage, "fp16") for stage in (1, 2, 3)),
    *((_functions, stage, dtype) for stage, dtype in ((1, "bf16 in fp32"), (0, "bf16"))),
    *((_skipped, stage, "bf16 in fp32") for stage in (1, 2)),
    *((_skipped, stage, dtype) for stage, dtype in ((0, "bf16"), (2, "fp16"), (3, "fp16"))),
    *((_overflow, stage, skip) for stage in (1, 2, 3) for skip in (False, True)),
]


@pytest.mark.parametrize(("part", "stage", "option"), CHECKED)
def test_what_is_used_is_seen_and_a_skipped_step_changes_nothing(
    ranks: Ranks, part: Any, stage: int, option: Any
) -> None:
    """See what the docstrings of the parts say: functions, a step that a decision skips, one that overflows."""
    for found in ranks(part, stage, option):
        assert all(found.values()), found
