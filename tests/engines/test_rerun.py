"""A bad step that is run again: on every engine the bits of a run without a transient fault, or those of a skip."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.report.replay import replay
from tests.support.engines import flat, gathered, is_fsdp1, sharded, unsynced, whole
from tests.support.ranks.harness import Ranks
from tests.support.zero import engine_of, weights_of

pytestmark = pytest.mark.dist

STEPS, BAD = 4, 2
ENGINES = ["ddp", "fsdp2", "fsdp1", "fsdp1flat", "zero0", "zero1", "zero2", "zero3"]


class Noisy(nn.Module):
    """Running statistics, dropout, and noise of each generator that a script may use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 7)
        self.mid = nn.Sequential(nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 5), nn.GELU())
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(x) * (1 + 0.01 * random.random())))


class Fault:
    """Spoils an output of ``mid`` once."""

    def __init__(self, module: nn.Module, factor: float) -> None:
        self.factor, self.is_on = factor, False
        module.register_forward_hook(self._spoil)

    def _spoil(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        is_on, self.is_on = self.is_on, False
        return output * self.factor if is_on else None


def make(engine: str, model: nn.Module | None = None) -> Any:
    model = Noisy() if model is None else model
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if engine.startswith("fsdp1"):
        return flat(model, engine)
    if engine.startswith("zero"):
        return engine_of(int(engine[-1]), model=model)
    return sharded(model, shape=(dist.get_world_size(),)) if engine == "fsdp2" else model


def weights(model: Any, engine: str) -> dict[str, torch.Tensor]:
    if engine.startswith("zero"):
        return weights_of(model)
    if is_fsdp1(model):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        return gathered(model)
    return {name: whole(each) for name, each in model.named_parameters()}


def train(
    rank: int,
    engine: str,
    factor: float = 1.0,
    in_data: bool = False,
    rerun: bool = True,
    at: int = 1,
    zeros: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights, buffers and the records that tell of a second run; each step has two micro-batches."""
    random.seed(rank)
    model, records = make(engine), []
    torch.manual_seed(rank)
    inner = getattr(model, "module", model)
    fault = Fault(inner.get_submodule("mid"), factor)
    is_zero = engine.startswith("zero")
    optimizer = None if is_zero else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rules = [dh.SkipNonFinite(), dh.ClipNorm(1.0)]
    with dh.gradients(model, optimizer, rules=rules, stats=dh.stats.full(), sinks=[records.append], every=1) as watch:

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            model.backward(loss) if is_zero else loss.backward()
            return loss.detach()

        call = watch.rerun(forward_backward) if rerun else forward_backward
        for step in range(STEPS):
            for micro in range(2):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + 2 * micro + rank))
                is_bad = step == BAD and micro == 0 and rank == at
                fault.is_on = is_bad and not in_data
                x[0, 0] *= factor if is_bad and in_data else 1.0
                with unsynced(model, not is_zero and micro == 0):
                    call(x)
                if is_zero:
                    model.step()
            if not is_zero:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not zeros)
    found = [each for each in records if "rerun" in each] if rank == 0 else []
    return weights(model, engine), {name: each.clone() for name, each in model.named_buffers()}, found


def assert_same(found: Any, wanted: Any) -> None:
    for part, other in zip(found[:2], wanted[:2], strict=True):
        assert part.keys() == other.keys()
        wrong = [name for name in part if not torch.equal(part[name], other[name])]
        assert not wrong


@pytest.mark.parametrize("engine", ENGINES)
def test_a_transient_fault_leaves_the_bits_of_a_run_without_it(ranks: Ranks, engine: str) -> None:
    clean, found = ranks(train, engine, 1.0, False, False), ranks(train, engine, math.nan)
    for one, other in zip(found, clean, strict=True):
        assert_same(one, other)
    (record,) = found[0][2]
    assert (record["step"], record["rerun"], record["rerun_calls"], record["rerun_ranks"]) == (BAD, "transient", 2, [1])
    assert not record.get("nonfinite_at")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fault_that_repeats_is_skipped_as_without_a_second_run(ranks: Ranks, engine: str) -> None:
    skipped, found = ranks(train, engine, math.nan, True, False), ranks(train, engine, math.nan, True)
    for one, other in zip(found, skipped, strict=True):
        assert_same(one, other)
    (record,) = found[0][2]
    assert (record["rerun"], record["skipped"], "rerun_ranks" in record) == ("repeats", 1.0, False)


class Rooted(nn.Module):
    """The input is weighted, and divided by its length, or its root is taken; zeros make NaN, forward or backward."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.in_backward = in_backward
        self.weight = nn.Parameter(torch.linspace(1, 2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.weight * x
        return x.abs().sqrt() if self.in_backward else x / x.norm()


class Chain(nn.Module):
    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 6, bias=False)
        self.mid = nn.Sequential(Rooted(in_backward), nn.Dropout(0.1))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(x)))


def whole_weights(model: Any, engine: str) -> dict[str, torch.Tensor]:
    """As :func:`weights`; of FSDP1 without touching gradients."""
    if not is_fsdp1(model):
        return weights(model, engine)
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def _captured(rank: int, engine: str, folder: str, in_backward: bool, bad: tuple[int, ...]) -> Any:
    """Weights after a step that is bad on some ranks, the weights before it, and the record."""
    model, records = make(engine, Chain(in_backward)), []
    torch.manual_seed(rank)
    is_zero = engine.startswith("zero")
    optimizer = None if is_zero else torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[records.append], every=1) as watch:

        def forward_backward(x: torch.Tensor) -> None:
            loss = model(x).square().mean()
            model.backward(loss) if is_zero else loss.backward()

        call = watch.rerun(forward_backward, folder if folder != "first rank" or rank == 0 else None)
        for step in range(3):
            if step == 2:
                before = whole_weights(model, engine)
            for micro in range(2):
                is_bad = step == 2 and micro == 1 and rank in bad
                with unsynced(model, not is_zero and micro == 0):
                    call(torch.randn(4, 6) * (not is_bad))
                if is_zero:
                    model.step()
            if not is_zero:
                optimizer.step()
                optimizer.zero_grad()
    return before, [each for each in records if "rerun" in each]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_call_that_made_it_is_captured(
    ranks: Ranks, engine: str, in_backward: bool, tmp_path: pathlib.Path
) -> None:
    """The weights of the capture are whole, and it is replayed in one process; two ranks may write at once."""
    bad = (0, 1) if engine in ("ddp", "fsdp2") and in_backward else (1,)
    before, records = ranks(_captured, engine, str(tmp_path), in_backward, bad)[0]
    (record,) = records
    assert (record["rerun"], record["skipped"]) == ("repeats", 1.0)
    assert record["rerun_capture"] == [str(tmp_path / f"step-2.rank-{rank}") for rank in bad]
    assert sorted(os.listdir(tmp_path)) == [f"step-2.rank-{rank}" for rank in bad]
    for folder in record["rerun_capture"]:
        tensors = load_file(pathlib.Path(folder) / "tensors.safetensors")
        (wanted,) = [each for name, each in before.items() if name.endswith("mid.0.weight")]
        assert torch.equal(tensors["state.weight"], wanted)
        assert torch.equal(tensors["input.0"], torch.zeros(4, 6))
        found = replay(folder, functools.partial(Chain, in_backward))
        assert found.where.partition(": ")[2] == f"mid.0 (Rooted), call 1{', in backward' if in_backward else ''}"
        assert (found.operator.name, found.operator.node) == ("aten.div.Tensor", "SqrtBackward0" if in_backward else "")


