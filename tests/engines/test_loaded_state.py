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


def _on_one_rank(rank: int) -> tuple[str, int, int]:
    """Rank 0 loads, rank 1 does not; afterwards all load the same, and train on."""
    model, optimizer, watch = _attached()
    state = watch.state_dict()
    if rank == 0:
        watch.load_state_dict(state | {"steps": 100})
    with pytest.raises(dh.errors.AttachError) as raised:
        _step(model, optimizer)
    watch.load_state_dict(state | {"steps": 50})
    for _ in range(4):
        _step(model, optimizer)
    watch.remove()
    return str(raised.value), watch.steps, watch.latest["step"]


def test_a_state_that_one_rank_alone_loads(ranks: Ranks) -> None:
    for said, steps, logged in ranks(_on_one_rank):
        assert "rank 0 counts 100 steps" in said
        assert "rank 1 counts 0 steps" in said
        assert "call load_state_dict() on every rank" in said
        assert (steps, logged) == (54, 51)


def _other_counts(rank: int) -> tuple[str, int]:
    """States with different counts, loaded after some steps."""
    model, optimizer, watch = _attached()
    for _ in range(2):
        _step(model, optimizer)
    watch.load_state_dict(watch.state_dict() | {"steps": 10 * (1 + rank)})
    with pytest.raises(dh.errors.AttachError) as raised:
        _step(model, optimizer)
    watch.load_state_dict(watch.state_dict() | {"steps": 30})
    _step(model, optimizer)
    watch.remove()
    return str(raised.value), watch.steps


def test_states_with_different_counts(ranks: Ranks) -> None:
    for said, steps in ranks(_other_counts):
        assert "rank 0 counts 10 steps" in said
        assert "rank 1 counts 20 steps" in said
        assert steps == 31


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
