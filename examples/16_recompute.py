"""Drop what is cheap to compute again: the same gradients, bit for bit, and fewer bytes."""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks.saved.report import SavedReport


class Gated(nn.Module):
    """RMSNorm, SwiGLU and a residual, as in Llama."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


torch.manual_seed(0)
model = nn.Sequential(*[Gated() for _ in range(3)])
x = torch.randn(4, 64, 128)
weights = list(model.parameters())
truth = torch.autograd.grad(model(x).square().mean(), weights)


def gradients(*stages: object) -> tuple[tuple[torch.Tensor, ...], SavedReport]:
    """The gradients with ``stages``, and what became of the saved tensors."""
    with dh.save_activations(model, "*", *stages, at_least="4 KiB") as saving:
        found = torch.autograd.grad(model(x).square().mean(), weights)
        return found, saving.report()


disk = dh.OnDisk(tempfile.gettempdir())
all_of_it, plain = gradients(disk)
found, report = gradients(dh.Recompute(), disk)
print(report)
assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
assert all(torch.equal(a, b) for a, b in zip(all_of_it, truth, strict=True))
assert report.stored <= plain.stored - report.recomputed < 0.6 * plain.stored
assert "silu" in report.recomputed_by
assert report.differed == {}

# In place: nothing moves, and what can be computed again does not stay in memory either.
found, report = gradients(dh.Recompute(), dh.OnDevice("1 GiB"))
assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
assert (report.moved, report.held) == (0, 0)
assert report.recomputed > 0.4 * plain.stored
print(f"stored {plain.stored} bytes without, {report.stored} with, by {report.recomputed_by}")
