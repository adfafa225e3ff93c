"""A state that only one rank loads, or that differs between ranks, is an error in words on all ranks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks._ranks import describe
from disthooks.grads.collectives import StepCounts
from tests.support.ranks.harness import Ranks


def _attached(every: int = 3) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stats = dh.stats.standard()
    return model, optimizer, dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=stats, every=every)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def _loads(rank: int, steps: int, counts: tuple[int | None, int | None]) -> tuple[str, int, int]:
    """After ``steps`` steps each rank loads a state of its count, or none; afterwards all load the same, and train."""
    model, optimizer, watch = _attached()
    for _ in range(steps):
        _step(model, optimizer)
    state = watch.state_dict()
    if counts[rank] is not None:
        watch.load_state_dict(state | {"steps": counts[rank]})
    with pytest.raises(dh.errors.AttachError) as raised:
        _step(model, optimizer)
    watch.load_state_dict(state | {"steps": 50})
    for _ in range(4):
        _step(model, optimizer)
    watch.remove()
    return str(raised.value), watch.steps, watch.latest["step"]


@pytest.mark.parametrize(("steps", "counts"), [(0, (100, None)), (2, (10, 20))])
def test_states_that_differ_between_ranks(ranks: Ranks, steps: int, counts: tuple[int, int | None]) -> None:
    for said, made, logged in ranks(_loads, steps, counts):
        assert f"rank 0 counts {counts[0]} steps" in said
        assert f"rank 1 counts {counts[1] or 0} steps" in said
        assert "call load_state_dict() on every rank" in said
        assert (made, logged) == (54, 51)


def _late(rank: int) -> str:
    """One rank alone loads in the midst of a run: the other one makes the step, and waits in its collective."""
    counts = StepCounts((0, 1), rank, timeout=0.5)
    counts.check(0)
    counts.check(1)  # asks nobody
    if rank == 1:
        return ""
    counts.loaded()
    with pytest.raises(dh.errors.AttachError) as raised:
        counts.check(1)
    return str(raised.value)


def test_a_rank_that_nobody_answers_says_who_is_missing(ranks: Ranks) -> None:
    said, _ = ranks(_late)
    assert "rank 0 waits in the first step after load_state_dict()" in said
    assert "for the ranks [1]" in said


# --- what ranks compare when they attach


def _masked(mask: torch.Tensor, name: str, grad: torch.Tensor) -> torch.Tensor:
    return grad * mask[0]


class _Holder:
    def __init__(self) -> None:
        self.here = torch.randn(2)

    def __call__(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _valid(rank: int) -> list[str]:
    """Code that means the same on all ranks, and has another repr on each."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = [functools.partial(_masked, torch.full((1 + rank,), float(rank + 1))), _Holder(), lambda name, grad: grad]
    patterns = ["*weight", "*bias", "*eight", "*ias"]
    chosen = set(patterns if rank else reversed(patterns))
    more = [dh.only(chosen, dh.ClipValue(1.0)), dh.ClipNorm(1.0)]
    with dh.gradients(
        model, optimizer, rules=[*rules, *more], stats=[dh.stats.Norm()], groups={"all": chosen}, every=1
    ):
        _step(model, optimizer)
    return list(dh.only(chosen, dh.ClipValue(1.0)).patterns)


def test_valid_code_with_another_repr_on_each_rank(ranks: Ranks) -> None:
    assert ranks(_valid) == [["*bias", "*eight", "*ias", "*weight"]] * 2


def _different(rank: int, what: str) -> str:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules: Any = {
        "number": dh.ClipNorm(1.0 + rank),
        "argument": functools.partial(_masked, torch.ones(1), **({"grad": 1} if rank else {})),
        "function": (torch.clamp if rank else torch.abs),
        "set": dh.only({"*bias", "*weight"} if rank else {"*ias", "*eight"}, dh.ClipValue(1.0)),
    }[what]
    with pytest.raises(dh.errors.AttachError) as raised:
        dh.gradients(model, optimizer, rules=[rules])
    return str(raised.value)


@pytest.mark.parametrize("what", ["number", "argument", "function", "set"])
def test_code_that_differs_between_ranks(ranks: Ranks, what: str) -> None:
    assert all("do not attach the same" in said for said in ranks(_different, what))


def test_a_set_has_one_description_in_every_process() -> None:
    code = "from disthooks._ranks import describe; print(describe({'a': {'x1', 'y2', 'z3'}, 'b': [1, 2.5, None]}))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in range(4)
    }
    assert outputs == {"{'a': {'x1', 'y2', 'z3'}, 'b': [1, 2.5, None]}"}


def test_what_holds_itself_has_a_description() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert describe(loop) == "[1, ...]"
