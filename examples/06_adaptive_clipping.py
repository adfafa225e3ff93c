"""Clipping that finds its own threshold: alone, or ``torchrun --nproc-per-node 2 examples/06_adaptive_clipping.py``."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh

ranked = "TORCHELASTIC_RUN_ID" in os.environ  # what torchrun sets
if ranked:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if ranked else (0, 1)
SPIKE, BROKEN, STEPS = 30, 40, 60


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of 32 rows; one batch has labels 1000 times too large, another one a NaN."""
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    y = x.sum(1, keepdim=True) * (1000.0 if step == SPIKE else 1.0)
    if step == BROKEN:
        x[-1, 0] = float("nan")  # of the last rank alone
    return x.chunk(world)[rank], y.chunk(world)[rank]


def train(rules: list[Any], steps: range, state: Any = None, weights: Any = None) -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    model.load_state_dict(weights or model.state_dict())
    wrapped = nn.parallel.DistributedDataParallel(model) if ranked else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    records: list[dict[str, Any]] = []
    with dh.gradients(wrapped, optimizer, rules=rules, sinks=[records.append], every=1) as watch:
        if state is not None:
            watch.load_state_dict(state)
        for step in steps:
            optimizer.zero_grad()
            x, y = batch(step)
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
    return model, watch.state_dict(), records


@torch.no_grad()
def error(model: nn.Module) -> float:
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(-1))
    return float(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))


errors = {}
for rule in (dh.Scale(1.0), dh.ClipZScore(warmup_steps=10), dh.ClipPercentile(50.0), dh.ClipAdaptive(0.5)):
    model, _, records = train([dh.SkipNonFinite(), rule], range(STEPS))
    errors[type(rule).__name__] = error(model)
    if rank == 0:
        print(f"{type(rule).__name__:15} {errors[type(rule).__name__]:.3g}", records[SPIKE])
        assert [record["step"] for record in records if record["skipped"]] == [BROKEN]
# One spike is enough to ruin the weights when nothing is clipped; every rule that adapts gets over it.
assert not errors.pop("Scale") < 100 * max(errors.values())

# What was learned is saved like the optimizer's state. Half now and half later is bit for bit the same.
rules = [dh.SkipNonFinite(), dh.ClipZScore(warmup_steps=10)]
whole, learned, _ = train(rules, range(STEPS))
half, state, _ = train(rules, range(25))
with tempfile.TemporaryFile() as file:
    torch.save(state, file)
    file.seek(0)
    rest, again, _ = train(rules, range(25, STEPS), torch.load(file, weights_only=True), half.state_dict())
assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), rest.parameters(), strict=True))
assert str(again) == str(learned)
if ranked:
    dist.destroy_process_group()
