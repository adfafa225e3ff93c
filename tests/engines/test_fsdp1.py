"""Law 14 on FSDP1: gradients before their reduction."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disthooks as dh
from disthooks.engines.detect import detect_engine
from disthooks.errors import AttachError
from tests.support.engines import close, data, flat
from tests.support.ranks.harness import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.full_tier]


MODES = ["fsdp1", "fsdp1flat"]
OFTEN = ["fsdp1", "fsdp1op", "fsdp1none", "fsdp1flat", "fsdp1flatop", "fsdp1flatnone"]


# --- shards


def _channels_last(rank: int, engine: str) -> tuple[bool, bool]:
    """A convolution whose elements lie in another order than their indices: no part, and the right local gradient."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3)).to(memory_format=torch.channels_last)
    truth = nn.Sequential(nn.Conv2d(2, 3, 3))
    truth.load_state_dict(plain.state_dict())
    model, seen = flat(plain, engine, parts=()), []
    x = torch.randn(2, 2, 5, 5)
    with dh.on_gradient(model, "0.weight", lambda grad: seen.append(grad.clone()), at="local"):
        model(x).square().sum().backward()
    truth(x).square().sum().backward()
    parts = {shard.name: shard.part for shard in detect_engine(model).shards}
    return close(seen, [truth[0].weight.grad], 1e-5), parts["0.weight"] is None


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp1flat", "fsdp1flatnone"])
def test_a_weight_that_lies_in_another_order(ranks: Ranks, engine: str) -> None:
    assert ranks(_channels_last, engine) == [(True, True)] * 2


# --- "local"


class Often(nn.Module):
    """A unit that is called twice, in which one layer is used three times, one in a checkpoint, and one never."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.end = Inner(reentrant), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.body(self.body(x)))


class Inner(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.thrice, self.again, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.thrice(self.thrice(self.thrice(x).tanh()).tanh()).tanh()
        return checkpoint(self.again, x, use_reentrant=self.reentrant)


def _often(rank: int, engine: str, around: str) -> list[Any]:
    """Three steps, the first without reduction; torch itself fails with a reentrant checkpoint inside of a unit."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    model = flat(Often(), engine, parts=("body",))
    if around:
        model.module.body = checkpoint_wrapper(model.module.body, CheckpointImpl[around])
    seen: dict[str, list[torch.Tensor]] = {}
    names = [shard.name for shard in detect_engine(model).shards]
    hooks = [
        dh.on_gradient(model, name, lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()), at="local")
        for name in names
    ]
    for step in range(3):
        with model.no_sync() if step == 0 else contextlib.nullcontext():
            model((data(step)[:, :4] + rank).requires_grad_()).square().sum().backward()
    for hook in hooks:
        hook.remove()
    model(data(0)[:, :4]).sum().backward()  # nobody looks any more
    return [seen, sorted(names)]


@pytest.mark.parametrize("around", ["", "NO_REENTRANT"])
@pytest.mark.parametrize("engine", OFTEN)
def test_a_layer_used_often_is_seen_once_a_backward(ranks: Ranks, engine: str, around: str) -> None:
    for rank, (seen, names) in enumerate(ranks(_often, engine, around)):
        assert names == sorted(name for name, _ in Often().named_parameters())
        truths: dict[str, list[torch.Tensor]] = {}
        for step in range(3):
            model = Often()
            model(data(step)[:, :4] + rank).square().sum().backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    truths.setdefault(name, []).append(p.grad)
        assert len(truths) == len(names) - 2  # and the layer that is never used is not seen
        assert close(seen, truths, 1e-4)


def test_a_reentrant_checkpoint_is_a_backward_of_its_own(ranks: Ranks) -> None:
    for seen, _ in ranks(_often, "fsdp1", "REENTRANT"):
        assert {name: len(grads) for name, grads in seen.items() if "body" not in name} == {"end.weight": 3}
        assert {len(grads) for name, grads in seen.items() if "body" in name} == {6}


def _in_parts(rank: int, engine: str) -> str:
    from torch.distributed.fsdp import MixedPrecision

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = flat(Often(), engine, ("body",), mixed_precision=precision)
    with dh.on_gradient(model, "*", print, at="local"):
        try:
            model(data(0)[:, :4]).sum().backward()
        except AttachError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("engine", MODES)
def test_a_gradient_in_several_parts_is_an_error(ranks: Ranks, engine: str) -> None:
    """With mixed precision a unit called twice gives its gradient in two parts, which torch adds up later."""
    for said in ranks(_in_parts, engine):
        assert "several parts in one backward" in said
