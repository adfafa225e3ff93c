"""Keep what backward needs on disk: files that go with the graph, and a file that never has a name."""

from __future__ import annotations

import os
import tempfile
import uuid

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import disthooks as dh

THRESHOLD = 1000  # elements; a small tensor is not worth a file
folder = tempfile.mkdtemp()


class SelfDeletingFile:
    """A file that goes when the graph lets go of it, so backward may read it as often as it likes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.path = os.path.join(folder, str(uuid.uuid4()))
        torch.save(tensor, self.path)

    def __del__(self) -> None:
        os.remove(self.path)


def pack(tensor: torch.Tensor) -> SelfDeletingFile | torch.Tensor:
    return SelfDeletingFile(tensor) if tensor.numel() >= THRESHOLD else tensor.detach()


def unpack(packed: SelfDeletingFile | torch.Tensor) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else torch.load(packed.path, weights_only=True)


# Plain torch. Unpacking must not delete the file: reading a saved tensor twice is allowed.
small, large = (torch.randn(count, requires_grad=True) for count in (THRESHOLD - 1, THRESHOLD))
with saved_tensors_hooks(pack, unpack):
    y, z = small**2, large**2
assert len(os.listdir(folder)) == 1
for _ in range(2):
    assert torch.equal(z.grad_fn._saved_self, large)
del y, z
assert os.listdir(folder) == []
# What it lacks: killed in between, the process leaves its files; aliases and weights are written in full.

# With disthooks: the file is anonymous from birth, so there is nothing to leave behind.
with dh.saving(dh.AtLeast(THRESHOLD * 4), dh.OnDisk(folder)) as saved:
    y, z = small**2, large**2
assert os.listdir(folder) == []
assert saved.report().moved == saved.report().held == THRESHOLD * 4
for _ in range(2):
    assert torch.equal(z.grad_fn._saved_self, large)
(y.sum() + z.sum()).backward()
assert torch.equal(large.grad, 2 * large)
assert torch.equal(small.grad, 2 * small)
del y, z
assert saved.report().held == 0

# The same around one layer of a model.
net = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), dh.SaveToDisk(nn.Linear(100, 5), folder, at_least=THRESHOLD * 4))
net(torch.randn(64, 10)).sum().backward()
print(net[2].report())
assert net[2].report().moved == 64 * 100 * 4
os.rmdir(folder)
