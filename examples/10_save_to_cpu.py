"""Keep what backward needs in CPU memory: by hand, by torch, and for one layer of a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import disthooks as dh

device = "cuda" if torch.cuda.is_available() else "cpu"


def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    return tensor.device, tensor.cpu()


def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    home, tensor = packed
    return tensor.to(home)


# By hand, then torch's own. Both are on for one thread, and move whatever is saved, weights too.
for hooks in (saved_tensors_hooks(pack, unpack), save_on_cpu(pin_memory=device == "cuda")):
    x = torch.randn(3, device=device, requires_grad=True)
    with hooks:
        y = x**2
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)


def net(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 100), nn.ReLU(), middle, nn.ReLU(), nn.Linear(100, 10)).to(device)


def step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model(torch.randn(64, 10, device=device)).sum().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


# With disthooks: the hooks are on in this one layer's forward, in whatever thread that runs.
torch.manual_seed(1)
plain = net(nn.Linear(100, 100))
model = net(dh.SaveToCpu(nn.Linear(100, 100)))
model.load_state_dict(plain.state_dict())  # the wrapper does not show in the names
for ours, theirs in zip(step(model), step(plain), strict=True):
    assert torch.equal(ours, theirs)

report = model[2].report()
print(report)
activation = 64 * 100 * 4
if device == "cuda":
    assert report.moved == activation  # the layer's input; its weight stays where it is
else:
    assert report.moved == 0  # it is in CPU memory already
    assert report.kept >= activation
assert report.held == 0
