"""Hooks for saved tensors in ``nn.DataParallel``: inside the replicas they work, around them they do nothing."""

from __future__ import annotations

import tempfile

import torch
from _replicas import Replicas
from torch import nn

import disthooks as dh

device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
# Without GPUs, the same replicas in the same kind of threads, made by hand.
many = nn.DataParallel if device == "cuda" else Replicas
folder = tempfile.gettempdir()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randn(256, 32, device=device)).sum().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


expected = gradients(many(net()))

# Around: the hooks belong to this thread, and each replica runs in another one.
with dh.saving(dh.OnDisk(folder)) as outside:
    around = gradients(many(net()))
assert outside.report().stored == 0
print("around the replicas:", outside.report().stored, "bytes")

# Inside: each replica opens them in its own thread. The report is shared by all replicas.
wrapped = dh.SaveWith(net(), dh.OnDisk(folder), at_least=4096)
inside = gradients(many(wrapped))
report = wrapped.report()
print("inside the replicas:", report.moved, "bytes")
assert report.moved >= 256 * 256 * 4  # both halves of the batch, at the least after the ReLU
assert report.held == 0

for one, other, third in zip(expected, around, inside, strict=True):
    assert torch.equal(one, other)
    assert torch.equal(one, third)

# In place, without a wrapper, works as well: the replicas carry what is attached.
model = net()
with dh.save_activations(model, nn.Linear, dh.OnDisk(folder)) as saving:
    attached = gradients(many(model))
assert saving.report().moved > 0
assert all(torch.equal(one, other) for one, other in zip(expected, attached, strict=True))
