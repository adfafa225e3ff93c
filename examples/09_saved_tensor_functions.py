"""Put any pair of functions between forward and backward: print, scale, keep an index into a list."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import disthooks as dh

calls: list[str] = []


def pack_loudly(tensor: torch.Tensor) -> torch.Tensor:
    calls.append("pack")
    print("packing  ", tuple(tensor.shape))
    return tensor.detach()  # the tensor itself, if it is an output, would keep its own graph alive


def unpack_loudly(tensor: torch.Tensor) -> torch.Tensor:
    calls.append("unpack")
    print("unpacking", tuple(tensor.shape))
    return tensor


shelf: list[torch.Tensor] = []


def pack_index(tensor: torch.Tensor) -> int:
    shelf.append(tensor.detach())
    return len(shelf) - 1


printing = (pack_loudly, unpack_loudly)
scaling = (lambda tensor: tensor * 4, lambda tensor: tensor / 4)  # exact: a power of two
indexing = (pack_index, lambda index: shelf[index])

# Plain torch: the pair is on for what this thread computes inside the block.
torch.manual_seed(3)
for pack, unpack in (printing, scaling, indexing):
    x = torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        y = x**2
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)
assert calls == ["pack", "unpack"]
assert len(shelf) == 1  # nobody takes things off the shelf

# dh.Functions: the same pair wherever a store may stand, so also inside a module. There it is on in whichever
# thread runs the module, and counted.
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(3, 8), dh.SaveWith(nn.Sigmoid(), dh.Functions(*printing)), nn.Linear(8, 1))
thread = threading.Thread(target=lambda: net(torch.randn(5, 3)).sum().backward())
thread.start()
thread.join()
assert calls == ["pack", "unpack"] * 2
report = net[1].report()
assert report.stored == 5 * 8 * 4
assert report.held == 0

x = torch.randn(3, requires_grad=True)
with dh.saving(dh.Functions(*scaling)) as saved:
    y = x**2
y.sum().backward()
assert x.grad is not None
assert torch.equal(x.grad, 2 * x)
print(saved.report())
