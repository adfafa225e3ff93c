"""Statistics of gradients, the same alone and with ``torchrun --nproc-per-node 2 07_gradient_statistics.py``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh

world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
MICRO, STEPS = 2, 6

watch = dh.gradients(
    model,
    optimizer,
    stats=[
        *dh.stats.standard(per_parameter=True),  # one reading of the gradients for all of them
        dh.stats.Weights(),
        dh.stats.Updates(),  # how far the optimizer moved the parameters
        dh.stats.Spread(),  # how the ranks' own gradients differ, before they are averaged
        dh.stats.NoiseScale(batch_size=8),  # from the micro-batches of each rank
    ],
    groups={"first": "0.*", "biases": "*.bias"},
    every=1,
)
generator = torch.Generator().manual_seed(rank)
with watch:
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO):
            x = torch.randn(8, 16, generator=generator)
            (model(x) - x.sum(1, keepdim=True)).square().mean().div(MICRO).backward()
        optimizer.step()
record = watch.latest

# What is logged of all gradients is what one vector of them gives.
whole = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
truth = {
    "grad_norm": whole.norm(),
    "grad_mean": whole.mean(),
    "grad_std": whole.std(correction=0),
    "grad_min": whole.min(),
    "grad_max": whole.max(),
    "grad_zeros": (whole == 0).double().mean(),
}
for name, value in truth.items():
    assert abs(record[name] - float(value)) <= 1e-6 * float(whole.norm()), name
median = float(whole.abs().median())
assert abs(record["grad_abs_q50"] - median) <= 0.25 * median
assert sum(record["grad_histogram"]["counts"]) == whole.numel()
assert record["grad_norm/group/first"] < record["grad_norm"]
assert record["grad_norm/min_rank"] <= record["grad_norm/mean_rank"] <= record["grad_norm/max_rank"]
assert 1e-5 < record["update_ratio"] < 1e-1
assert watch.report().collectives == ((0, 3) if world > 1 else (0, 0))

if rank == 0:
    shown = ("grad_norm", "grad_std", "grad_zeros", "grad_abs_q50", "param_norm", "update_ratio", "noise_scale")
    print("  ".join(f"{name} {record[name]:.3g}" for name in shown if record[name] is not None))
    print(f"largest of its own on rank {record['grad_norm/argmax_rank']}, outlier: {record['grad_norm/outlier_rank']}")
if world > 1:
    dist.destroy_process_group()
