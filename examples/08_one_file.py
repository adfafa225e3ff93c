"""One YAML file says what is saved where and what happens to gradients; two lines of the script attach it."""

from __future__ import annotations

import os
import pathlib
import tempfile

import torch
from torch import nn

import disthooks as dh

FILE = """\
run: $HOOKS_EXAMPLE/run
save:
- modules: blocks.*
  store: {kind: OnDisk, directory: $HOOKS_EXAMPLE}
watch:
  every: 1
  rules: [{kind: SkipNonFinite}, {kind: ClipNorm, max_norm: 0.5}]
  stats: [standard]
  sinks: [{kind: Jsonl, path: "{run}/gradients.jsonl"}]
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


with tempfile.TemporaryDirectory() as folder:
    os.environ["HOOKS_EXAMPLE"] = folder
    file = pathlib.Path(folder, "disthooks.yaml")
    file.write_text(FILE)

    torch.manual_seed(0)
    model = Net()  # or what DDP, FSDP, DeepSpeed or accelerate made of it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attached = dh.prepare(model, optimizer, file)  # the file can also be named by DISTHOOKS_CONFIG
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
    print(attached.report().saved)
    attached.remove()

    lines = pathlib.Path(folder, "run", "gradients.jsonl").read_text().splitlines()
    assert attached.report().moved > 0  # bytes that went to the disk
    assert len(lines) == 3
    assert attached.gradients is not None
    assert attached.gradients.latest["grad_norm_clipped"] <= 0.5001

    # What is wrong is said before anything is attached, with the line and the nearest right name.
    file.write_text(FILE.replace("max_norm", "maxnorm"))
    said = ""
    try:
        dh.config.from_config(file)
    except dh.errors.ConfigError as error:
        said = str(error).replace(folder, "...")
    print(said)
    assert said.startswith(".../disthooks.yaml:7: ")
    assert said.endswith("did you mean 'max_norm'?")

    # And back: objects as a file.
    plan = dh.config.Plan(saves=[("blocks.*", dh.OnDisk(folder))], watches={"rules": [dh.ClipNorm(0.5)]})
    file.write_text(plan.to_yaml())
    assert dh.config.from_config(file).saves == plan.saves
    assert dh.config.from_config(file).to_yaml() == plan.to_yaml()
