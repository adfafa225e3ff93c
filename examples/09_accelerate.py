"""Accelerate on two processes: saved tensors on disk, the gradient norm before your clipping, a log, a checkpoint."""

import json
import pathlib
import tempfile

import torch
from _two import on_two_processes
from torch import nn

CONFIG = {  # or the same in a file: prepare(accelerator, model, optimizer, "hooks.yaml")
    "save": [{"modules": "blocks.*", "store": {"kind": "OnDisk", "directory": tempfile.gettempdir()}}],
    "watch": {"every": 1, "stats": [{"kind": "Norm"}], "rules": [{"kind": "SkipNonFinite"}]},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train(folder: str) -> None:
    from accelerate import Accelerator

    from disthooks.integrations.accelerate import prepare

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, log_with="disthooks", project_dir=folder)
    accelerator.init_trackers("run")
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    hooks = prepare(accelerator, model, optimizer, CONFIG)

    norms = []
    for step in range(4):
        x = torch.randn(512, 64)
        loss = (model(x) - 2 * x).square().mean()
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())  # statistics come before it
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)

    accelerator.save_state(f"{folder}/checkpoint")  # with what the rules have learned, in disthooks.pt
    accelerator.end_training()  # which also waits for the last record
    report = hooks.saving.report()
    hooks.remove()
    assert report.moved > 0
    if accelerator.is_main_process:
        lines = map(json.loads, pathlib.Path(folder, "run", "log.jsonl").read_text().splitlines())
        ours = [line["gradients/grad_norm"] for line in lines if "gradients/grad_norm" in line]
        assert all(abs(mine - theirs) < 1e-6 * theirs for mine, theirs in zip(ours, norms, strict=True))
        assert pathlib.Path(folder, "checkpoint", "disthooks.pt").exists()
        print(f"{report.moved / 2**20:.1f} MiB of saved tensors on disk; gradient norms before clipping: {ours}")


if __name__ == "__main__" and on_two_processes(__file__):
    # Each process has its own temporary folder, and the first one writes.
    with tempfile.TemporaryDirectory() as own:
        train(own)