def test_a_folder_on_one_rank_alone_captures_nothing_and_nobody_waits(ranks: Ranks) -> None:
    _, (record,) = ranks(_captured, "ddp", "first rank", False, (1,))[0]
    assert (record["rerun"], "rerun_capture" in record, "rerun_why" in record) == ("repeats", False, False)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_four_ranks(four: Ranks, engine: str) -> None:
    clean, found = four(train, engine, 1.0, False, False), four(train, engine, math.inf, False, True, 2)
    for one, other in zip(found, clean, strict=True):
        assert_same(one, other)
    assert [each["rerun_ranks"] for each in found[0][2]] == [[2]]


@pytest.mark.parametrize("zeros", [False, True])
def test_one_process(zeros: bool) -> None:
    clean = train(0, "plain", rerun=False, zeros=zeros)
    found = train(0, "plain", math.nan, at=0, zeros=zeros)
    assert_same(found, clean)
    assert [each["rerun"] for each in found[2]] == ["transient"]


def _refused(rank: int) -> list[str]:
    """A function that draws its own data is refused by the probe, on all ranks; rank 1 alone draws."""
    model = make("ddp")
    optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(rank)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]) as watch:

        def forward_backward() -> None:
            x = torch.randn(4, 6, generator=own if rank else torch.Generator().manual_seed(0))
            model(x).square().mean().backward()

        call, said = watch.rerun(forward_backward), []
        for _ in range(3):
            call()
            try:
                optimizer.step()
            except UsageError as error:
                said.append(str(error))
            optimizer.zero_grad()
    return said


def test_a_function_that_draws_its_own_data_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    for said in ranks(_refused):
        assert len(said) == 1
        assert "gave other gradients when it was called again" in said[0]


def _resumed(rank: int) -> list[str]:
    """The first step of a new DDP, which goes on at step 7, is bad; so is the third."""
    model, records = make("ddp"), []
    fault = Fault(model.module.mid, math.nan)
    optimizer, sinks = torch.optim.SGD(model.parameters(), lr=0.1), [records.append]
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=[dh.stats.Norm()], sinks=sinks) as watch:
        watch.load_state_dict(watch.state_dict() | {"steps": 7})
        call = watch.rerun(lambda x: model(x).square().mean().backward())
        for step in range(4):
            fault.is_on = rank == 1 and step in (0, 2)
            call(torch.randn(4, 6, generator=torch.Generator().manual_seed(4 * step + rank)))
            optimizer.step()
            optimizer.zero_grad()
    return [f"{each['step']} {each['rerun']}" for each in records if "rerun" in each]


def test_the_first_step_of_ddp_after_a_restart_is_not_run_again_on_four_ranks(four: Ranks) -> None:
    assert four(_resumed)[0] == ["7 refused", "9 transient"]
