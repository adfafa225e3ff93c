"""Move only what does not fit: a limit in memory, the rest on disk, and what became of it in the log of the run."""

from __future__ import annotations

import json
import pathlib
import tempfile

import torch
from torch import nn

import disthooks as dh

torch.manual_seed(0)
folder = pathlib.Path(tempfile.mkdtemp())
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(1024, 256)

# Without hooks, for comparison: 16 saved tensors of 1 MiB.
model(x).square().sum().backward()
truth = [parameter.grad.clone() for parameter in model.parameters()]

# Four of them may stay. When a fifth comes, the oldest goes to disk: backward wants it last.
memory = dh.OnDevice("4 MiB")
tiers = dh.Tiered(memory, dh.OnDisk(folder, limit="1 GiB"))
saving = dh.save_activations(model, "", tiers, at_least="64 KiB")
watch = dh.gradients(
    model, optimizer, stats=[dh.stats.Norm()], sinks=[dh.sinks.Jsonl(folder / "run.jsonl")], every=1, also=[saving]
)

optimizer.zero_grad()
loss = model(x).square().sum()
assert memory.budget.held == 4 << 20  # the limit, and not a byte more
in_memory, on_disk = saving.report().tiers
assert in_memory.held + on_disk.held == 16 << 20
loss.backward()
assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), truth, strict=True))
print(saving.report())

# The log of the run has it beside the gradients' norm.
optimizer.step()
del loss
watch.remove()
saving.remove()
(line,) = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
print({name: line[name] for name in ("step", "grad_norm", "saved/stored", "saved/loaded", "saved/unpack_seconds")})
assert line["saved/stored"] == line["saved/loaded"] == 16 << 20
(folder / "run.jsonl").unlink()
folder.rmdir()
