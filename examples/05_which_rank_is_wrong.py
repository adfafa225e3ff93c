"""One rank of many goes wrong: which one, and where. Alone, or ``torchrun --nproc-per-node 2`` with this file."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh

mine = not dist.is_initialized()
if mine and "RANK" in os.environ:  # torchrun
    dist.init_process_group("gloo")
elif mine:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()
last = world - 1


def say(what: object) -> None:
    if rank == 0:
        print(what)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


# Every rank has its own data, and all have the same weights after each step, bit for bit.
for number in range(3):
    step(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank)))
report = dh.check_replicas(model, optimizer)
say(report)
assert report.ok == (world > 1)  # alone there is nothing to compare, and the report says so
assert not report.differs

# A single bit of a single moment on one rank: nothing fails, and the losses still look fine.
bits = optimizer.state[net[0].weight]["exp_avg"].view(torch.int32)
if rank == last:
    bits[3, 5] ^= 1
report = dh.check_replicas(model, optimizer)
if world > 1:
    say(report)
    (difference,) = report.differs
    assert difference.name == "0.weight: exp_avg"
    # Of two that differ nothing says which is right; of more, what most have counts as right.
    assert difference.ranks == ((0, 1) if world == 2 else (last,))
if rank == last:
    bits[3, 5] ^= 1

# A batch with one huge number on one rank. Its gradients make the weights of all ranks NaN, so that one step later
# every module on every rank looks guilty; the first was this one.
with dh.blame(model) as found:
    for number in range(3):
        x = torch.ones(4, 8)
        if rank == last and number == 1:
            x[0, 0] = 3e38
        step(x)
assert all(weight.isnan().any() for weight in net.parameters())

everyone = found.report(all_ranks=True)
say(everyone)
first = min(everyone.found, key=lambda entry: entry.forward)
assert (first.rank, first.forward, first.module, first.kind) == (last, 1, "1", "LayerNorm")
assert first.inputs_finite
assert all(not other.weights_finite for other in everyone.found if other is not first)

if mine:
    dist.destroy_process_group()
